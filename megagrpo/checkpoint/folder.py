"""The names in `checkpoints/`, and which checkpoints stay. Pure: the file system and arithmetic only; rank 0
changes things.

step_000010/           complete: it has a manifest, and its name appeared by a rename
step_000010.partial/   being written, or left by a run that was killed; removed by the next save
step_000010.old/       retired, or replaced by a later save of the same step; being removed
step_000010.bad/       was found damaged by a resume; never read again, never counted, never removed
latest                 symbolic link to the newest complete one, moved by a rename; where the file system has
                       no links, a file that holds its name. For people alone: nothing here reads it
"""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megagrpo.checkpoint.manifest import MANIFEST

LATEST = "latest"
_COMPLETE = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay; the newest complete one always does."""

    keep_last: int
    keep_every: int = 0  # steps; every checkpoint of a multiple of it stays; 0: none
    keep_best: int = 0  # how many of those with the best evaluation stay
    best_mode: Literal["max", "min"] = "max"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the place of a complete checkpoint."""
    return folder / f"step_{step:06d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the place of a checkpoint that is being written."""
    return folder / f"step_{step:06d}.partial"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's path."""
    match = _COMPLETE.match(path.name)
    assert match, path
    return int(match.group(1))


def list_named(folder: Path) -> list[Path]:
    """Return all folders with a complete checkpoint's name, oldest first, with a manifest or not."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()), key=step_of
    )


def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [path for path in list_named(folder) if (path / MANIFEST).is_file()]


def finish_publishing(folder: Path) -> None:
    """Finish the renames of saves that were complete when the process was killed: between the two renames of
    `publish` an older save of the step is under `.old` and the new one under `.partial`.
    """
    for partial in sorted(folder.glob("*.partial")):
        target = partial.with_suffix("")
        if (partial / MANIFEST).is_file() and not target.exists():
            partial.rename(target)


def remove_leftovers(folder: Path) -> None:
    """Remove what unfinished saves have left."""
    for leftover in folder.glob("*.partial"):
        shutil.rmtree(leftover)


def remove_retired(folder: Path) -> None:
    """Remove what `retire` has renamed, now or before the process was killed; what cannot be removed is
    tried again the next time.
    """
    for retired in folder.glob("*.old"):
        shutil.rmtree(retired, ignore_errors=True)


def publish(folder: Path, step: int) -> Path:
    """Give a finished checkpoint its name and move `latest` to it; every step is atomic, and
    `finish_publishing` completes what was cut off between two of them.
    """
    partial, target = partial_path(folder, step), checkpoint_path(folder, step)
    _sync_folder(partial)
    if target.exists():
        target.rename(target.with_name(target.name + ".old"))
    partial.rename(target)
    _sync_folder(folder)
    point_latest(folder)
    shutil.rmtree(target.with_name(target.name + ".old"), ignore_errors=True)
    return target


def point_latest(folder: Path) -> None:
    """Let `latest` name the newest complete checkpoint; without any it is removed.

    Never raises: a checkpoint is whole without it.
    """
    link, complete = folder / LATEST, list_complete(folder)
    with contextlib.suppress(OSError):
        if not complete:
            link.unlink(missing_ok=True)
            return
        temporary = folder / f"{LATEST}.new"
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(complete[-1].name)
        except OSError:  # no symbolic links here
            temporary.write_text(f"{complete[-1].name}\n")
        os.replace(temporary, link)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither read nor counted again; what it holds stays for a
    look at it.
    """
    target = path.with_name(path.name + ".bad")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)
    return target


def retire(path: Path) -> Path:
    """Rename a checkpoint that goes, at once and atomically; it is no checkpoint any more, and its removal
    may take its time.
    """
    target = path.with_name(path.name + ".old")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)
    return target


def removable(steps: Sequence[int], scores: Mapping[int, float], retention: Retention) -> list[int]:
    """Return the steps whose checkpoints go.

    Args:
        steps: of all complete checkpoints.
        scores: evaluation metric of the steps that have one.
        retention: what stays.
    """
    ordered = sorted(steps)
    stays = set(ordered[-max(1, retention.keep_last) :])
    if retention.keep_every:
        stays |= {step for step in ordered if step % retention.keep_every == 0}
    if retention.keep_best:
        sign = -1.0 if retention.best_mode == "max" else 1.0
        ranked = sorted(
            (step for step in ordered if step in scores), key=lambda step: (sign * scores[step], -step)
        )
        stays |= set(ranked[: retention.keep_best])
    return [step for step in ordered if step not in stays]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
