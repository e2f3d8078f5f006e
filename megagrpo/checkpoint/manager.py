"""Saves, finds, verifies and retires the checkpoints of one run folder. Every method that writes or verifies is collective.

checkpoints/step_000010/
    __0_0.distcp ... .metadata    model and optimizer shards (Megatron-core dist_checkpointing, torch_dist)
    common.pt metadata.json       Megatron's own: parameter groups, format
    trainer_state.json            step, schedule, prompt position, weight version
    config.yaml  hf_files/        the resolved configuration; config.json and tokenizer
    carried/  hf/                 state of single ranks; the same weights as an HF folder, where asked for
    manifest.json                 sizes and checksums of all of these; written last
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megagrpo.checkpoint import folder as names
from megagrpo.checkpoint.agreement import SaveError, on_first_rank
from megagrpo.checkpoint.identity import share_out
from megagrpo.checkpoint.manifest import Manifest, ManifestError, read_manifest, record_file, verify_files, write_manifest
from megagrpo.checkpoint.shards import ShardCollector
from megagrpo.checkpoint.writer import ShardWriter, write_file
from megagrpo.parallel.groups import all_gather_metadata, all_reduce_flag

FREE_MARGIN = 1.05  # of the bytes of the shards: headers, metadata and small files


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beside the shards."""

    manifest: Manifest  # without files
    texts: Mapping[str, str]  # written by the first rank
    own_files: Mapping[str, bytes]  # of this rank
    extras: Callable[[Path], None] = lambda _: None  # writes further files into the folder, on all ranks, while training waits


@dataclass
class Saved:
    """A finished save."""

    path: Path
    num_bytes: int  # of all files
    stall_seconds: float  # training stood still
    write_seconds: float  # of the slowest rank, in the background
    removed: list[str] = field(default_factory=list)


@dataclass
class _Pending:
    writer: ShardWriter
    contents: Contents
    stall_seconds: float


class CheckpointManager:
    """The checkpoints of a run folder."""

    def __init__(self, folder: Path, collector: ShardCollector, retention: names.Retention, asynchronous: bool = True):
        self.folder, self.collector, self.retention, self.asynchronous = folder, collector, retention, asynchronous
        self._pending: _Pending | None = None
        self._validated = False
        self._removal: threading.Thread | None = None  # of retired checkpoints, on the first rank

    def warm_up(self) -> None:
        """Make the host buffers of a save now, so that the first one costs training no more than the others. Collective over all ranks."""
        self.collector.collect()

    @property
    def is_saving(self) -> bool:
        """Say whether a save is being written; the same on all ranks."""
        return self._pending is not None

    def save(self, contents: Contents) -> Saved | None:
        """Start a save; in the background it returns None, otherwise what was saved. An earlier save must be finished.

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
            contents.extras(partial)
            writer = ShardWriter(partial, self.collector.collect(), contents.own_files, validate=not self._validated)
        except SaveError:
            self._discard(partial)
            raise
        self._validated = True
        self._pending = _Pending(writer, contents, 0.0)
        if self.asynchronous:
            writer.start()
        else:
            writer.write()
        self._pending.stall_seconds = time.perf_counter() - started
        return None if self.asynchronous else self.finish()

    def poll(self) -> Saved | None:
        """Finish the save that is being written where all ranks have written their part. Collective over all ranks."""
        if self._pending is None or all_reduce_flag(not self._pending.writer.is_done):
            return None
        return self.finish()

    def finish(self) -> Saved | None:
        """Wait for the save that is being written and give it its name; without one, return None. Collective over all ranks.

        Raises:
            SaveError: on all ranks, where any rank could not write; what was written is removed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        started = time.perf_counter()
        partial = pending.writer.folder
        try:
            records = pending.writer.commit()

            def publish() -> int:
                for name, text in pending.contents.texts.items():
                    write_file(partial / name, text.encode())
                known = {record.name for record in records}
                files = (path for path in sorted(partial.rglob("*")) if path.is_file())
                others = [str(path.relative_to(partial)) for path in files]
                all_records = [*records, *(record_file(partial, name) for name in others if name not in known)]
                write_manifest(partial, replace(pending.contents.manifest, files=all_records))
                names.publish(self.folder, pending.contents.manifest.step)
                return sum(record.size for record in all_records)

            num_bytes = on_first_rank(publish)
        except SaveError:
            self._discard(partial)
            raise
        removed = on_first_rank(self._retire)
        stall = pending.stall_seconds + time.perf_counter() - started
        write_seconds = max(all_gather_metadata(pending.writer.outcome.seconds))
        return Saved(names.checkpoint_path(self.folder, pending.contents.manifest.step), num_bytes, stall, write_seconds, removed)

    def candidates(self) -> list[Path]:
        """Return all folders that have a checkpoint's name, newest first, as the first rank sees them. Collective over all ranks."""
        return on_first_rank(lambda: names.list_named(self.folder)[::-1])

    def examine(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """Read a checkpoint's manifest and check every file against it. Collective over all ranks, which share the files out.

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
        names.remove_leftovers(self.folder)
        if shutil.disk_usage(self.folder).free < needed * FREE_MARGIN:
            self.await_removal()
        free = shutil.disk_usage(self.folder).free
        if free < needed * FREE_MARGIN:
            raise OSError(f"{self.folder}: the checkpoint needs {needed * FREE_MARGIN / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free")
        partial.mkdir()

    def _discard(self, partial: Path) -> None:
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True))

    def _retire(self) -> list[str]:
        complete = {names.step_of(path): path for path in names.list_complete(self.folder)}
        scores: dict[int, float] = {}
        for step, path in complete.items() if self.retention.keep_best else ():
            try:
                score = read_manifest(path).score
            except ManifestError:
                continue  # damaged since: it has no score, and a resume will name it
            if score is not None:
                scores[step] = score
        gone = names.removable(list(complete), scores, self.retention)
        for step in gone:
            names.retire(complete[step])
        self.await_removal()
        # In a thread: a large file takes seconds to remove. What is left of it when the process ends, the next one removes.
        self._removal = threading.Thread(target=lambda: names.remove_retired(self.folder), daemon=True)
        self._removal.start()
        return [complete[step].name for step in gone]

    def await_removal(self) -> None:
        """Wait until retired checkpoints are gone from the disk."""
        if self._removal is not None:
            self._removal.join()
            self._removal = None
