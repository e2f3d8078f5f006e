"""Which files confined code may open: Landlock (Linux 5.13 and later)."""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_PR_SET_NO_NEW_PRIVS = 38
_PATH_BENEATH = 1
# linux/landlock.h, LANDLOCK_ACCESS_FS_*
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_FILE = (
    1 << bit for bit in (0, 1, 2, 3, 5, 8)
)
REFER, _TRUNCATE = 1 << 13, 1 << 14
# number of rights that each version of the interface knows; later ones know no fewer
_KNOWN_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# no folders, links, pipes or sockets: what is written is removed by a plain walk
_WRITE = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def confine_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process, and its threads to come, open nothing but what lies under these paths, for good.

    Args:
        readable: files and folders to read (and map) alone.
        writable: files, and folders in which plain files are made, written and removed. Paths that are not
            there are passed over.

    Raises:
        OSError: the kernel does not offer it.
    """
    libc = open_libc()
    version = find_version(libc)
    rights = (1 << _KNOWN_RIGHTS.get(version, _KNOWN_RIGHTS[max(_KNOWN_RIGHTS)])) - 1
    rules = [(path, _READ) for path in readable] + [(path, _WRITE & rights) for path in writable]
    enter_domain(libc, struct.pack("Q", rights), rules)


def open_libc() -> ctypes.CDLL:
    """Return the C library, whose `syscall` keeps errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def find_version(libc: ctypes.CDLL) -> int:
    """Return the version of the kernel's interface, 1 or more; raises OSError where it has none."""
    return _call(libc, _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def enter_domain(libc: ctypes.CDLL, attribute: bytes, rules: Iterable[tuple[str, int]]) -> None:
    """Confine this process by a ruleset (struct landlock_ruleset_attr) and its rules: (path, rights)."""
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    ruleset = _call(libc, _CREATE_RULESET, buffer, ctypes.c_size_t(len(attribute)), ctypes.c_uint32(0))
    try:
        for path, rights in rules:
            _allow(libc, ruleset, path, rights)
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(libc, _RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        _call(libc, _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, "the kernel has no Landlock, or it is switched off")
        raise OSError(code, os.strerror(code))
    return int(result)
