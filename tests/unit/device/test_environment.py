"""Thread settings: each rank gets its share of the cores, the user's own values stay, and they can't come
too late.
"""

import subprocess
import sys

import pytest

from megagrpo.device.environment import (
    describe_crowding,
    set_deterministic_environment,
    set_thread_environment,
    thread_environment,
)


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 2, "2"), (2, 2, "1"), (4, 2, "1"), (4, 64, "16")]
)
def test_ranks_share_the_cores(ranks, cores, threads):
    assert thread_environment(ranks, cores)["OMP_NUM_THREADS"] == threads


def test_values_of_the_user_stay(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    set_thread_environment(2)
    import os

    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("7", "5")


def test_setting_threads_after_torch_is_an_error():
    """The OpenMP runtime has read its settings by then: silence would mean two ranks that spin on each
    other's cores.
    """
    code = "import torch; from megagrpo.device import environment; environment.set_thread_environment(2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "must run before torch is imported" in done.stderr


def test_importing_the_package_and_its_configuration_imports_no_torch():
    code = (
        "import sys, megagrpo.config.load, megagrpo.planning.checks, megagrpo.train; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_the_deterministic_environment_keeps_the_users_values(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_PROTO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    set_deterministic_environment()
    import os

    assert (os.environ["NCCL_ALGO"], os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ("Tree", ":4096:8")


def test_more_ranks_than_cores_are_told_and_as_many_are_not():
    assert describe_crowding(4, 2) == (
        "warning: 4 ranks share the 2 cores of this host, and wait for one another; at most 2 ranks are "
        "faster here"
    )
    assert describe_crowding(2, 2) is None and describe_crowding(1) is None
