"""Samples of what the policy writes: `completions/step_000010.jsonl` in the run folder."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrpo.types import Completion, Prompt, Reward


def write_completions(
    run_dir: Path, step: int, samples: Sequence[tuple[Prompt, Completion, Reward]], count: int
) -> Path:
    """Write `count` of `samples`, evenly spaced over them (so over the step's groups), and return the file's
    path.

    Each line holds prompt_id, index, prompt, completion, reward, parts, outcome, detail (why there is no
    score), finish_reason and tokens. A file of the same step (from before a resume) is replaced.
    """
    folder = run_dir / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for position in spread(len(samples), count):
            file.write(json.dumps(_row(*samples[position]), ensure_ascii=False) + "\n")
    os.replace(temporary, path)
    return path


def spread(length: int, count: int) -> list[int]:
    """Return `min(count, length)` distinct positions, evenly spaced from 0 on.

    Example:
        >>> spread(8, 3)
        [0, 2, 5]
    """
    count = min(count, length)
    return [index * length // count for index in range(count)]


def _row(prompt: Prompt, completion: Completion, reward: Reward) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "index": completion.index,
        "prompt": prompt.text,
        "completion": completion.text,
        "reward": reward.value if math.isfinite(reward.value) else None,
        "parts": {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in {**reward.parts, **reward.subparts}.items()
        },
        "outcome": reward.outcome,
        "detail": reward.detail,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
    }
