"""Writes one checkpoint's shards, each rank its own, in a thread.

start()     this rank: a thread writes the shards from host memory with their checksums, and forces them to
            disk
is_done     asked at every step; file writes and checksums hold no Python lock
problems()  all ranks: what any of them has met
commit()    first rank: what the others have noted is read, and torch's and Megatron's metadata are written

A thread, because a process that is forked from one with running threads can hang without a word, and the data
is in this process.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megagrpo.checkpoint.manifest import ChecksummedFile, FileContents, FileRecord, write_file
from megagrpo.checkpoint.plan import ShardPlan
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.groups import all_gather_metadata

NICENESS = 10  # the thread's: where cores are scarce, training gets ten times as much of them
_NOTES = "written.{rank:05d}"  # what a rank tells the first one of its part; not part of the checkpoint


@dataclass
class WriteOutcome:
    """What became of this rank's part."""

    results: list[WriteResult] = field(default_factory=list)  # where each shard is
    files: list[FileRecord] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class ShardWriter:
    """This rank's part in the writing of one checkpoint."""

    def __init__(self, folder: Path, plan: ShardPlan, own_files: Mapping[str, FileContents]):
        """Take what this rank writes; nothing is written yet.

        Args:
            folder: where to, on a file system that all ranks share.
            plan: this rank's shards.
            own_files: further files of this rank: name -> contents.
        """
        self.folder, self.plan, self.own_files = folder, plan, dict(own_files)
        self.outcome = WriteOutcome()
        self._work: BackgroundWork[None] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._work = BackgroundWork(self._run, "checkpoint")

    def _run(self) -> None:
        yield_to_training()
        self.write()

    @property
    def is_done(self) -> bool:
        """Say whether this rank has written its part, or failed to."""
        return self._work is None or self._work.wait(seconds=0.0)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for this rank's part, at most `seconds`."""
        if self._work is not None:
            self._work.wait(seconds)

    @property
    def is_written_by_all(self) -> bool:
        """Say whether every rank has noted that its part is on disk, as the shared folder shows it."""
        notes = (self.folder / _NOTES.format(rank=rank) for rank in range(dist.get_world_size()))
        return all(note.is_file() for note in notes)

    def write(self) -> None:
        """Write this rank's part; never raises, see `outcome`."""
        started = time.perf_counter()
        try:
            if self.plan.file_name:
                self._write_shards()
            self.outcome.files += [
                write_file(self.folder, name, contents) for name, contents in self.own_files.items()
            ]
            note = self.folder / _NOTES.format(rank=dist.get_rank())
            unfinished = note.with_name(f".{note.name}")
            unfinished.write_text(_format_note(self.outcome))
            unfinished.rename(note)  # one that is there is whole
        except Exception as error:  # whatever happens in a thread is told by problems(), on all ranks
            self.outcome.error = f"{type(error).__name__}: {error}"
        self.outcome.seconds = time.perf_counter() - started

    def _write_shards(self) -> None:
        with ChecksummedFile(self.folder, self.plan.file_name) as file, _without_checksums_of_torch():
            for item, data in (*self.plan.objects, *self.plan.tensors):
                start = file.tell()
                if isinstance(data, torch.Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                self.outcome.results.append(
                    WriteResult(item.index, length, _StorageInfo(self.plan.file_name, start, length))
                )
        self.outcome.files.append(file.record())

    def problems(self) -> tuple[list[str], float]:
        """Return what any rank has met, and the seconds of the slowest. All must be done. Collective over
        all ranks.
        """
        gathered = all_gather_metadata((self.outcome.error, self.outcome.seconds))
        return [f"rank {rank}: {error}" for rank, (error, _) in enumerate(gathered) if error], max(
            seconds for _, seconds in gathered
        )

    def commit(self) -> list[FileRecord]:
        """Write the metadata; return the records of it and of all files that ranks have written. First
        rank only; all must be done.
        """
        notes = [self.folder / _NOTES.format(rank=rank) for rank in range(dist.get_world_size())]
        parts = [_read_note(path.read_text()) for path in notes]
        FileSystemWriter(self.folder).finish(self.plan.metadata, [results for results, _ in parts])
        for path in notes:
            path.unlink()
        own = [
            write_file(self.folder, COMMON_STATE_FNAME, self.plan.common),
            write_file(self.folder, CONFIG_FNAME, json.dumps(self.plan.strategy).encode()),
        ]
        return own + [record for _, files in parts for record in files]


def _format_note(outcome: WriteOutcome) -> str:
    """Return what `_read_note` reads: where each shard is, and the files."""
    shards = [
        [
            each.index.fqn,
            each.index.offset,
            each.index.index,
            each.size_in_bytes,
            each.storage_data.relative_path,
            each.storage_data.offset,
        ]
        for each in outcome.results
    ]
    return json.dumps({"shards": shards, "files": [astuple(each) for each in outcome.files]})


def _read_note(text: str) -> tuple[list[WriteResult], list[FileRecord]]:
    note = json.loads(text)
    results = []
    for name, offset, number, length, file_name, start in note["shards"]:
        index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
        results.append(WriteResult(index, length, _StorageInfo(file_name, start, length)))
    return results, [FileRecord(*each) for each in note["files"]]


def yield_to_training() -> None:
    """Let the kernel prefer other threads to the calling one."""
    if sys.platform == "linux":  # elsewhere this is the whole process's niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextlib.contextmanager
def _without_checksums_of_torch() -> Iterator[None]:
    """Save tensors without torch's own checksum of each: the manifest has one of the whole file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
