"""Handles of GPU memory: what may be in them, and how a bucket is cut. Opening one needs a GPU."""

import base64
import os
import pickle
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megagrpo.rollout.engines.host.cuda_ipc import cut, read_handle
from megagrpo.rollout.engines.host.manifest import BucketManifest, ManifestError, TensorEntry, checksum_of


def handle_of(value):
    return base64.b64encode(pickle.dumps(value)).decode()


def test_a_handle_holds_the_function_that_opens_it_and_its_arguments():
    arguments = (torch.Tensor, torch.Size([8]), (1,), 0, torch.UntypedStorage, torch.uint8, 3, b"handle", 8, 0, b"counter", 0, b"", False)
    function, read = read_handle(handle_of((rebuild_cuda_tensor, arguments)))
    assert function is rebuild_cuda_tensor and read == list(arguments)


@pytest.mark.parametrize(("value", "named"), [((os.system, ("true",)), "system"), ((print, ()), "print")])
def test_anything_else_is_refused_unopened(value, named):
    with pytest.raises(ManifestError, match=rf"{named} is not part of one"):
        read_handle(handle_of(value))


def test_a_bucket_is_cut_into_the_tensors_of_one_engine_rank_and_each_is_checked():
    whole, slices = torch.randn(3, 4), (torch.randn(2), torch.randn(2))
    memory = torch.cat([whole.reshape(-1), *slices]).view(torch.uint8)
    entries = [TensorEntry("a", "float32", (3, 4), 0, 48, checksum_of(whole), None)]
    entries += [TensorEntry("b", "float32", (2,), 48 + 8 * rank, 8, checksum_of(part), rank) for rank, part in enumerate(slices)]
    manifest = BucketManifest(1, "ipc", {}, "sharded", tuple(entries))
    for rank in range(2):
        found = dict(cut(memory, manifest, rank))
        assert torch.equal(found["a"], whole) and torch.equal(found["b"], slices[rank])
        assert found["a"].data_ptr() == memory.data_ptr()  # nothing is copied
    with pytest.raises(ManifestError, match="'a': checksum"):
        list(cut(memory, replace(manifest, tensors=(replace(entries[0], checksum="0"),)), 0))
    with pytest.raises(ManifestError, match="48 bytes at 32 of a bucket of 64"):
        list(cut(memory, replace(manifest, tensors=(replace(entries[0], offset=32),)), 0))
