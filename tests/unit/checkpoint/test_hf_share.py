"""What the ranks write of an export is together what one process would have written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.checkpoint.hf_share import collect_share
from megagrpo.checkpoint.manifest import verify_files, write_file
from megagrpo.checkpoint.staging import Staging

TENSORS = {
    "embed": torch.arange(64.0).view(8, 8),
    "norm": torch.ones(3, dtype=torch.bfloat16) / 3,
    "up": torch.randn(5, 7),
    "down": torch.randn(7, 5).to(torch.float16),
    "head": torch.randn(1),
}


def reused_memory():
    """Each tensor in the memory of the one before, as an exporter's buckets are."""
    memory = torch.empty(1024, dtype=torch.uint8)
    for name, tensor in TENSORS.items():
        place = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        yield name, place.copy_(tensor)
        memory.fill_(255)


@pytest.mark.parametrize(
    ("world_size", "share_bytes", "files"),
    [(1, 16, 1), (2, 1 << 20, 1), (2, 100, 2), (3, 150, 3), (4, 300, 2)],
)
def test_the_shares_of_all_ranks_are_the_whole_folder(tmp_path, world_size, share_bytes, files):
    for rank in range(world_size):
        share = collect_share(reused_memory(), Staging(), rank, world_size, share_bytes)
        assert (
            verify_files(tmp_path, [write_file(tmp_path, name, contents) for name, contents in share.items()])
            == []
        )
    paths = sorted((tmp_path / "hf").glob("*.safetensors"))
    loaded = {path.name: load_file(path) for path in paths}
    assert len(paths) == files
    found = {name: tensor for tensors in loaded.values() for name, tensor in tensors.items()}
    assert sum(len(tensors) for tensors in loaded.values()) == len(TENSORS)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )
    if files == 1:
        assert [path.name for path in paths] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, tensors in loaded.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(
            tensor.numel() * tensor.element_size() for tensor in TENSORS.values()
        )
