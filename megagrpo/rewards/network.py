"""Takes the network from a reward worker, and says what reached for it. Standard library only."""

import errno
import socket
import sys
from types import FrameType
from typing import Any

from megagrpo.rewards.sandbox.other_processes import leave_other_processes
from megagrpo.rewards.sandbox.system_calls import refuse_system_calls

# sockets, what else opens them, and what would take those of another process
_CALLS = ("socket", "io_uring_setup", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class NetworkWatch:
    """What Python code of this process tried to reach since the network is gone.

    Libraries turn an error of a connection into others, and reward code may swallow them all: a judge that
    was never asked must not become a score.
    """

    def __init__(self) -> None:
        self.reached_for: str | None = None  # the first address, or what is known of it

    def leave(self) -> None:
        """Keep this process, and all that it starts, from opening sockets of any family but AF_UNIX, and from
        looking into other processes. Only threads that start later are confined: call it before any does.

        Raises:
            OSError: the machine does not offer it.
        """
        if sys.platform != "linux":
            raise OSError(f"{sys.platform} has no seccomp")
        leave_other_processes()
        refuse_system_calls(_CALLS, [socket.AF_UNIX])
        sys.addaudithook(self._hear)

    def explain(self) -> str | None:
        """Return what is to be said of what was reached for, None where nothing was."""
        if self.reached_for is None:
            return None
        return (
            f"tried to reach {self.reached_for}, and rewards.network is false; rewards.network: true gives "
            "reward code the network"
        )

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" and arguments[1]:
            self._refuse(f"{_text(arguments[0])}:{_text(arguments[1])}")
        # urllib3 tries at its import whether the machine has IPv6, and takes an error for a no
        elif event == "socket.__new__" and arguments[1] in _FAMILIES and not _is_called_from("_has_ipv6"):
            self._refuse("the network by a socket")

    def _refuse(self, place: str) -> None:
        self.reached_for = self.reached_for or place
        raise PermissionError(errno.EPERM, f"rewards.network is false: {place} is out of reach")


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _is_called_from(name: str) -> bool:
    """Say whether a function of this name is among the callers of what an audit hook hears."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
