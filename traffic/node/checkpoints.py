"""Checkpoints on the disk of a storage host: named, versioned, checksummed, published whole or not at all.

A checkpoint is one file, `g<generation>-rank<rank>-after<iterations>.checkpoint`: the state of one rank after so many
iterations of a job. `generation` counts the placements of the job, because a restart may change the number of ranks.
The file begins with one line of JSON (`HEADER`), followed by the data. It is written under a temporary name, flushed to
the disk and then renamed, so that a host that fails in between leaves no file of that name.

A server that was killed leaves its folder behind. A running server holds a lock on a file beside its folder. The next
server on the host removes every folder whose lock is free.

A set is complete if it has every rank of its generation after the same number of iterations. `newest` verifies sets,
the newest one first, and lists everything that it rejects.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
import zlib

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from io import BufferedIOBase
    from typing import Any, Protocol

    class Readable(Protocol):
        """The source of a checkpoint's data."""

        def read(self, size: int, /) -> bytes:
            """Return at most `size` bytes, and none at the end."""


__all__ = ["HEADER", "Checkpoints", "name_of"]

HEADER = ("generation", "rank", "ranks", "iterations", "bytes", "crc")
"""Fields of a checkpoint's first line; all are whole numbers."""

_BLOCK_BYTES = 65536
_NAME = re.compile(r"g(\d+)-rank(\d+)-after(\d+)\.checkpoint")
_UNFINISHED = ".unfinished"
_LOCKED = ".lock"
_LONGEST_HEADER = 4096
_LOCK_S = 5.0


def name_of(generation: int, rank: int, iterations: int) -> str:
    """Return the file name of a checkpoint."""
    return f"g{generation}-rank{rank}-after{iterations:08d}.checkpoint"


class Checkpoints:
    """The checkpoints of one job in `folder`. The newest `keep` complete sets are kept, and all newer checkpoints."""

    def __init__(self, folder: str, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._lock = threading.Lock()
        parent = os.path.dirname(os.path.abspath(folder))
        os.makedirs(parent, exist_ok=True)
        _remove_abandoned(parent)
        self._held = _locked(f"{folder}{_LOCKED}")  # until `remove`, or the end of the process
        os.makedirs(folder, exist_ok=True)

    def store(self, header: dict[str, int], file: Readable) -> str | None:
        """Write the next `header["bytes"]` of `file` as a checkpoint, and publish it.

        Returns:
            Why the checkpoint was not stored; None: it was.

        Raises:
            EOFError: `file` ended early. The half-written checkpoint stays, and `newest` lists it as rejected.
            ConnectionError: `file` is a connection that broke. The half-written checkpoint stays, as for EOFError.
            OSError: the checkpoint cannot be written, for example because the disk is full. Nothing of it stays.
        """
        path = os.path.join(self.folder, name_of(header["generation"], header["rank"], header["iterations"]))
        unfinished = f"{path}{_UNFINISHED}"
        try:
            crc = _write(unfinished, header, file)
            if crc == header["crc"]:
                os.rename(unfinished, path)
                self._sync_folder()
        except (ConnectionError, TimeoutError):
            raise
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        if crc != header["crc"]:
            os.unlink(unfinished)
            return "checksum mismatch: the received bytes differ from those sent"
        with self._lock:
            self._remove_older(header)
        return None

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)

    def _remove_older(self, header: dict[str, int]) -> None:
        """Remove checkpoints, half-written ones too, that are older than the newest `keep` complete sets.

        Ranks store at different times, so the newest sets may still be incomplete.
        """
        generation = header["generation"]
        present = self._present()
        count: dict[int, int] = {}
        for iterations, of_generation, of_rank in present:
            if of_generation == generation and of_rank < header["ranks"]:
                count[iterations] = count.get(iterations, 0) + 1
        complete = sorted((iterations for iterations, ranks in count.items() if ranks == header["ranks"]), reverse=True)
        if len(complete) < self.keep:
            return
        oldest = complete[self.keep - 1]
        for suffix, keys in (("", present), (_UNFINISHED, self._present(_UNFINISHED))):
            doomed = [key for key in keys if key[1] < generation or (key[1] == generation and key[0] < oldest)]
            for iterations, of_generation, of_rank in doomed:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.folder, name_of(of_generation, of_rank, iterations) + suffix))

    def _present(self, suffix: str = "") -> list[tuple[int, int, int]]:
        """Return (iterations, generation, rank) of each published checkpoint, or of each file name with a suffix."""
        present = []
        for name in os.listdir(self.folder):
            match = _NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if match:
                generation, rank, iterations = (int(part) for part in match.groups())
                present.append((iterations, generation, rank))
        return present

    def newest(self, ranks_of: dict[int, int] | None = None) -> dict[str, Any]:
        """Return the newest complete and intact set, and the checkpoints that were rejected.

        Args:
            ranks_of: the number of ranks of each generation of the job. Checkpoints of other generations, or of other
                numbers of ranks, do not belong to this job. None: all belong to it.

        Returns:
            `iterations`, `generation` and `ranks` of the set, or None for each if there is no such set. `rejected` is a
            list of (name, reason): half-written files, and corrupt, foreign or missing checkpoints of newer sets.
        """
        with self._lock:
            rejected = [
                [name.removesuffix(_UNFINISHED), "half-written: it was not published"]
                for name in sorted(os.listdir(self.folder))
                if name.endswith(_UNFINISHED)
            ]
            present = self._present()
            for iterations, generation in sorted({key[:2] for key in present}, reverse=True):
                members = sorted(key[2] for key in present if key[:2] == (iterations, generation))
                if ranks_of is not None and generation not in ranks_of:
                    reason = f"foreign: the job has no generation {generation}"
                    rejected += [[name_of(generation, rank, iterations), reason] for rank in members]
                    continue
                expected_ranks = None if ranks_of is None else ranks_of[generation]
                ranks, problems = self._verify(iterations, generation, members, expected_ranks)
                if not problems:
                    return {
                        "iterations": iterations,
                        "generation": generation,
                        "ranks": ranks,
                        "rejected": rejected,
                    }
                rejected += problems
        return {"iterations": None, "generation": None, "ranks": None, "rejected": rejected}

    def _verify(
        self, iterations: int, generation: int, members: list[int], expected_ranks: int | None
    ) -> tuple[int, list[list[str]]]:
        """Return how many ranks a set must have (None: as many as its files record), and the problems of its files."""
        headers = {rank: self._read_header(generation, rank, iterations) for rank in members}
        ranks = max((header["ranks"] for header, problem in headers.values() if not problem), default=0)
        ranks, problems = ranks if expected_ranks is None else expected_ranks, []
        for rank, (header, problem) in headers.items():
            reason = problem
            if reason is None and (header["ranks"] != ranks or rank >= ranks):
                reason = f"foreign: it is of {header['ranks']} ranks, and its generation has {ranks}"
            if reason is None:
                reason = self._verify_data(header)
            if reason is not None:
                problems.append([name_of(generation, rank, iterations), reason])
        missing = [rank for rank in range(ranks) if rank not in members]
        problems += [
            [name_of(generation, rank, iterations), "missing: this rank had not stored it"] for rank in missing
        ]
        return ranks, problems

    def _read_header(self, generation: int, rank: int, iterations: int) -> tuple[dict[str, int], str | None]:
        try:
            with open(os.path.join(self.folder, name_of(generation, rank, iterations)), "rb") as file:
                header = json.loads(file.readline(_LONGEST_HEADER))
            fields = {field: header[field] for field in HEADER}
        except (ValueError, KeyError, TypeError, RecursionError):
            fields = {}
        except OSError as error:
            return {}, f"cannot be read: {error.strerror}"
        if not fields or not all(type(value) is int for value in fields.values()):
            return {}, "corrupt: its first line is not that of a checkpoint"
        if (fields["generation"], fields["rank"], fields["iterations"]) != (generation, rank, iterations):
            return {}, "corrupt: its first line names another checkpoint"
        return fields, None

    def _verify_data(self, header: dict[str, int]) -> str | None:
        size = crc = 0
        try:
            with self.open(header["generation"], header["rank"], header["iterations"])[1] as file:
                while data := file.read(_BLOCK_BYTES):
                    size, crc = size + len(data), zlib.crc32(data, crc)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if size != header["bytes"]:
            return f"corrupt: it has {size} of {header['bytes']} bytes"
        return None if crc == header["crc"] else "corrupt: checksum mismatch"

    def open(self, generation: int, rank: int, iterations: int) -> tuple[dict[str, int], BufferedIOBase]:
        """Open a checkpoint; return its header, and the open file positioned at its data.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: its first line is not that of a checkpoint.
        """
        file = open(os.path.join(self.folder, name_of(generation, rank, iterations)), "rb")  # noqa: SIM115
        try:
            return json.loads(file.readline(_LONGEST_HEADER)), file
        except ValueError:
            file.close()
            raise

    def remove(self) -> None:
        """Remove all checkpoints of the job."""
        _remove_folder(self.folder)
        self._held.close()


