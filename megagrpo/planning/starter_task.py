"""A task to start from: two-shot addition, checked by the first line of the answer. Make it yours."""

import random

EXAMPLES = "7 + 41 = 48\n36 + 8 = 44\n"


def _rows(held_out: bool) -> list[dict]:
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    chosen = [(a, b) for a, b in pairs if ((7 * a + b) % 5 == 0) == held_out]
    return [{"prompt": f"{EXAMPLES}{a} + {b} =", "answer": str(a + b)} for a, b in chosen]


def train_rows() -> list[dict]:
    """Return the training prompts: rows with `prompt` and any further columns, here `answer`."""
    return _rows(held_out=False)


def eval_rows() -> list[dict]:
    """Return 48 prompts that are never trained on."""
    return random.Random(0).sample(_rows(held_out=True), 48)


def reward(prompts, completions) -> list[float]:
    """Return one number a completion; `prompt.columns` has the row's further columns."""
    return [
        float(completion.text.strip().partition("\n")[0].strip() == prompt.columns["answer"])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
