"""Crashes that FRR's and SONiC's daemons report in their log files.

FRR's daemons write to the files of `log file` (the roles set it), SONiC's to the syslog of their switch. Severe lines
alone are no sign of a defect: zebra logs an error for each next hop that a fault takes away. A line counts if a daemon
crashed or gave up by itself; the sources of the patterns are FRR's lib/zlog.c (`zlog_signal`) and lib/assert
(`_zlog_assert_failed`), supervisord's options.py (`finish`) and orchagent's saihelper.cpp (`handleSaiFailure`).
"""

# Start-up time under emulation: no pathlib.

from __future__ import annotations

import glob
import os
import re

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

__all__ = ["DaemonLog", "crash_in"]

MARK = "syslog"
"""The word before the text of a daemon's message, after its level; messages of a kernel have none."""
_SWITCH = ("/etc/sonic", "/run/frr")
"""Paths that only a machine with FRR or SONiC has. The syslog of another one is none of a switch's daemons."""
_IN_MEMORY = "/run/"
"""Files here do not outlive a reboot, and are those of the snapshot after a machine was restored from one."""
_FILES = (f"{_IN_MEMORY}frr/*/*.log", "/var/log/frr/*.log", "/var/log/syslog")
_LEVELS = ("EMERG", "ALERT", "CRIT", "ERR", "WARNING", "NOTICE", "INFO", "DEBUG")
_CRASH = re.compile(
    r"Received signal (?:4|6|7|8|11) at \d+"  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
    r"|: assertion \(.*\) failed"
    r"|terminated by SIG(?:ILL|ABRT|BUS|FPE|SEGV)\b"
    r"|exiting orchagent|Encountered failure in .* SAI_STATUS_"
)
_HEAD = re.compile(
    # FRR's own time; rsyslog's with a time zone; SONiC's (the year before or after the time) and the traditional one.
    r"^(?:\d{4}/\d\d/\d\d [\d:.]+ |\d{4}-\d\d-\d\dT\S+ \S+ |(?:\d{4} )?[A-Z][a-z]{2} +\d{1,2} [\d:.]+ (?:\d{4} )?\S+ )"
)
_PIECE = 1 << 16
_LONGEST = 4096
"""Bytes of a line that are kept."""


class DaemonLog:
    """The daemons' logs from a position on (None: from now on).

    `position` has inode and offset of each file, so that a later process continues where this one ended, also after a
    reboot. Empty on a machine without FRR and SONiC.
    """

    def __init__(self, position: Mapping[str, list[int]] | None) -> None:
        self._files: dict[str, BinaryIO] = {}
        self._rests: dict[str, bytes] = {}
        self._lost: list[str] = []
        for path in _paths():
            file = self._open(path)
            if file is not None:
                self._start(path, file, position)

    @property
    def position(self) -> dict[str, list[int]]:
        """Inode and offset behind the last whole line of each file."""
        return {
            path: [os.fstat(file.fileno()).st_ino, file.tell() - len(self._rests.get(path, b""))]
            for path, file in self._files.items()
        }

    def read(self) -> list[str]:
        """Return level, mark and text of the crashes in the lines since the last call.

        Raises:
            OSError: a log exists and cannot be read.
        """
        texts, self._lost = self._lost, []
        for path in _paths():
            known = self._files.get(path)
            if known is None:
                file = self._open(path)  # made since the last call: all of it is new
            else:
                texts += self._crashes(path, known)
                if _inode(path) == os.fstat(known.fileno()).st_ino:
                    if os.fstat(known.fileno()).st_size >= known.tell():
                        continue
                    texts.append(f"3 {MARK} messages were lost: {path} is shorter than before")
                    known.seek(0)
                    file = known
                else:  # rotated
                    known.close()
                    file = self._open(path)
            self._files.pop(path, None)
            self._rests.pop(path, None)
            if file is not None:
                self._files[path] = file
                texts += self._crashes(path, file)
        return texts

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _start(self, path: str, file: BinaryIO, position: Mapping[str, list[int]] | None) -> None:
        self._files[path] = file
        if position is None:
            file.seek(0, os.SEEK_END)
            return
        if path not in position:  # made since then
            return
        inode, offset = position[path]
        if _inode(path) == inode and os.fstat(file.fileno()).st_size >= offset:
            file.seek(offset)
        elif _inode(f"{path}.1") == inode and (rotated := self._open(f"{path}.1")) is not None:
            with rotated:
                rotated.seek(offset)
                self._lost += self._crashes(path, rotated)
            self._rests.pop(path, None)
        elif not path.startswith(_IN_MEMORY):  # there, as for the kernel's messages, the machine's end explains it
            self._lost.append(f"3 {MARK} messages were lost: {path} was replaced")

    @staticmethod
    def _open(path: str) -> BinaryIO | None:
        try:
            return open(path, "rb")
        except FileNotFoundError:
            return None

    def _crashes(self, path: str, file: BinaryIO) -> list[str]:
        texts: list[str] = []
        rest = self._rests.get(path, b"")
        while piece := file.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            texts += [text for line in lines if (text := crash_in(line[:_LONGEST].decode(errors="replace")))]
            if len(rest) > _PIECE:  # no line of a daemon is that long
                rest = b""
        self._rests[path] = rest
        return texts


def crash_in(line: str) -> str | None:
    """Return level, mark and text of a line that reports a crash of a daemon, otherwise None.

    Lines of the kernel are read from the kernel itself. A line without a level counts as critical.
    """
    if not _CRASH.search(line):
        return None
    text = _HEAD.sub("", line, count=1).strip()
    word, _, after = text.partition(" ")
    level, text = (_LEVELS.index(word), after) if word in _LEVELS else (2, text)
    return None if text.startswith("kernel:") else f"{level} {MARK} {text}"


def _paths() -> list[str]:
    if not any(os.path.exists(path) for path in _SWITCH):
        return []
    return sorted(path for pattern in _FILES for path in glob.glob(pattern))


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None
