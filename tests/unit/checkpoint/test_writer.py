"""What a rank notes of its part of a save is what the first rank reads."""

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megagrpo.checkpoint.manifest import FileRecord
from megagrpo.checkpoint.writer import WriteOutcome, _format_note, _read_note


def test_a_note_holds_every_shard_and_file():
    results = [
        WriteResult(
            MetadataIndex("a.weight", torch.Size([4, 0]), 1), 96, _StorageInfo("__1_0.distcp", 32, 96)
        ),
        WriteResult(MetadataIndex("extra"), 8, _StorageInfo("__1_0.distcp", 128, 8)),
    ]
    files = [FileRecord("__1_0.distcp", 136, "0a1b2c3d")]
    assert _read_note(_format_note(WriteOutcome(results, files))) == (results, files)
