"""Keeps code from looking into processes that it did not start: a Landlock domain (Linux 5.19 and later)."""

import ctypes
import os
import struct

from megagrpo.rewards.sandbox.files import REFER, enter_domain, find_version, open_libc

_FIRST_WITH_REFER, _FIRST_WITH_SCOPES = 2, 6  # versions of Landlock: Linux 5.19 and 6.12
# LANDLOCK_SCOPE_*: no abstract Unix socket of, and no signal to, a process outside
_SCOPES = 1 << 0 | 1 << 1
# linux/capability.h: what lets root look all the same
_SYS_PTRACE, _SYS_ADMIN, _PERFMON = 19, 21, 38
_CAPABILITY_VERSION = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24


def leave_other_processes() -> None:
    """Keep this process, and those that it starts, from the memory, environment and descriptors of processes
    that are there already and, from Linux 6.12 on, from sending them signals.

    Files stay as they are, but for mounts, which can't be changed. Nothing happens where the kernel has no
    Landlock, or one before Linux 5.19, which would forbid to move files between folders.

    Raises:
        OSError: the kernel offers it, and refuses it here.
    """
    libc = open_libc()
    try:
        version = find_version(libc)
    except OSError:
        return
    if version < _FIRST_WITH_REFER:
        return
    _drop_capabilities(libc, (_SYS_PTRACE, _SYS_ADMIN, _PERFMON))
    # a right must be taken for there to be a domain: it is given back everywhere
    with_scopes = struct.pack("QQQ", REFER, 0, _SCOPES)
    attribute = with_scopes if version >= _FIRST_WITH_SCOPES else struct.pack("Q", REFER)
    enter_domain(libc, attribute, [("/", REFER)])


def _drop_capabilities(libc: ctypes.CDLL, numbers: tuple[int, ...]) -> None:
    """Give up capabilities, and what a program that is executed as root would get of them."""
    for number in numbers:
        if libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1 and os.geteuid() == 0:
            _check(libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0), 8)
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable: bits 0 to 31, then the rest
    _check(libc.capget(header, sets))
    words = list(struct.unpack("6I", sets.raw))
    for number in numbers:
        for kind in range(3):
            words[number // 32 * 3 + kind] &= ~(1 << number % 32)
    _check(libc.capset(header, ctypes.create_string_buffer(struct.pack("6I", *words), 24)))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
