"""Read and write single files of a run directory, and say when the run began, without importing what files mean."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from faultbed.testbed.errors import RecordError, UsageError

__all__ = ["RUN_FILES", "decoded", "read_file", "started_of", "whole"]

RUN_FILES = frozenset({"experiment.toml", "plan.json", "verdict.json"})
"""Files of which a run directory has at least one, even if only a part of it was kept."""
_STARTED_AT = re.compile(r"\d{8}T\d{6}Z")
_FIRST_LINE_BYTES = 1 << 20

T = TypeVar("T")


class _Stamped(msgspec.Struct, frozen=True):
    wall_ns: int


_decode_wall = msgspec.json.Decoder(_Stamped).decode


def started_of(path: Path) -> datetime:
    """Return when a run began (UTC): by its directory's name, else its journal, else when its verdict was written."""
    try:
        # `datetime.strptime` takes ten times as long, and `datetime.fromisoformat` alone reads other forms, too.
        begin = path.name.partition("-")[0]
        return datetime.fromisoformat(begin if _STARTED_AT.fullmatch(begin) else "")
    except ValueError:
        return _journal_began(path) or datetime.fromtimestamp((path / "verdict.json").stat().st_mtime, UTC)


def _journal_began(path: Path) -> datetime | None:
    """Return when the first record of a run's journal was written; None: there is none that can be read."""
    try:
        with (path / "journal.jsonl").open("rb") as file:
            return datetime.fromtimestamp(_decode_wall(file.readline(_FIRST_LINE_BYTES)).wall_ns / 1e9, UTC)
    except (OSError, msgspec.MsgspecError, ValueError, OverflowError):
        return None


def read_file(path: str, *, most_bytes: int | None = None, missing: str = "") -> bytes:
    """Return the contents of a file. `path` is text: of thousands of runs, making a Path takes longer than reading.

    Args:
        path: the file.
        most_bytes: a longer file is refused; None: no limit.
        missing: what to say if there is no such file; empty: the system's reason.

    Raises:
        UsageError: the file is missing, cannot be read, or is no regular file.
        RecordError: it is too long.
    """
    try:
        # A pipe must not stop a query.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = missing or f"{path}: {error.strerror or error}; only the directory of a finished run has it"
        raise UsageError(reason) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: no regular file; copy the run directory again")
        if most_bytes is not None and status.st_size > most_bytes:
            raise RecordError(f"{path}: {status.st_size} bytes, of at most {most_bytes}; copy the run directory again")
        content = os.read(descriptor, status.st_size + 1)
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size)):
            content += more  # one read returns 2 GiB at most
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; copy the run directory again") from error
    finally:
        os.close(descriptor)
    return content


def decoded(path: str, content: bytes, decode: Callable[[bytes], T]) -> T:
    """Return the contents of a file, decoded.

    Raises:
        RecordError: it is not as this version writes it.
    """
    try:
        return decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(
            f"{path}: not as this version writes it: {error}; copy the run directory again, or read it with the "
            "version that environment.json names"
        ) from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` that becomes `path` at the end, or vanishes on an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if temporary.stat().st_mode & 0o777 == 0o600:  # noqa: PLR2004 - mkstemp's own mode
            temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
