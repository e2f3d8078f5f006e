"""Brings full tensors to engines of every kind: embedded ones load them, servers take them in files of shared
memory.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megagrpo.supervision.orphaned_files import hold
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry, checksum_of
from megagrpo.wire.shared_files import PREFIX, SHARED_MEMORY

_BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 64  # bytes: a tensor's first one, for any dtype and for whole cache lines


def load(engine, named_tensors):
    """Give an engine tensors of its open update, in as many buckets as they need; none of them are an empty
    one.
    """
    if engine.is_embedded:
        engine.load(named_tensors)
        return
    version = engine.opened_version or 0
    for bucket in list(fill_buckets(named_tensors, _BUCKET_BYTES)) or [[]]:
        with bucket_file(version, bucket) as manifest:
            engine.receive(manifest)


def fill_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield copies on the CPU in buckets of at most `bucket_bytes`; a larger tensor has one of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        # the sender may overwrite it when the next one is taken
        bucket.append((name, tensor.detach().to("cpu", copy=True)))
        filled += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def bucket_file(version: int, bucket: list[tuple[str, torch.Tensor]]) -> Iterator[BucketManifest]:
    """Write a bucket; it is there while the context lasts.

    Raises:
        OSError: the shared memory is full.
    """
    entries, offset = [], 0
    for name, tensor in bucket:
        entries.append(
            TensorEntry(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                offset,
                tensor.nbytes,
                checksum_of(tensor),
            )
        )
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    handle, path = tempfile.mkstemp(prefix=f"{PREFIX}bucket_", dir=SHARED_MEMORY)
    try:
        with open(handle, "r+b") as file:
            hold(handle)
            # full shared memory raises here, not as SIGBUS later
            os.posix_fallocate(file.fileno(), 0, max(offset, 1))
            with mmap.mmap(file.fileno(), 0) as mapped:
                for entry, (_, tensor) in zip(entries, bucket, strict=True):
                    mapped[entry.offset : entry.offset + entry.nbytes] = (
                        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    )
            yield BucketManifest(version, "shared_memory", {"path": path}, "full", tuple(entries))
    finally:
        os.unlink(path)
