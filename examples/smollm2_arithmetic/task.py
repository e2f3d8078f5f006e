"""Two-shot addition of a two-digit and a one-digit number, answered by the first line.

The two examples before the question show the form, which the small model needs more than the arithmetic. All
810 questions are listed; one in five, chosen by a hash of its two numbers, is held out.
"""

import random
import zlib

EXAMPLES = "7 + 41 = 48\n36 + 8 = 44\n"
EVAL_PROMPTS = 48


def _rows(held_out: bool) -> list[dict]:
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    chosen = [(a, b) for a, b in pairs if (zlib.crc32(f"{a}+{b}".encode()) % 5 == 0) == held_out]
    return [{"prompt": f"{EXAMPLES}{a} + {b} =", "answer": str(a + b)} for a, b in chosen]


def train_rows() -> list[dict]:
    """Return every question that is not held out, with the sum in column `answer`."""
    return _rows(held_out=False)


def eval_rows() -> list[dict]:
    """Return 48 of the held-out questions, always the same ones."""
    return random.Random(0).sample(_rows(held_out=True), EVAL_PROMPTS)


def reward(prompts, completions) -> list[float]:
    """Return 1.0 for each completion whose first line is the sum and nothing else, 0.0 otherwise.

    Args:
        prompts: list of megagrpo.types.Prompt, one per completion.
        completions: list of megagrpo.types.Completion.
    """
    return [
        float(completion.text.strip().partition("\n")[0].strip() == prompt.columns["answer"])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
