"""What a rank says in one line before NCCL or a backward would say it; asked of a machine that is made up."""

import pytest
import torch

from megagrpo.device import device
from megagrpo.errors import UserError


@pytest.fixture
def gpus(monkeypatch):
    """A function (devices, ranks, torch version) that makes this machine one with GPUs."""

    def make(devices: int, ranks: int, version: str = "2.13.0+cu130") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))

    return make


@pytest.mark.parametrize(("devices", "ranks"), [(1, 2), (4, 8)])
def test_more_ranks_than_gpus_is_one_line(gpus, devices, ranks):
    gpus(devices, ranks)
    with pytest.raises(UserError, match=rf"^{ranks} ranks on this host, but it has {devices} GPU"):
        device.setup()


@pytest.mark.parametrize("version", ["2.6.0", "2.8.0+cu128", "2.9.1"])
def test_a_torch_whose_gemms_cannot_add_to_float32_is_refused(gpus, version):
    gpus(8, 8, version)
    with pytest.raises(UserError, match=r"^torch 2\..*: GPUs need 2\.10 or later"):
        device.setup()


def test_each_rank_takes_its_gpu_and_makes_its_communicator_with_the_process_group(gpus):
    gpus(8, 8)
    assert device.setup() == torch.device("cuda", 7)
    assert device.process_group_device() == torch.device("cuda", 7)


def test_cpu_ranks_have_no_communicator_to_make():
    assert device.has_cuda() or device.process_group_device() is None


def test_a_phase_ends_with_what_its_own_stream_was_given(gpus, monkeypatch):
    """And not with the whole device: the next step's rollouts run on a stream beside it."""
    waited = []
    stream = type("Stream", (), {"synchronize": lambda self: waited.append("stream")})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.finish_queued_work()
    assert waited == []
    gpus(1, 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("device"))
    device.finish_queued_work()
    assert waited == ["stream"]
