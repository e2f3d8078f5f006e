"""The quickstart task: sort the four digits of a prompt, `^4192=` -> `1249$`.

All 10,000 prompts are listed; the ones whose CRC-32 is a multiple of ten are held out, so the training rows
and the evaluation rows never meet, whatever is sampled. The same functions give the rows to the training run
and to the script that makes the model.
"""

import random
import zlib

EVAL_PROMPTS = 256
END = "$"  # the tokenizer's end-of-sequence character


def _rows(held_out: bool) -> list[dict]:
    prompts = [f"^{number:04d}=" for number in range(10_000)]
    chosen = [prompt for prompt in prompts if (zlib.crc32(prompt.encode()) % 10 == 0) == held_out]
    return [{"prompt": prompt, "answer": "".join(sorted(prompt[1:5]))} for prompt in chosen]


def train_rows() -> list[dict]:
    """Return every prompt that is not held out, with its sorted digits in column `answer`."""
    return _rows(held_out=False)


def eval_rows() -> list[dict]:
    """Return 256 of the held-out prompts, always the same ones."""
    return random.Random(0).sample(_rows(held_out=True), EVAL_PROMPTS)


def reward(prompts, completions) -> list[float]:
    """Return 1.0 for each completion that is the sorted digits and then stops, 0.0 otherwise.

    Args:
        prompts: list of megagrpo.types.Prompt, one per completion.
        completions: list of megagrpo.types.Completion.
    """
    return [
        float(
            completion.finish_reason == "stop"
            and completion.text.removesuffix(END) == prompt.columns["answer"]
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
