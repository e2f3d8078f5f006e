"""Thread and OpenMP settings of a rank. They are read once, when torch is loaded: set them before that. No
torch here.
"""

import os
import sys


def thread_environment(local_world_size: int, cpu_count: int | None = None) -> dict[str, str]:
    """Return the environment that keeps `local_world_size` ranks from fighting over the cores.

    OpenMP threads that spin while they wait make two ranks on busy cores ten times slower, so waiting threads
    sleep (OMP_WAIT_POLICY, GOMP_SPINCOUNT), and each rank gets its share of the cores (OMP_NUM_THREADS).
    CUDA_DEVICE_MAX_CONNECTIONS=1 is what Megatron's overlap of communication and GEMMs needs on GPUs before
    Blackwell.
    """
    cores = cpu_count or len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // max(1, local_world_size))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def describe_crowding(local_world_size: int, cpu_count: int | None = None) -> str | None:
    """Return one line where a host has more ranks than cores: each step waits for ranks that wait for a core;
    None where every rank has one.
    """
    cores = cpu_count or len(os.sched_getaffinity(0))
    if local_world_size <= cores:
        return None
    return (
        f"warning: {local_world_size} ranks share the {cores} cores of this host, and wait for one another; "
        f"at most {cores} ranks are faster here"
    )


# Read by cuBLAS, NCCL and Transformer Engine when they are first used. cuBLAS sums in one order only with a
# workspace of fixed size; NCCL picks its algorithm and protocol by measuring, and each sums in another order;
# Transformer Engine's fastest backward passes use atomics.
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def set_deterministic_environment() -> None:
    """Apply DETERMINISTIC_ENVIRONMENT to this process, before anything uses a device; values that the user
    has set stay.
    """
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def set_thread_environment(local_world_size: int) -> None:
    """Apply `thread_environment` to this process; values that the user has set stay.

    torchrun sets OMP_NUM_THREADS=1 where the user has not: that one is replaced when it says nothing (one of
    several ranks).

    Raises:
        RuntimeError: torch is already loaded, so the settings would be ignored silently.
    """
    if "torch" in sys.modules:
        raise RuntimeError("set_thread_environment must run before torch is imported")
    launched_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    for name, value in thread_environment(local_world_size).items():
        if name == "OMP_NUM_THREADS" and launched_by_torchrun and os.environ.get(name) == "1":
            os.environ[name] = value
        os.environ.setdefault(name, value)
