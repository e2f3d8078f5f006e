"""Samples of the policy's completions, whole groups side by side: `completions/step_000010.jsonl`, and
`held_out_000010_SET.jsonl` of the evaluations.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megagrpo.supervision.redaction import redact
from megagrpo.types import Completion, Prompt, Reward

FOLDER = "completions"
MOST_CHARACTERS = 20_000  # a longer text keeps its two ends

Samples = Sequence[tuple[Prompt, Completion, Reward]]


def write_completions(run_dir: Path, step: int, samples: Samples, count: int, held_out: str = "") -> Path:
    """Write whole groups, about `count` completions, evenly spaced over the step's groups; return the file's
    path.

    Each line holds prompt_id, index, prompt, columns (the row's further ones, the gold answer among them),
    completion, reward, parts, outcome, detail (why there is no score), finish_reason, tokens and
    weight_version (of its first token). A file of the same step (from before a resume) is replaced.

    Args:
        run_dir: of the run.
        step: whose they are.
        samples: those of a group one after the other.
        count: completions, rounded up to whole groups; at least one group.
        held_out: name of the evaluation set; empty: the step's own completions.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f"held_out_{step:06d}_{re.sub('[^A-Za-z0-9-]', '-', held_out)}" if held_out else f"step_{step:06d}"
    path = folder / f"{name}.jsonl"
    temporary = path.with_suffix(".tmp")
    groups = list(_groups(samples))
    wanted = -(-count * len(groups) // max(1, len(samples)))
    with temporary.open("w", encoding="utf-8") as file:
        for position in spread(len(groups), wanted):
            for sample in groups[position]:
                file.write(json.dumps(_row(*sample), ensure_ascii=False) + "\n")
    os.replace(temporary, path)
    return path


_OPTIONAL: dict[str, Any] = {"columns": {}, "parts": {}, "outcome": "ok", "detail": "", "finish_reason": ""}
_KINDS: dict[str, Any] = {
    **{name: type(value) for name, value in _OPTIONAL.items()},
    **{"prompt_id": int, "index": int, "tokens": int, "prompt": str, "completion": str},
    "reward": (int, float, type(None)),
}


def read_completions(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files of a run, with `step` and `set` (empty: training) beside what was written.
    Passed over are damaged lines, those without what `show` and the report need, and what is no file.
    """
    for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
        found = re.fullmatch(r"(?:step|held_out)_(\d+)(?:_(.+))?", path.stem)
        if found is None:
            continue
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                row = {**_OPTIONAL, **json.loads(line), "step": int(found[1]), "set": found[2] or ""}
            except (ValueError, TypeError, RecursionError):
                continue
            if all(name in row and isinstance(row[name], kinds) for name, kinds in _KINDS.items()):
                yield row


def spread(length: int, count: int) -> list[int]:
    """Return `min(count, length)` distinct positions, evenly spaced from 0 on.

    Example:
        >>> spread(8, 3)
        [0, 2, 5]
    """
    count = min(count, length)
    return [index * length // count for index in range(count)]


def _groups(samples: Samples) -> Iterator[list[tuple[Prompt, Completion, Reward]]]:
    """Yield the groups: one ends with its prompt, or where its first completion comes again."""
    group: list[tuple[Prompt, Completion, Reward]] = []
    for sample in samples:
        if group and (sample[0].id != group[0][0].id or sample[1].index == group[0][1].index):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _row(prompt: Prompt, completion: Completion, reward: Reward) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "index": completion.index,
        "prompt": _bounded(prompt.text),
        "columns": {name: _bounded(str(value)) for name, value in prompt.columns.items()},
        "completion": _bounded(completion.text),
        "reward": _finite(reward.value),
        "parts": {name: _finite(value) for name, value in {**reward.parts, **reward.subparts}.items()},
        "outcome": reward.outcome,
        "detail": redact(reward.detail),
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "weight_version": completion.weight_versions[0][1] if completion.weight_versions else None,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bounded(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
