"""Journal of intended changes and their outcomes: append-only JSON lines that survive a kill at any byte.

Each record is written whole and fsynced before the caller continues, so an intent is on disk before its effect is on a
machine. A record is `invoke` (about to act), `ok` or `fail` (the completion of the invoke whose `seq` is in `of`), or
`note`. Times: `mono_ns` is this machine's CLOCK_MONOTONIC, `wall_ns` its wall clock, for people only.

A process that is killed while it writes leaves a broken line. It is kept: the next record begins on a new line, and
readers skip the broken one.

Several processes may append to one file. `seq` is unique in the file and grows from line to line: a writer locks the
file (flock(2)) while it reads the records that others have added and writes its own. The kernel releases the lock
however the writer ends. A broken line is no record: its writer ended before it used the number, which the next record
gets.

Only an intent to change something raises when it cannot be written (a full disk): the change is then not made. A
revert, a completion and a note go ahead without their record; `Journal.failure` reports that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from faultbed.testbed.tenancy.durable import sync_folder

__all__ = ["Journal", "Record", "broken_lines", "pending", "read"]

RecordType = Literal["invoke", "ok", "fail", "note"]
_TYPES = frozenset({"invoke", "ok", "fail", "note"})
_LOCK_WAIT_S = 5.0
"""How long a writer waits for the lock of a file that another process appends to."""
_NO_LOCKS = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a journal. `of` is the `seq` of the invoke that this record completes, else None."""

    seq: int
    type: RecordType
    op: str
    mono_ns: int
    wall_ns: int
    of: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """An open journal. Safe to use from several threads and processes; opening an existing one appends to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.failure: OSError | None = None
        """The error of the first record that could not be written; None: the journal is complete."""
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._seq = self._read_up_to = 0
        """The next `seq`, and the file offset up to which records have been read to determine it."""
        with self._exclusive():
            raw = path.read_bytes()
            self.broken = _parsed(raw)[1]
            """Line numbers (from 1) that held no valid record when the journal was opened."""
            self._advance(raw)
        sync_folder(path.parent)

    def invoke(self, op: str, **data: Any) -> int:
        """Record that `op` is about to be done; return the number that its completion refers to.

        Raises:
            OSError: the record could not be written.
        """
        return self._write("invoke", op, None, data)

    def ok(self, of: int, op: str, **data: Any) -> None:
        """Record that the invoke `of` was done."""
        self._try_to_write("ok", op, of, data)

    def fail(self, of: int, op: str, **data: Any) -> None:
        """Record that the invoke `of` failed, or that its outcome is unknown."""
        self._try_to_write("fail", op, of, data)

    def note(self, op: str, **data: Any) -> None:
        """Record an observation, not an action."""
        self._try_to_write("note", op, None, data)

    @contextmanager
    def doing(self, op: str, **data: Any) -> Iterator[dict[str, Any]]:
        """Record an intent, run the block, and record its outcome with what the block puts in the yielded dict.

        Raises:
            OSError: the intent could not be written; the block has not run.
        """
        with self._completing(self.invoke(op, **data), op, data) as outcome:
            yield outcome

    @contextmanager
    def reverting(self, op: str, **data: Any) -> Iterator[dict[str, Any]]:
        """Record a block that reverts a change; unlike `doing`, it runs even if the intent cannot be written."""
        with self._completing(self._try_to_write("invoke", op, None, data), op, data) as outcome:
            yield outcome

    @contextmanager
    def _completing(self, seq: int | None, op: str, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        outcome: dict[str, Any] = {}
        try:
            yield outcome
        except BaseException as error:
            if seq is not None:
                self.fail(seq, op, **{**data, **outcome, "error": f"{type(error).__name__}: {error}"})
            raise
        if seq is not None:
            self.ok(seq, op, **{**data, **outcome})

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_to_write(self, kind: RecordType, op: str, of: int | None, data: Mapping[str, Any]) -> int | None:
        try:
            return self._write(kind, op, of, data)
        except OSError as error:
            self.failure = self.failure or error
            return None

    def _write(self, kind: RecordType, op: str, of: int | None, data: Mapping[str, Any]) -> int:
        with self._lock, self._exclusive():
            end = os.fstat(self._fd).st_size
            if end < self._read_up_to:  # the file was truncated
                self._read_up_to = 0
            self._advance(os.pread(self._fd, end - self._read_up_to, self._read_up_to))
            seq = self._seq
            record = {
                "seq": seq,
                "type": kind,
                "op": op,
                "mono_ns": time.monotonic_ns(),
                "wall_ns": time.time_ns(),
                "of": of,
                "data": dict(data),
            }
            line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                line = b"\n" + line
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
                os.fsync(self._fd)
            except OSError:
                with contextlib.suppress(OSError):
                    self._remove_half_line(line, end)
                raise
            self._seq, self._read_up_to = seq + 1, end + len(line)
            return seq

    def _advance(self, raw: bytes) -> None:
        """Advance the next `seq` past the records in `raw`, the part of the file that has not been read yet."""
        self._seq = max([self._seq, *(record.seq + 1 for record in _parsed(raw)[0])])
        self._read_up_to += len(raw)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the file against other writers while the block runs.

        A file system without locks (some network ones) gets none: a run's journal has one writer anyway.

        Raises:
            OSError: another process has held the lock for `_LOCK_WAIT_S`; a stopped process must not block a revert.
        """
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"another process has locked it for {_LOCK_WAIT_S:g} s; continue or end that process"
                    raise TimeoutError(errno.ETIMEDOUT, problem, str(self.path)) from None
                time.sleep(0.005)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _remove_half_line(self, line: bytes, start: int) -> None:
        """Remove what was written of a line at `start`, unless another process has written there meanwhile."""
        written = os.fstat(self._fd).st_size - start
        if os.pread(self._fd, written, start) == line[:written]:
            os.ftruncate(self._fd, start)


def read(path: Path) -> list[Record]:
    """Read the records of a journal. Broken lines are skipped; `broken_lines` returns their numbers."""
    return _parsed(path.read_bytes())[0]


def broken_lines(path: Path) -> tuple[int, ...]:
    """Return the numbers of a journal's broken lines: their writer was killed, or the file is not a journal."""
    return _parsed(path.read_bytes())[1]


def pending(records: list[Record]) -> list[Record]:
    """Return the intents without a completion: they may or may not have been done when the writer died."""
    done = {record.of for record in records if record.of is not None}
    return [record for record in records if record.type == "invoke" and record.seq not in done]


def _parsed(raw: bytes) -> tuple[list[Record], tuple[int, ...]]:
    """Return the records of a journal, and the numbers (from 1) of its broken lines."""
    records: list[Record] = []
    broken = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else (), start=1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            broken.append(number)
            continue
        if isinstance(record.seq, int) and record.type in _TYPES:
            records.append(record)
        else:
            broken.append(number)
    return records, tuple(broken)
