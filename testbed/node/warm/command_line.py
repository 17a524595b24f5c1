"""Change the command line that /proc shows for this process."""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["set_command_line"]

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # linux/prctl.h
_UNCHANGED = 2**32 - 1
_kept: list[object] = []
"""The memory that the kernel reads for /proc/PID/cmdline."""


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h: addresses, then the auxiliary vector and the executable, both kept."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_STAT_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "env_start": 50,
    "env_end": 51,
}
"""Number of each address in /proc/PID/stat (proc_pid_stat(5)); fields are counted from 1."""


def set_command_line(words: Sequence[str]) -> None:
    """Make /proc/PID/cmdline of this process show exactly these words, as after execve(2).

    Programs are identified by it: by faults that kill a rank, by the comparison of a lab's state, by `faultbed heal`.
    PR_SET_MM_MAP needs no capability (prctl(2)), but CONFIG_CHECKPOINT_RESTORE.

    Raises:
        OSError: the kernel refused.
    """
    text = b"".join(word.encode() + b"\0" for word in words)
    memory = ctypes.create_string_buffer(text, len(text))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        stat = file.read().rpartition(")")[2].split()  # from field 3 on
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    start = ctypes.addressof(memory)
    wanted = _MemoryMap(
        **{name: int(stat[number - 3]) for name, number in _STAT_FIELDS.items()},
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=start + len(text),
        exe_fd=_UNCHANGED,
    )
    size, unused = ctypes.c_ulong(ctypes.sizeof(wanted)), ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(wanted), size, unused):
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refused to change the command line (prctl PR_SET_MM_MAP, error {number})")
    _kept.append(memory)
