"""A bucket is read back exactly, and anything that is not what its manifest says is refused by name."""

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.engines.server.command import HOST_PATH
from megagrpo.wire import bucket_manifest as manifest_module
from megagrpo.wire.bucket_manifest import (
    BucketError,
    BucketManifest,
    TensorEntry,
    build_ack,
    checksum_of,
    is_finite,
    open_tensors,
)


@pytest.fixture
def bucket(tmp_path):
    """Two tensors for every rank and one for rank 1, written as raw bytes."""
    tensors = {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "c.weight": torch.full((2, 2), 7.0),
    }
    raw, entries = b"", []
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        rank = 1 if name == "c.weight" else None
        checksum = f"{zlib.crc32(data):08x}"
        entries.append(
            TensorEntry(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                len(raw),
                len(data),
                checksum,
                rank,
            )
        )
        raw += data
    path = tmp_path / "bucket"
    path.write_bytes(raw)
    return BucketManifest(3, "shared_memory", {"path": str(path)}, "full", tuple(entries)), tensors


def altered(manifest, name, **changes):
    return replace(
        manifest,
        tensors=tuple(
            replace(entry, **changes) if entry.name == name else entry for entry in manifest.tensors
        ),
    )


def test_a_manifest_survives_its_json(bucket):
    manifest, _ = bucket
    assert BucketManifest.from_json(manifest.to_json()) == manifest


def test_each_rank_reads_the_tensors_meant_for_it(bucket):
    manifest, tensors = bucket
    for rank, names in ((0, ["a.weight", "b.weight"]), (1, ["a.weight", "b.weight", "c.weight"])):
        read = dict(open_tensors(manifest, rank))
        assert list(read) == names
        assert all(
            torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype
            for name in names
        )


def test_an_ack_carries_version_checksums_and_bytes(bucket):
    manifest, _ = bucket
    ack = build_ack(manifest, rank=1)
    assert (ack["rank"], ack["version"], ack["bytes"]) == (1, 3, 48 + 4 + 16)
    # 1.5 and -2 in bf16
    assert (
        ack["tensors"]["b.weight"] == f"{zlib.crc32(np.array([0x3FC0, 0xC000], dtype='<u2').tobytes()):08x}"
    )


def test_a_checksum_that_differs_is_refused_with_both_values(bucket):
    manifest, tensors = bucket
    with pytest.raises(BucketError, match=f"'b.weight'.*{checksum_of(tensors['b.weight'])}.*deadbeef"):
        list(open_tensors(altered(manifest, "b.weight", checksum="deadbeef")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(bucket, value):
    manifest, _ = bucket
    path = Path(manifest.location["path"])
    raw = bytearray(path.read_bytes())
    raw[4:8] = np.float32(value).tobytes()
    path.write_bytes(raw)
    with pytest.raises(BucketError, match=r"'a.weight'.*not finite"):
        list(open_tensors(altered(manifest, "a.weight", checksum=f"{zlib.crc32(raw[:48]):08x}")))


def test_fp8_nan_is_found():
    assert is_finite(torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn))  # the format's largest values
    assert not is_finite(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 60}, "bucket of 68"),
        ({"offset": -4}, "bucket of 68"),
        ({"nbytes": 44}, "is 48 bytes.*44"),
        ({"shape": (3, 5)}, "is 60 bytes"),
        ({"dtype": "float33"}, "float33"),
    ],
)
def test_an_entry_that_does_not_fit_its_bucket_is_refused(bucket, changes, message):
    manifest, _ = bucket
    with pytest.raises(BucketError, match=message):
        list(open_tensors(altered(manifest, "a.weight", **changes)))


def test_a_missing_bucket_is_named(bucket):
    manifest, _ = bucket
    with pytest.raises(BucketError, match=r"version 3.*no/such"):
        list(open_tensors(replace(manifest, location={"path": "no/such"})))
    with pytest.raises(BucketError, match="version 3"):
        list(open_tensors(replace(manifest, location={})))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"version": 1}',
        '{"version":1,"transport":"disk","location":{},"layout":"half","tensors":[]}',
    ],
)
def test_a_broken_manifest_is_refused(text):
    with pytest.raises(BucketError, match="bucket manifest"):
        BucketManifest.from_json(text)


def test_an_engine_process_reads_buckets_without_importing_the_trainer(bucket):
    manifest, _ = bucket
    script = (
        "import sys; from megagrpo.wire.bucket_manifest import *; m = BucketManifest.from_json(sys.argv[1])\n"
        "list(open_tensors(m)); print(build_ack(m)['bytes'])"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", script, manifest.to_json()],
        env={**os.environ, "PYTHONPATH": str(HOST_PATH)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == "52", run.stderr


def test_gpu_memory_is_opened_on_the_gpu_that_it_lies_on(bucket, monkeypatch):
    """torch's own call is replaced, as there is no GPU: every field arrives under its name, on the GPU of
    the same UUID.
    """
    import json
    from types import SimpleNamespace

    from megagrpo.weights.transports.ipc import describe_handle

    manifest, tensors = bucket
    memory = torch.frombuffer(bytearray(Path(manifest.location["path"]).read_bytes()), dtype=torch.uint8)
    shared = (
        torch.Tensor,
        memory.shape,
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        0,
        b"h\0\xff",
        512,
        64,
        False,
        b"r",
        3,
        b"e",
        True,
    )
    opened = []
    monkeypatch.setattr(
        manifest_module, "rebuild_cuda_tensor", lambda **fields: (opened.append(fields), memory)[1]
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}")
    )
    by_handle = replace(
        manifest, transport="ipc", location=json.loads(json.dumps(describe_handle(shared, "gpu-1")))
    )
    read = dict(open_tensors(by_handle))
    assert all(torch.equal(read[name], tensors[name]) for name in ("a.weight", "b.weight"))
    (fields,) = opened
    assert (
        fields["storage_device"] == 1
        and fields["tensor_size"] == (68,)
        and fields["storage_handle"] == b"h\0\xff"
    )
    names = (
        "storage_size_bytes",
        "storage_offset_bytes",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    )
    assert [fields[name] for name in names] == [512, 64, b"r", 3, b"e", True]
    with pytest.raises(BucketError, match="gpu-7"):
        list(open_tensors(replace(by_handle, location={**by_handle.location, "device": "gpu-7"})))


def test_a_handle_that_opens_nothing_is_refused(bucket):
    manifest, _ = bucket
    for transport, location in (("ipc", {"device": "gpu-0"}), ("ipc", {}), ("pigeon", {})):
        with pytest.raises(BucketError, match=r"version 3|pigeon"):
            list(open_tensors(replace(manifest, transport=transport, location=location)))