def _remove_folder(folder: str) -> None:
    """Remove a folder and its lock file.

    If the folder cannot be removed, for example because a checkpoint is being stored, the lock file stays: by it the
    next server recognises the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}{_LOCKED}")


def _write(path: str, header: dict[str, int], file: Readable) -> int:
    """Write a checkpoint with the next `header["bytes"]` of `file`, down to the disk; return the CRC-32 of its data.

    Raises:
        EOFError: `file` ended early.
    """
    with open(path, "wb") as out:
        out.write(json.dumps({field: header[field] for field in HEADER}).encode() + b"\n")
        crc, left = 0, header["bytes"]
        while left:
            data = file.read(min(left, _BLOCK_BYTES))
            if not data:
                raise EOFError(f"{os.path.basename(path)}: {left} bytes are missing")
            out.write(data)
            crc, left = zlib.crc32(data, crc), left - len(data)
        out.flush()
        os.fsync(out.fileno())
    return crc


def _locked(path: str) -> Any:
    """Create and lock a lock file.

    Another server may remove the file between its creation and its lock. It is then created again.

    Raises:
        OSError: another server holds the lock.
    """
    deadline = time.monotonic() + _LOCK_S
    while True:
        file = open(path, "w")  # noqa: SIM115  # closed by `Checkpoints.remove`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                return file
        except OSError:
            if time.monotonic() > deadline:
                file.close()
                raise
        file.close()
        time.sleep(0.02)


def _remove_abandoned(parent: str) -> None:
    """Remove the checkpoints of servers that were killed, which hold their locks no longer."""
    for name in os.listdir(parent):
        if not name.endswith(_LOCKED):
            continue
        path = os.path.join(parent, name)
        with (
            contextlib.suppress(OSError),
            open(path) as lock_file,
        ):  # OSError: its server is alive, or has just removed it
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_folder(path.removesuffix(_LOCKED))
