"""What a rank notes of its part of a save is what the first rank reads."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megagrpo.checkpoint.commit import Commit, Contents
from megagrpo.checkpoint.folder import Retention, list_complete, partial_path
from megagrpo.checkpoint.manager import CheckpointManager, _Pending
from megagrpo.checkpoint.manifest import FileRecord, Manifest
from megagrpo.checkpoint.writer import ShardWriter, WriteOutcome, _format_note, _read_note


def test_a_note_holds_every_shard_and_file():
    results = [
        WriteResult(
            MetadataIndex("a.weight", torch.Size([4, 0]), 1), 96, _StorageInfo("__1_0.distcp", 32, 96)
        ),
        WriteResult(MetadataIndex("extra"), 8, _StorageInfo("__1_0.distcp", 128, 8)),
    ]
    files = [FileRecord("__1_0.distcp", 136, "0a1b2c3d")]
    assert _read_note(_format_note(WriteOutcome(results, files))) == (results, files)


def written(folder: Path, files) -> ShardWriter:
    """A rank's part of a save without shards, written in the background."""
    writer = ShardWriter(folder, SimpleNamespace(file_name="", objects=(), tensors=()), files)
    writer.start()
    writer.wait()
    assert writer.is_done
    return writer


def test_a_rank_writes_its_own_files_in_the_background(tmp_path, one_rank):
    writer = written(tmp_path, {"own/a": b"one", "own/b": b"two"})
    assert writer.problems()[0] == []
    assert (tmp_path / "own" / "b").read_bytes() == b"two"
    assert [record.name for record in writer.outcome.files] == ["own/a", "own/b"]


def test_what_a_rank_could_not_write_is_told_by_the_rank(tmp_path, one_rank):
    writer = written(tmp_path / "not" / "there", {})
    assert writer.problems()[0][0].startswith("rank 0: FileNotFoundError: ")


def manager_of(folder: Path, monkeypatch, ranks: int) -> tuple[CheckpointManager, Path]:
    """The first of `ranks` ranks, whose save of step 3 is written and not committed yet."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: ranks)
    partial = partial_path(folder, 3)
    partial.mkdir(parents=True)
    writer = ShardWriter(partial, SimpleNamespace(file_name="", objects=(), tensors=()), {})
    monkeypatch.setattr(writer, "commit", lambda: [])
    writer.start()
    manager = CheckpointManager(folder, collector=None, retention=Retention(1))
    manifest = Manifest(3, 3, {}, {}, {}, {}, ())
    manager._pending = _Pending(writer, Contents(manifest, {"trainer_state.json": "{}"}, {}))
    return manager, partial


def test_a_save_under_way_is_kept_where_a_rank_fails_and_nobody_can_be_talked_to(
    tmp_path, one_rank, monkeypatch
):
    """The other rank ends its own part while this one waits, and then leaves."""
    manager, partial = manager_of(tmp_path, monkeypatch, ranks=2)
    threading.Timer(0.5, (partial / "written.00001").touch).start()
    manager.keep(seconds=60.0)
    assert [path.name for path in list_complete(tmp_path)] == ["step_000003"]


def test_the_part_of_a_killed_rank_is_not_waited_for_for_ever(tmp_path, one_rank, monkeypatch):
    manager, _ = manager_of(tmp_path, monkeypatch, ranks=2)
    manager.keep(seconds=0.5)
    assert list_complete(tmp_path) == []


def test_without_a_save_under_way_nothing_is_waited_for(tmp_path):
    """A collector that is asked, or a wait, would fail here."""
    CheckpointManager(tmp_path, collector=None, retention=Retention(1)).keep(seconds=60.0)


def test_what_a_commit_has_met_is_raised_where_it_is_waited_for(tmp_path, one_rank):
    writer = ShardWriter(tmp_path, SimpleNamespace(file_name="", objects=(), tensors=()), {})
    commit = Commit(tmp_path, writer, contents=None, retention=None)  # no rank has noted anything
    with pytest.raises(FileNotFoundError, match="written"):
        commit.outcome()
    assert commit.is_done
