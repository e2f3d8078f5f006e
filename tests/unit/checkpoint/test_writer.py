"""What a rank notes of its part of a save is what the first rank reads."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megagrpo.checkpoint.commit import Commit
from megagrpo.checkpoint.manifest import FileRecord
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


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def test_what_a_commit_has_met_is_raised_where_it_is_waited_for(tmp_path, one_rank):
    writer = ShardWriter(tmp_path, SimpleNamespace(file_name="", objects=(), tensors=()), {})
    commit = Commit(tmp_path, writer, contents=None, retention=None)  # no rank has noted anything
    with pytest.raises(FileNotFoundError, match="written"):
        commit.outcome()
    assert commit.is_done
