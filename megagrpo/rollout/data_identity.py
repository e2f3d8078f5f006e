"""Checks that all ranks read the same prompts, and that a resumed run reads those that it read before.

A position in the data means something for the prompts that it was counted in alone. A path says little of
them: its rows may be others by now, or in another order, and a chat template may read the clock.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megagrpo.errors import SharedUserError, UserError
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.types import Prompt

FIELD = "data.source"  # a run that may go on with other prompts names it in run.allow_config_changes


def describe_data(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return, in JSON's types, what tells these prompts from others: their number, a SHA-256 over row numbers
    and token ids in order, and one over the columns that rewards read.
    """
    tokens, columns = hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        tokens.update(np.array([prompt.id, len(prompt.token_ids), *prompt.token_ids], "<i8").tobytes())
        columns.update(_to_json(prompt.columns))
    return {"prompts": len(prompts), "sha256": tokens.hexdigest(), "columns": columns.hexdigest()}


def _to_json(columns: Mapping[str, Any]) -> bytes:
    """Return the columns of a row; of what is no JSON (a user's source may return it), the type alone."""
    return json.dumps(columns, sort_keys=True, default=lambda value: type(value).__name__).encode()


def describe_other_columns(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return one line where the prompts are the same and what rewards read beside them is not; else None."""
    if _is_same(saved, own) and saved["columns"] != own["columns"]:
        return "the prompts are those of the checkpoint, columns that rewards read (answers) are not"
    return None


def describe_other_held_out(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return one line for each held-out set that a checkpoint and a run both have, with other rows.

    Args:
        saved: by name of the set, what `describe_data` returned for it.
        own: of this run.
    """
    lines = []
    for name in sorted(saved.keys() & own.keys()):
        before, now = saved[name], own[name]
        if before != now:
            what = describe_other_columns(before, now) or (
                f"{before['prompts']} prompts in the checkpoint, {now['prompts']} in this run, not the same"
            )
            lines.append(
                f"warning: evaluation set {name}: {what}; eval/{name} before and after does not compare"
            )
    return lines


def _is_same(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return (saved["prompts"], saved["sha256"]) == (own["prompts"], own["sha256"])


def compare_data(
    saved: Mapping[str, Any], own: Mapping[str, Any], source: str, allowed: Sequence[str]
) -> str | None:
    """Return None where a run has the prompts of the checkpoint that it goes on from; where it has others and
    may, one line that says so: their first epoch begins.

    Args:
        saved: of the checkpoint, as `describe_data` returned it.
        own: of this run.
        source: `data.source` of this run.
        allowed: `run.allow_config_changes`.

    Raises:
        UserError: they are others, and neither `data.source` nor `data` is allowed to change.
    """
    if _is_same(saved, own):
        return None
    if saved["prompts"] != own["prompts"]:
        what = f"{saved['prompts']} prompts in the checkpoint, {own['prompts']} in this run"
    else:
        what = (
            f"{own['prompts']} as in the checkpoint, with other tokens or in another order (other rows, or a "
            "chat template that reads the clock)"
        )
    line = (
        f"{FIELD}: {source}: the prompts are not those that the checkpoint's position was counted in: {what}"
    )
    if not {FIELD, FIELD.partition(".")[0]} & set(allowed):
        names = ", ".join([*allowed, FIELD])
        raise UserError(
            f"{line}; bring them back, or begin a first epoch of these: run.allow_config_changes=[{names}]"
        )
    return f"changed: {line}; a first epoch of these begins (allowed by run.allow_config_changes)"


def check_same_on_ranks(sets: Mapping[str, Sequence[Prompt]]) -> None:
    """Compare the prompts that the ranks have read, by the field that names their set. Collective over all
    ranks.

    Raises:
        SharedUserError: on all ranks: some rank has others than the first.
    """
    own = {place: describe_data(prompts) for place, prompts in sets.items()}
    for rank, theirs in enumerate(gathered := all_gather_metadata(own)):
        for place, described in theirs.items():
            if described != gathered[0].get(place):
                raise SharedUserError(
                    f"{place}: rank {rank} has read other prompts than rank 0; rows, and what a chat "
                    "template makes of them, must be the same on every host and not depend on the clock"
                )
