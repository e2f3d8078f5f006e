"""Saves, finds, verifies and retires the checkpoints of one run folder. Every method that writes or verifies
is collective.

checkpoints/step_000010/
    __0_0.distcp ... .metadata    model and optimizer shards (Megatron-core dist_checkpointing, torch_dist)
    common.pt metadata.json       Megatron's own: parameter groups, format
    trainer_state.json            step, schedule, prompt position, weight version
    config.yaml  hf_files/        the resolved configuration; config.json and tokenizer
    carried/  hf/                 state of single ranks; the same weights as an HF folder, where asked for
    manifest.json                 sizes and checksums of all of these; written last
"""

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megagrpo.checkpoint import folder as names
from megagrpo.checkpoint.commit import Commit, Contents
from megagrpo.checkpoint.identity import share_out
from megagrpo.checkpoint.manifest import Manifest, ManifestError, read_manifest, verify_files
from megagrpo.checkpoint.plan import ShardPlanner
from megagrpo.checkpoint.shards import ShardCollector
from megagrpo.checkpoint.writer import ShardWriter, yield_to_training
from megagrpo.parallel import agreement
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.groups import all_gather_metadata, all_reduce_flag

T = TypeVar("T")


class SaveError(Exception):
    """A checkpoint could not be written: a full or read-only disk, a failed rank. The run can go on; older
    checkpoints are untouched.
    """


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks. Collective over all ranks.

    Raises:
        SaveError: on all ranks, where rank 0 met anything but a UserError.
        UserError: on all ranks, where rank 0 met one.
    """
    return agreement.on_first_rank(action, SaveError)


KEEP_POLL_SECONDS = 0.1
FREE_MARGIN = 1.05  # free space that a save needs, per byte of its shards: small files come on top


@dataclass
class Saved:
    """A finished save."""

    path: Path
    num_bytes: int  # all files together
    stall_seconds: float  # how long training stood still
    write_seconds: float  # the slowest rank's, in the background
    removed: list[str] = field(default_factory=list)


@dataclass
class _Pending:
    writer: ShardWriter
    contents: Contents
    stall_seconds: float = 0.0
    write_seconds: float | None = None  # the slowest rank's; None: not all of them are known to have written
    commit: Commit | None = None  # on the first rank, once all have

    @property
    def is_idle(self) -> bool:
        """Say whether nothing of it is under way on this rank."""
        return self.writer.is_done and (self.commit is None or self.commit.is_done)

    def commit_outcome(self) -> tuple[int, list[str]]:
        """See Commit.outcome; first rank, once it has begun."""
        assert self.commit is not None
        return self.commit.outcome()


class CheckpointManager:
    """The checkpoints of a run folder."""

    def __init__(
        self, folder: Path, collector: ShardCollector, retention: names.Retention, asynchronous: bool = True
    ):
        self.folder, self.collector, self.retention, self.asynchronous = (
            folder,
            collector,
            retention,
            asynchronous,
        )
        self._planner = ShardPlanner()
        self._pending: _Pending | None = None
        self._removal: BackgroundWork[None] | None = None  # removes retired checkpoints, on the first rank

    def warm_up(self) -> None:
        """Make the host buffers and the plan of a save now, so that the first one costs training no more than
        the others.

        Collective over all ranks.
        """
        self._planner.plan(self.collector.collect())

    @property
    def is_saving(self) -> bool:
        """Say whether a save is being written; the same on all ranks."""
        return self._pending is not None

    def save(self, contents: Contents) -> Saved | None:
        """Start a save; in the background it returns None, otherwise what was saved. An earlier save must be
        finished.

        Collective over all ranks.

        Raises:
            SaveError: on all ranks; what was written is removed, older checkpoints are untouched.
        """
        assert self._pending is None, "finish the save before"
        started = time.perf_counter()
        partial = names.partial_path(self.folder, contents.manifest.step)
        try:
            needed = sum(all_gather_metadata(self.collector.num_bytes))
            on_first_rank(lambda: self._prepare(partial, needed))
            own_files = {**contents.own_files, **contents.collect()}
            writer = ShardWriter(partial, self._planner.plan(self.collector.collect()), own_files)
        except SaveError:
            self._discard(partial)
            raise
        self._pending = _Pending(writer, contents)
        if self.asynchronous:
            writer.start()
        else:
            writer.write()
        self._pending.stall_seconds = time.perf_counter() - started
        return None if self.asynchronous else self.finish()

    def poll(self) -> Saved | None:
        """Advance the save that is being written where no rank is busy with it; return it once it is
        complete.

        Collective over all ranks.

        Raises:
            SaveError: on all ranks, where any rank could not write; what was written is removed.
        """
        if self._pending is None or all_reduce_flag(not self._pending.is_idle):
            return None
        return self._advance()

    def finish(self) -> Saved | None:
        """Wait for the save that is being written; without one, return None. Collective over all ranks.
        Raises as `poll` does.
        """
        saved = None
        while self._pending is not None:
            started = time.perf_counter()
            self._pending.writer.wait()
            self._pending.stall_seconds += time.perf_counter() - started
            saved = self._advance()
        return saved

    def keep(self, seconds: float) -> None:
        """Bring a save that is being written to disk where a rank has failed, so that nobody can be talked
        to: this rank's part, and on the first rank the whole, once all parts are there.

        For a rank that leaves right after it. Waits `seconds` at most: the part of a rank that was killed
        never comes.
        """
        if (pending := self._pending) is None:
            return
        deadline = time.monotonic() + seconds
        pending.writer.wait(seconds)
        while dist.get_rank() == 0 and time.monotonic() < deadline:
            if pending.commit is not None:
                pending.commit.wait(deadline - time.monotonic())
                return
            if pending.writer.is_written_by_all:
                pending.commit = Commit(self.folder, pending.writer, pending.contents, self.retention)
            else:
                time.sleep(KEEP_POLL_SECONDS)

    def _advance(self) -> Saved | None:
        """Begin to commit the save once all ranks have written, or end it once that is done; waits for
        what is under way.
        """
        assert self._pending is not None
        started, pending, partial = time.perf_counter(), self._pending, self._pending.writer.folder
        try:
            if pending.write_seconds is None:
                problems, pending.write_seconds = pending.writer.problems()
                if problems:
                    raise SaveError("; ".join(problems))
                if dist.get_rank() == 0:
                    pending.commit = Commit(self.folder, pending.writer, pending.contents, self.retention)
                pending.stall_seconds += time.perf_counter() - started
                return None
            num_bytes, removed = on_first_rank(pending.commit_outcome)
        except SaveError:
            self._pending = None
            self._discard(partial)
            raise
        self._pending = None
        if dist.get_rank() == 0:
            # In a thread: a large file takes seconds to remove. What is left of it when the process ends, the
            # next one removes.
            before = self._removal
            self._removal = BackgroundWork(lambda: self._remove_retired(before), "remove checkpoints")
        stall = pending.stall_seconds + time.perf_counter() - started
        path = names.checkpoint_path(self.folder, pending.contents.manifest.step)
        return Saved(path, num_bytes, stall, pending.write_seconds, removed)

    def candidates(self) -> list[Path]:
        """Return all folders that have a checkpoint's name, newest first, as the first rank sees them.
        Collective over all ranks.
        """

        def look() -> list[str]:
            names.finish_publishing(self.folder)
            return [path.name for path in names.list_named(self.folder)[::-1]]

        return [self.folder / name for name in on_first_rank(look)]

    def examine(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """Read a checkpoint's manifest and check every file against it. Collective over all ranks, which
        share the files out.

        Returns:
            The manifest (None where it cannot be read), and everything that is wrong.
        """

        def read() -> Manifest | str:
            try:
                return read_manifest(path)
            except ManifestError as error:
                return str(error)

        manifest = on_first_rank(read)
        if isinstance(manifest, str):
            return None, [manifest]
        found = all_gather_metadata(verify_files(path, share_out(list(manifest.files))))
        return manifest, [problem for part in found for problem in part]

    def set_aside(self, paths: Iterable[Path]) -> list[str]:
        """Rename damaged checkpoints to `.bad` and return their new names. Collective over all ranks."""

        def rename() -> list[str]:
            renamed = [names.set_aside(path).name for path in paths]
            names.point_latest(self.folder)
            return renamed

        return on_first_rank(rename)

    def _prepare(self, partial: Path, needed: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names.finish_publishing(self.folder)
        names.remove_leftovers(self.folder)
        if shutil.disk_usage(self.folder).free < needed * FREE_MARGIN:
            self.await_removal()
        free = shutil.disk_usage(self.folder).free
        if free < needed * FREE_MARGIN:
            raise OSError(
                f"{self.folder}: the checkpoint needs {needed * FREE_MARGIN / 2**20:.0f} MiB, "
                f"{free / 2**20:.0f} MiB are free"
            )
        partial.mkdir()

    def _discard(self, partial: Path) -> None:
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True))

    def _remove_retired(self, before: BackgroundWork[None] | None) -> None:
        yield_to_training()
        if before is not None:
            before.wait()
        names.remove_retired(self.folder)

    def await_removal(self) -> None:
        """Wait until retired checkpoints are gone from the disk."""
        if self._removal is not None:
            self._removal.wait()
            self._removal = None
