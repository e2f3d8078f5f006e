"""Writes one checkpoint's shards: planned by all ranks, written by each in a thread, committed by all.

plan()     all ranks: who writes what (Megatron's and torch's planners); quick, while training waits
start()    this rank: a thread writes the shards from host memory, forces them to disk and takes their checksums
is_done    asked at every step; file writes and checksums hold no Python lock
commit()   all ranks: the results are gathered and the first rank writes torch's metadata

A thread, because a process that is forked from one with running threads can hang without a word, and the data is in this process.
"""

import inspect
import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megagrpo.checkpoint.agreement import on_first_rank
from megagrpo.checkpoint.manifest import FileRecord, record_file
from megagrpo.parallel.groups import all_gather_metadata


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Plans as Megatron does, and hands the plan out instead of callbacks whose failure on one rank leaves the others waiting."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: Any) -> tuple[FileSystemWriterAsync, Any]:
        return writer, planned[1]


@dataclass
class WriteOutcome:
    """What became of this rank's part."""

    results: list[Any] = field(default_factory=list)  # of torch's planner
    files: list[FileRecord] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class ShardWriter:
    """This rank's part in the writing of one checkpoint."""

    def __init__(self, folder: Path, state: dict[str, Any], own_files: Mapping[str, bytes], validate: bool):
        """Plan. Collective over all ranks.

        Args:
            folder: where to, on a file system that all ranks share.
            state: what `ShardCollector.collect` returned.
            own_files: further files of this rank: name -> contents.
            validate: check over all ranks that every shard is written exactly once; the structure stays the same from save to save,
                so the first save is enough.

        Raises:
            SaveError: on all ranks, where the first one cannot write.
        """
        self.folder, self.own_files = folder, dict(own_files)
        sharded, common = save_preprocess(state, validate)
        common_strategy = get_default_save_common_strategy()
        on_first_rank(lambda: common_strategy.save_common(common, folder))
        strategy = _PlanningStrategy("torch_dist", 1, thread_count=1)
        self.strategy_config = CheckpointingConfig(strategy.backend, strategy.version)
        self.writer, self.metadata = strategy.async_save(sharded, folder)
        self.outcome = WriteOutcome()
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        buckets = self.writer.write_buckets or []
        return sum(tensor.numel() * tensor.element_size() for _, _, (_, tensors) in buckets for _, tensor in tensors)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)  # an exit does not wait: half a save is no save
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Say whether this rank has written its part, or failed to."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for this rank's part."""
        if self._thread is not None:
            self._thread.join()

    def write(self) -> None:
        """Write this rank's part; never raises, see `outcome`."""
        started = time.perf_counter()
        try:
            for number, bucket in enumerate(self.writer.write_buckets or []):
                self.outcome.results += _write_bucket(self.writer, number, bucket)
                self.outcome.files.append(record_file(self.folder, bucket[1]))
            for name, contents in self.own_files.items():
                write_file(self.folder / name, contents)
                self.outcome.files.append(record_file(self.folder, name))
        except Exception as error:  # whatever happens in a thread is told by commit(), on all ranks
            self.outcome.error = f"{type(error).__name__}: {error}"
        self.outcome.seconds = time.perf_counter() - started

    def commit(self) -> list[FileRecord]:
        """Write torch's metadata; return the records of all files that ranks have written. Collective over all ranks.

        Raises:
            SaveError: on all ranks, where any of them could not write.
        """
        self.wait()
        outcomes: list[WriteOutcome] = all_gather_metadata(self.outcome)
        problems = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]

        def finish() -> None:
            if problems:
                raise OSError("; ".join(problems))
            self.writer.finish(self.metadata, [outcome.results for outcome in outcomes])
            (self.folder / CONFIG_FNAME).write_text(json.dumps(asdict(self.strategy_config)))

        on_first_rank(finish)
        return [record for outcome in outcomes for record in outcome.files]


def write_file(path: Path, contents: bytes) -> None:
    """Write a file and force it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def _write_bucket(writer: FileSystemWriterAsync, number: int, bucket: Any) -> list[Any]:
    reported: queue.Queue = queue.Queue()
    counted: queue.Queue = queue.Queue()
    counted.put(number)
    # Unwrapped: Megatron's decorator turns the garbage collector off, for a forked process; here it would be training's too, for the
    # whole time of a write.
    write = inspect.unwrap(writer.write_preloaded_data)
    write([writer.transforms], number, bucket, reported, counted, use_fsync=True)
    _, outcome = reported.get_nowait()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
