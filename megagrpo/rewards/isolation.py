"""What a reward worker may do and reach, set before any reward code is imported. Standard library only.

Not isolated: the file system (reward code reads and writes as the user who trains) and processing time (a
kill at the time limit is the only bound).
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

# What a worker's environment may hold, beside what the configuration names: how to find programs, libraries
# and temporary folders, and how to write text. No credentials, no addresses.
ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHASHSEED",
)
# A scorer is one of many processes on the machine: its BLAS must not take all cores.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def allowed_environment(also: Iterable[str]) -> dict[str, str]:
    """Return the environment of a worker: the variables in `ENVIRONMENT` and those in `also`."""
    names = (*ENVIRONMENT, *also)
    return {name: os.environ[name] for name in names if name in os.environ} | _THREADS


def end_with_parent(parent: int, end_signal: signal.Signals) -> None:
    """Ask the kernel for `end_signal` when the thread that started this process ends; end at once where it
    has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, end_signal)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, whatever session it moved to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def limit_memory(num_bytes: int) -> None:
    """Limit this process's address space, and that of each process that it starts; no core dumps."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
