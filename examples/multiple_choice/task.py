"""Questions with four options: which of four numbers is the largest."""

import random

LETTERS = "ABCD"
EXAMPLES = ((12, 50, 31, 7), (8, 3, 19, 64))


def _ask(numbers: tuple[int, ...]) -> str:
    options = "\n".join(f"{letter}) {number}" for letter, number in zip(LETTERS, numbers, strict=True))
    return f"Question: Which number is the largest?\n{options}\nAnswer:"


def _answer(numbers: tuple[int, ...]) -> str:
    return LETTERS[numbers.index(max(numbers))]


def _rows(seed: int, count: int, is_held_out: bool) -> list[dict]:
    draws, shown = random.Random(seed), [f"{_ask(each)} {_answer(each)}" for each in EXAMPLES]
    rows: list[dict] = []
    while len(rows) < count:
        numbers = tuple(draws.sample(range(2, 99), 4))
        if (sum(numbers) % 5 == 0) == is_held_out:
            prompt = "\n\n".join([*shown, _ask(numbers)])
            rows.append({"prompt": prompt, "answer": _answer(numbers), "options": list(map(str, numbers))})
    return rows


def train_rows() -> list[dict]:
    """Return 2,000 questions, the right letter in column `answer`."""
    return _rows(0, 2000, is_held_out=False)


def eval_rows() -> list[dict]:
    """Return 64 questions whose numbers no training question has."""
    return _rows(1, 64, is_held_out=True)
