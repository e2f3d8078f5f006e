"""`megagrpo doctor` ends with what the machine is ready for, and what stands in the way of more."""

import pytest

from megagrpo.config.hardware import Hardware
from megagrpo.planning.doctor import format_doctor, verdict
from megagrpo.planning.machine import Machine, look_at_machine

CPU = Hardware(torch_cuda=None, nvidia_device=False, transformer_engine=False)
GPU = Hardware(torch_cuda="12.9", nvidia_device=True, transformer_engine=True)
GIB = 2**30


def machine(**found):
    whole = {
        "shared_free": 8 * GIB,
        "disk_free": 100 * GIB,
        "disk_bytes_per_second": 5e8,
        "loopback_error": None,
        "gpus": (),
    }
    return Machine(**whole | found)


def test_the_verdict_names_ranks_and_engines():
    assert verdict(CPU, ["transformers"], []) == ["ready for: CPU ranks over gloo; engines transformers"]
    assert verdict(GPU, ["transformers", "vllm"], ["x"]) == [
        "ready for: GPU ranks over NCCL; engines transformers, vllm; FP8",
        "in the way: x",
    ]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"shared_free": 64 * 2**20}, "--shm-size"),
        ({"shared_free": None}, "--shm-size"),
        ({"disk_free": GIB}, "little disk"),
        ({"disk_bytes_per_second": None}, "can't be written"),
        ({"loopback_error": "refused"}, "refused"),
    ],
)
def test_what_a_run_would_stumble_over_is_told_with_a_way_out(found, told):
    (problem,) = machine(**found).problems()
    assert told in problem


def test_a_machine_that_lacks_nothing_has_no_problem():
    assert machine().problems() == []


def test_gpus_without_a_build_for_them_are_told():
    there = Hardware(torch_cuda=None, nvidia_device=True, transformer_engine=False)
    assert "in the way: there are GPUs, but torch is a CPU build" in format_doctor(there)


def test_looking_leaves_nothing_behind(tmp_path):
    found = look_at_machine(tmp_path)
    assert found.disk_free > 0 and found.disk_bytes_per_second > 0 and found.loopback_error is None
    assert list(tmp_path.iterdir()) == []
    assert any(name == "loopback" and text == "takes connections" for name, text in found.rows())
