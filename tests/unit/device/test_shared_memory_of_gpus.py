"""GPU memory between trainer and engine, on a device that is made up."""

import pytest
import torch

from megagrpo.device import memory
from megagrpo.engines import base


class Device:
    """141 GB, of which the trainer holds what it uses and what its allocator keeps."""

    def __init__(self, used: int, cached: int):
        self.used, self.cached, self.calls = used, cached, []

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.cached = 0

    def mem_get_info(self) -> tuple[int, int]:
        return 141 - self.used - self.cached, 141


@pytest.fixture
def device(monkeypatch):
    made = Device(used=41, cached=40)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", made.mem_get_info)
    for module in (memory, base):
        monkeypatch.setattr(module, "has_cuda", lambda: True)
    return made


def test_an_engine_is_offered_a_part_of_what_is_free_after_the_cache_is_returned(device):
    """100 of 141 GB are free; 0.85 of them are 85 GB, below what vLLM would refuse."""
    share = memory.share_of_device_memory(0.85)
    assert 0.85 * 100 / 141 - 0.001 <= share <= 0.85 * 100 / 141
    assert share * 141 <= device.mem_get_info()[0]


def test_every_rank_returns_its_memory_before_the_engine_wakes(device, monkeypatch):
    monkeypatch.setattr(base, "all_reduce_flag", lambda flag: device.calls.append("all ranks"))

    class Engine:
        state = "serving"

        def sleep(self) -> None:
            self.state = "asleep"

        def wake(self) -> None:
            device.calls.append("wake")

        def health(self) -> base.EngineHealth:
            return base.EngineHealth(True, self.state, 0)

    with base.asleep(Engine(), wanted=True):
        device.calls.append("update")
    assert device.calls == ["update", "empty_cache", "all ranks", "wake"]


def test_after_an_error_nobody_waits_for_the_other_ranks(device, monkeypatch):
    monkeypatch.setattr(base, "all_reduce_flag", lambda flag: pytest.fail("the others never come"))

    class Engine:
        def sleep(self) -> None: ...
        def wake(self) -> None: ...

        def health(self) -> base.EngineHealth:
            return base.EngineHealth(True, "asleep", 0)

    with pytest.raises(ValueError, match="a spike"), base.asleep(Engine(), wanted=True):
        raise ValueError("a spike")


def test_each_phase_has_a_peak_of_its_own_and_an_inner_one_is_the_outer_ones_too(monkeypatch):
    """The counter is the device's: torch keeps one peak, since it was reset last."""
    counted = {"now": 10, "peak": 10}

    def allocate(size: int) -> None:
        counted["now"] += size
        counted["peak"] = max(counted["peak"], counted["now"])

    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counted["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counted.update(peak=counted["now"]))
    peaks = memory.PeakMemory()
    allocate(100)  # the models are built: no phase
    allocate(-60)
    peaks.enter("rollout")
    allocate(5)
    peaks.leave("rollout", 1.0)
    peaks.enter("update")
    allocate(20)
    peaks.enter("engine_start")
    allocate(50)
    allocate(-60)
    peaks.leave("engine_start", 1.0)
    peaks.leave("update", 1.0)
    assert peaks.take() == {"rollout": 55, "update": 125, "engine_start": 125}
    assert peaks.take() == {}
    assert peaks.largest_bytes == 125


def test_a_cpu_has_no_peaks():
    peaks = memory.PeakMemory()
    peaks.enter("update")
    peaks.leave("update", 1.0)
    assert peaks.take() == {} and peaks.largest_bytes == 0
