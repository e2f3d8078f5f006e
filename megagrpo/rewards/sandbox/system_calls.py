"""System calls that confined code may not make: a seccomp filter (Linux, x86-64 and AArch64).

Refused are other processes, programs, sockets, signals to anybody else, looking into other processes, changes
of files' modes, owners and times, and what only an administrator does. A refused call fails with EPERM.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _KILL_PROCESS, _FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD = 0x10000
# struct seccomp_data: nr, arch, instruction pointer, six arguments of 64 bits
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _RETURN, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45  # classic BPF
_X32 = 0x40000000  # numbers of x86-64's second table begin here

# names: (x86-64, AArch64); None: the architecture has no such call
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),  # it opens sockets, too
    "shmget": (29, 194),  # what outlives the process
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "acct": (163, 89),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_OWN_PROCESS_ALONE = ("kill", "tgkill")


def build_filter(
    machine: str, process_id: int, names: Collection[str] = tuple(NUMBERS), families: Collection[int] = ()
) -> bytes:
    """Return the BPF program for a machine and the process that it will confine.

    Args:
        machine: `platform.machine()`.
        process_id: the process, which may send signals to itself.
        names: the calls that are refused, all of them or with some arguments.
        families: of sockets that may be opened even where `socket` is refused.

    Raises:
        OSError: the machine's numbers are not known.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    refuse = [_do(_RETURN, _FAIL_WITH | errno.EPERM)]
    allow = [_do(_RETURN, _ALLOW)]
    program = [_do(_LOAD, _ARCHITECTURE), *_unless(_IF_EQUAL, architecture, [_do(_RETURN, _KILL_PROCESS)])]
    program.append(_do(_LOAD, _NUMBER))
    if machine == "x86_64":
        program += _where(_IF_AT_LEAST, _X32, [_do(_RETURN, _KILL_PROCESS)])
    for name in names:
        number = NUMBERS[name][column]
        if number is None:
            continue
        answer = refuse
        if name == "clone":  # a thread is no process
            answer = [_load_argument(0), *_where(_IF_ANY_BIT, _CLONE_THREAD, allow), *refuse]
        elif name == "clone3":  # its flags lie behind a pointer; libc falls back to clone
            answer = [_do(_RETURN, _FAIL_WITH | errno.ENOSYS)]
        elif name == "socket":
            allowed = [part for family in families for part in _where(_IF_EQUAL, family, allow)]
            answer = [_load_argument(0), *allowed, *refuse]
        elif name in _OWN_PROCESS_ALONE:
            answer = [_load_argument(0), *_where(_IF_EQUAL, process_id, allow), *refuse]
        elif name == "prlimit64":  # reading a limit is allowed: no new one is given
            high = [_load_argument(2, high=True), *_where(_IF_EQUAL, 0, allow), *refuse]
            answer = [_load_argument(2), *_where(_IF_EQUAL, 0, high), *refuse]
        program += _where(_IF_EQUAL, number, answer)
    return b"".join([*program, *allow])


def refuse_system_calls(names: Collection[str] = tuple(NUMBERS), families: Collection[int] = ()) -> None:
    """Confine this process, and all its threads and processes to come, for good.

    Args:
        names, families: as for `build_filter`.

    Raises:
        OSError: the kernel or the machine does not offer it.
    """
    code = build_filter(platform.machine(), os.getpid(), names, families)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: number of instructions, padding, pointer
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0),
    ):
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _where(test: int, value: int, block: list[bytes]) -> list[bytes]:
    return [_do(test, value, 0, len(block)), *block]


def _unless(test: int, value: int, block: list[bytes]) -> list[bytes]:
    return [_do(test, value, len(block), 0), *block]


def _load_argument(position: int, high: bool = False) -> bytes:
    return _do(_LOAD, _FIRST_ARGUMENT + 8 * position + 4 * high)
