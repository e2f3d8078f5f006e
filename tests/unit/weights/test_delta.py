"""Changed blocks are found bit by bit, wherever a slice lies in the engine's parameter, and laid over the
old tensor exactly.
"""

from dataclasses import replace

import pytest
import torch

from megagrpo.weights.plan.boxes import slices
from megagrpo.weights.selection.change_tracker import BLOCK_ELEMENTS, compare
from megagrpo.wire.bucket_manifest import (
    BucketError,
    BucketManifest,
    TensorEntry,
    checksum_of,
    open_tensors,
)
from megagrpo.wire.held_version import HeldVersion


def sent(tmp_path, old, new, places, grid):
    """The manifest of the changes of a parameter whose parts lie at `places`, and the bytes sent."""
    patches, payload = [], b""
    for place in places:
        ours, theirs = (tensor.view(grid)[slices(place)].contiguous() for tensor in (new, old))
        for patch, blocks in compare(place, grid, ours, theirs):
            patches.append(patch)
            payload += blocks.contiguous().view(torch.uint8).numpy().tobytes()
    path = tmp_path / "bucket"
    path.write_bytes(payload or b"\0")
    checksum = checksum_of(torch.frombuffer(bytearray(payload), dtype=torch.uint8)) if payload else "00000000"
    dtype = str(old.dtype).removeprefix("torch.")
    entry = TensorEntry("w", dtype, tuple(old.shape), 0, len(payload), checksum, 0, tuple(patches))
    return BucketManifest(2, "shared_memory", {"path": str(path)}, "sharded", (entry,)), len(payload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "grid", "places"),
    [
        ((10, 200), (10, 200), [((0, 10), (0, 200))]),
        # columns of a row-parallel weight
        ((10, 200), (10, 200), [((0, 10), (0, 130)), ((0, 10), (130, 200))]),
        ((300,), (300,), [((0, 7),), ((7, 300),)]),
        (
            (3, 8, 50),
            (3, 8, 50),
            [((e, e + 1), (0, 4), (0, 50)) for e in range(3)]
            + [((e, e + 1), (4, 8), (0, 50)) for e in range(3)],
        ),
        ((3, 8, 50), (3, 8, 50), [((e, e + 1), (0, 8), (c, c + 25)) for e in range(3) for c in (0, 25)]),
        ((8, 50), (1, 8, 50), [((0, 1), (0, 8), (0, 50))]),
    ],
)
def test_changes_make_the_old_tensor_into_the_new_one(tmp_path, shape, grid, places, dtype):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(shape, generator=generator).to(dtype)
    for changes in (0, 1, 5, old.numel()):
        new = old.clone()
        new.view(-1)[torch.randperm(old.numel(), generator=generator)[:changes]] += 1.0
        manifest, nbytes = sent(tmp_path, old, new, places, grid)
        manifest = BucketManifest.from_json(manifest.to_json())
        received = dict(open_tensors(manifest, 0, {"w": old}))
        # where nothing changed there is nothing to load
        assert received.keys() == ({"w"} if changes else set())
        assert torch.equal(received.get("w", old), new)
        assert nbytes <= changes * BLOCK_ELEMENTS * dtype.itemsize
        assert (nbytes == 0) == (changes == 0)


def test_bits_are_compared_and_not_values(tmp_path):
    old, new = torch.zeros(100), torch.zeros(100)
    new[3] = -0.0
    manifest, _ = sent(tmp_path, old, new, [((0, 100),)], (100,))
    ((_, received),) = open_tensors(manifest, 0, {"w": old})
    assert torch.signbit(received).tolist() == torch.signbit(new).tolist()


def test_changes_to_a_tensor_that_is_not_there_or_another_are_refused(tmp_path):
    old, new = torch.zeros(100), torch.ones(100)
    manifest, _ = sent(tmp_path, old, new, [((0, 100),)], (100,))
    for current in (None, {}, {"w": torch.zeros(99)}, {"w": torch.zeros(100, dtype=torch.bfloat16)}):
        with pytest.raises(BucketError, match="'w'"):
            list(open_tensors(manifest, 0, current))
    (entry,) = manifest.tensors
    patch = replace(entry.patches[0], start=50)
    with pytest.raises(BucketError, match="of 100"):
        list(
            open_tensors(
                replace(manifest, tensors=(replace(entry, patches=(patch, *entry.patches[1:])),)),
                0,
                {"w": old},
            )
        )
    with pytest.raises(BucketError, match="checksum"):
        list(open_tensors(replace(manifest, tensors=(replace(entry, checksum="00000001"),)), 0, {"w": old}))


def test_the_engines_own_tensor_is_not_written(tmp_path):
    old = torch.zeros(100)
    manifest, _ = sent(tmp_path, old, torch.ones(100), [((0, 100),)], (100,))
    list(open_tensors(manifest, 0, {"w": old}))
    assert not old.any()


def bucket_of(version, base):
    return BucketManifest(version, "shared_memory", {}, "full", (), base)


def test_changes_are_refused_by_an_engine_rank_that_does_not_hold_what_they_are_changes_to():
    held = HeldVersion()
    with pytest.raises(BucketError, match="changes to version 3 came, this engine rank holds version None"):
        held.check(bucket_of(4, 3))
    for version, base in ((3, None), (4, 3)):
        for _ in range(2):  # two buckets
            held.check(bucket_of(version, base))
            held.begin(version)
        held.commit(version)
    with pytest.raises(BucketError, match="changes to version 3 came, this engine rank holds version 4"):
        held.check(bucket_of(5, 3))
    held.check(bucket_of(5, 4))
    held.begin(5)  # and no more of it comes
    with pytest.raises(
        BucketError, match="changes to version 4 came, this engine rank holds parts of version 5"
    ):
        held.check(bucket_of(6, 4))
    held.check(bucket_of(6, None))
