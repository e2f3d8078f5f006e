"""What an engine acknowledges is held against what was sent; a difference names the engine rank, the
tensor and both values.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import check_acks
from megagrpo.weights.acknowledgements import describe_difference
from megagrpo.weights.transports.disk import lay_out_safetensors
from megagrpo.wire.bucket_manifest import (
    BucketManifest,
    TensorEntry,
    build_ack,
    checksum_of,
    open_tensors,
)

ENTRIES = (
    TensorEntry("a", "float32", (2,), 0, 8, "000000aa"),
    TensorEntry("b", "float32", (3,), 64, 12, "000000bb", 1),
)
MANIFEST = BucketManifest(7, "shared_memory", {}, "sharded", ENTRIES)


def acks(**changes):
    both = [build_ack(MANIFEST, rank) for rank in range(2)]
    both[1] = {**both[1], **changes}
    return both


def test_right_acknowledgements_pass():
    check_acks(MANIFEST, acks(), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 6}, "engine rank 1 acknowledged version 6"),
        (
            {"tensors": {"a": "000000aa", "b": "000000cc"}},
            "engine rank 1: b: checksum 000000cc, sent was 000000bb",
        ),
        ({"tensors": {"a": "000000aa"}}, "engine rank 1: b: checksum None, sent was 000000bb"),
        ({"bytes": 8}, "engine rank 1 acknowledged 8 bytes, sent were 20"),
        ({"rank": 5}, "engine rank 1 acknowledged nothing"),
    ],
)
def test_a_wrong_acknowledgement_is_refused_by_name(changes, message):
    with pytest.raises(EngineError, match=f"version 7: {message}"):
        check_acks(MANIFEST, acks(**changes), 2)


def test_planned_slices_are_held_against_the_loaders():
    expected = {(0, "a"): "01", (1, "a"): "02"}
    assert describe_difference(expected, [{"a": "01"}, {"a": "02"}]) is None
    assert describe_difference(expected, [{"a": "01"}, {"a": "03"}]) == (
        "engine rank 1: a: planned 02, the loader made 03"
    )
    assert describe_difference(expected, [{"a": "01", "b": "09"}, {"a": "02"}]) == (
        "engine rank 0: b: planned nothing, the loader made 09"
    )
    assert describe_difference(expected, [{"a": "01"}, {}]) == (
        "engine rank 1: a: planned 02, the loader made nothing"
    )
    assert describe_difference(expected, "it can't tell") == "it can't tell"


def test_a_bucket_on_disk_is_a_safetensors_file_that_maps_in_place(tmp_path):
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(2)]
    entries = [
        TensorEntry(
            f"t{i}",
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            0,
            t.nbytes,
            checksum_of(t),
            0 if i == 2 else None,
        )
        for i, t in enumerate(tensors)
    ]
    header, placed = lay_out_safetensors(entries)
    path = tmp_path / "bucket.safetensors"
    path.write_bytes(header + b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
    with safe_open(path, framework="pt") as file:
        assert all(
            torch.equal(file.get_tensor(name), t)
            for name, t in zip(("t0", "t1", "0/t2"), tensors, strict=True)
        )
    manifest = replace(MANIFEST, transport="disk", location={"path": str(path)}, tensors=placed)
    assert all(torch.equal(read, t) for (_, read), t in zip(open_tensors(manifest, 0), tensors, strict=True))
    assert json.loads(header[8:])["t0"]["data_offsets"] == [0, 60]
