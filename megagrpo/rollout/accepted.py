"""Rejection sampling: the completions that pass, as rows of an SFT set.

Every rank writes those that it generated to a part of its own, in the order of the prompts; they are then
merged into one file. A row holds `prompt` and `completion` (texts, as TRL's SFT trainer and others read them)
and `metadata`.
"""

import heapq
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.supervision.run_folder import ACCEPTED
from megagrpo.types import Completion, Prompt, Reward


@dataclass(frozen=True)
class AcceptanceRule:
    """What passes."""

    min_reward: float  # the whole reward, of all functions
    per_prompt: int  # at most so many of a prompt, those with the highest reward, the shorter first; 0: all


@dataclass
class AcceptedCounts:
    """What became of all completions, the same on all ranks but for `kept`."""

    prompts: int = 0
    completions: int = 0
    failed: int = 0  # not scored
    cut: int = 0  # ended by the length limit: never kept, whatever the reward
    passing: int = 0
    solved_prompts: int = 0  # with a completion that passes
    kept: int = 0  # written by this rank: passing, each text of a prompt once, at most `per_prompt`

    def describe(self) -> str:
        """Return one line."""
        return (
            f"{self.kept} completions kept; {self.passing} of {self.completions} pass, {self.cut} were cut "
            f"at the length limit, {self.failed} could not be scored; {self.solved_prompts} of "
            f"{self.prompts} prompts have one that passes"
        )

    def add(self, rollouts: StepRollouts, rule: AcceptanceRule) -> None:
        """Take in rollouts, but for what is kept of them."""
        solved = set()
        for (group, _), record in rollouts.records.items():
            self.failed += record.reward.outcome != "ok"
            self.cut += record.finish_reason == "length"
            if passes(record.reward, record.finish_reason, rule):
                self.passing += 1
                solved.add(group)
        self.prompts += len(rollouts.prompts)
        self.completions += len(rollouts.records)
        self.solved_prompts += len(solved)


def passes(reward: Reward, finish_reason: str, rule: AcceptanceRule) -> bool:
    """Say whether a completion passes: scored, ended by itself, and worth enough."""
    return reward.outcome == "ok" and finish_reason == "stop" and reward.value >= rule.min_reward


def accepted_rows(
    rollouts: StepRollouts, rule: AcceptanceRule, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of this rank's groups, by prompt and draw.

    Args:
        about: what all rows' metadata say beside their own: model, sampling.
    """
    groups: dict[int, list[tuple[Prompt, Completion, Reward]]] = {}
    for key in sorted(rollouts.local):
        sample = (rollouts.prompts[key[0]], rollouts.local[key], rollouts.records[key].reward)
        if passes(sample[2], sample[1].finish_reason, rule):
            groups.setdefault(key[0], []).append(sample)
    for samples in groups.values():
        by_text = {completion.text: None for _, completion, _ in samples}
        distinct = [sample for sample in samples if by_text.pop(sample[1].text, "again") is None]
        best = sorted(distinct, key=lambda sample: (-sample[2].value, len(sample[1].token_ids)))
        chosen = best[: rule.per_prompt or len(best)]
        about_group = {"passing": len(samples), **about}
        yield from (_row(*sample, about_group) for sample in sorted(chosen, key=lambda each: each[1].index))


def part_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's own rows."""
    return folder / f"{ACCEPTED}.part_{rank:05d}"


def merge_parts(folder: Path, num_ranks: int) -> Path:
    """Merge the parts of all ranks into one file, in the order of the prompts, and remove them."""
    parts = [part_file(folder, rank) for rank in range(num_ranks)]
    target = folder / ACCEPTED
    temporary = target.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as merged:
        merged.writelines(heapq.merge(*map(_lines, parts), key=_place))
    os.replace(temporary, target)
    for part in parts:
        part.unlink()
    return target


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a part."""
    with path.open("a", encoding="utf-8") as file:
        # escapes: half of a surrogate pair, which models write, is no UTF-8
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from file


def _place(line: str) -> tuple[int, int]:
    metadata = json.loads(line)["metadata"]
    return metadata["prompt_id"], metadata["index"]


def _row(prompt: Prompt, completion: Completion, reward: Reward, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "completion": completion.text,
        "metadata": {
            "prompt_id": prompt.id,
            "index": completion.index,
            "reward": reward.value,
            "parts": dict(reward.parts),
            "answer": reward.answer,
            "tokens": len(completion.token_ids),
            "columns": dict(prompt.columns),
            **about,
        },
    }
