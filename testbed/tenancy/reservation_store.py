"""The store of a lab's reservations, which several users change without a server.

    soft lab    in the lab's folder on the controller. All users of a soft lab are on this machine, because its VMs
                answer on 127.0.0.1 only. Inside a VM, every reset would restore an old version
    rack lab    on the lab's jump host (group `jump` of the inventory; without one, its first host), over SSH

Both run the same two shell scripts: one reads the reservations and the time there, the other writes if there was no
other write since. The rules (`faultbed.testbed.tenancy.reservation`) are applied here, to the reservations that were
read. After a conflict with another write, they are read again.

A write that is interrupted leaves the old version or the new one. The text is received and verified before the lock is
taken, and a file that exists but cannot be read does not count as empty.

Setting the machine's clock must not end a lease. The store's time is therefore its value at the last write plus the
uptime since then (proc(5), uptime). After a boot, the store reads the time of day once, which may be wrong by hours (a
hardware clock in local time). Leases are moved by the difference, so that a running command keeps the rest of its
lease; bookings end at a time of day and are not moved.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from faultbed.testbed.directories import private_dir
from faultbed.testbed.errors import LabError
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.tenancy.reservation import Book, Entry

__all__ = ["FOLDER", "NotWritten", "Reading", "ReservationStore", "local_store", "node_store"]

FOLDER = "/var/lib/faultbed/reservations"
"""Folder on the jump host. If several accounts share it, it must be writable for their group."""
SHELL_S = 60.0
"""Timeout of a command of the store on this machine. The command waits for a lock for at most 20 s."""

_READ = """\
cat /proc/sys/kernel/random/boot_id && cut -d " " -f 1 /proc/uptime && date +%s.%N || exit 4
if [ -e "$1/$2.json" ]; then echo book; cat "$1/$2.json" || exit 4; else echo none; fi
"""
_WRITE = """\
umask 002
new=$(cat)
[ "$(printf '%s\\n' "$new" | sha256sum | cut -c1-64)" = "$4" ] || exit 6
mkdir -p "$1" || exit 4
exec 9>>"$1/$2.lock" || exit 4
flock -w 20 9 || exit 5
have=
[ ! -e "$1/$2.json" ] || { have=$(sha256sum <"$1/$2.json" | cut -c1-64) && [ -n "$have" ]; } || exit 4
[ "$have" = "$3" ] || exit 3
printf '%s\\n' "$new" >"$1/$2.new" && sync "$1/$2.new" && mv "$1/$2.new" "$1/$2.json" && sync "$1" || exit 4
"""
_CONFLICT, _NOT_WRITABLE, _LOCKED, _TORN = 3, 4, 5, 6
_TRIES = 50
_SCHEMA = 2

Shell = Callable[[Sequence[str], str | None], tuple[int, str, str]]
"""Runs a command with a text on its stdin, and returns its exit status, stdout and stderr."""


class NotWritten(LabError):
    """The reservations cannot be written, for example on a full disk; the file is unchanged."""


class _Clock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store's time at its last write, and its offset to the uptime of that boot."""

    boot: str
    ahead_s: float
    written_s: float


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = _SCHEMA
    entries: tuple[Entry, ...] = ()
    clock: _Clock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The reservations as they were read.

    Attributes:
        book: the reservations.
        now_s: the store's time.
        digest: SHA-256 of the file, which a write requires to be unchanged; "": there is no file.
        boot: id of the current boot of the store's machine.
        up_s: uptime of that machine.
        is_adrift: the file is from an earlier boot. The next write stores the time for the current one.
    """

    book: Book
    now_s: float
    digest: str
    boot: str = ""
    up_s: float = 0.0
    is_adrift: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationStore:
    """The reservations of one lab on one machine."""

    where: str
    folder: str
    lab: str
    shell: Shell

    def read(self) -> Reading:
        """Read the reservations and the store's time.

        Raises:
            LabError: its machine does not answer correctly, or another version wrote the file.
        """
        status, out, err = self.shell(["sh", "-c", _READ, "read", self.folder, self.lab], None)
        has_file = not out.endswith("\nnone\n")
        head, _, text = out.partition("\nbook\n" if has_file else "\nnone\n")
        stamps = head.split("\n")
        if status or len(stamps) != 3:  # noqa: PLR2004 (boot id, uptime, seconds since 1970)
            raise LabError(f"{self.where}: the reservations cannot be read: {err.strip() or 'no answer'}")
        try:
            boot, up_s, wall_clock_s = stamps[0], float(stamps[1]), float(stamps[2])
        except ValueError as error:
            raise LabError(
                f"{self.where}: the reservations cannot be read: unexpected clock readings {stamps[1:]}"
            ) from error
        if not has_file:
            return Reading(book=(), now_s=wall_clock_s, digest="", boot=boot, up_s=up_s)
        try:
            file = msgspec.json.decode(text, type=_File)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LabError(
                f"{self.where}:{self.folder}/{self.lab}.json is not a reservation file of this version ({error}); "
                "if the lab is not in use, remove the file"
            ) from error
        now_s, is_adrift = _time_of(file.clock, boot, up_s=up_s, wall_clock_s=wall_clock_s)
        book = file.entries
        if is_adrift and file.clock is not None:
            book = _leases_moved(book, now_s - file.clock.written_s)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Reading(book=book, now_s=now_s, digest=digest, boot=boot, up_s=up_s, is_adrift=is_adrift)

    def write(self, book: Book, *, after: Reading) -> bool:
        """Write the reservations unless another write came after the reading `after`; return whether it wrote.

        Raises:
            NotWritten: they cannot be written there.
            LabError: its machine does not answer correctly.
        """
        clock = _Clock(boot=after.boot, ahead_s=after.now_s - after.up_s, written_s=after.now_s)
        text = msgspec.json.format(msgspec.json.encode(_File(entries=book, clock=clock))).decode() + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        argv = ["sh", "-c", _WRITE, "write", self.folder, self.lab, after.digest, digest]
        status, _, err = self.shell(argv, text)
        if status in {0, _CONFLICT}:
            return status == 0
        if status == _NOT_WRITABLE:
            raise NotWritten(
                f"{self.where}: {self.folder} cannot be written ({err.strip()}): free disk space, or as root there "
                f"`install -d -m 2775 -g GROUP {self.folder}` with a group of all users of the lab"
            )
        problems = {
            _LOCKED: "is locked by another write; try again",
            _TORN: "was not written, as it arrived incomplete; try again",
        }
        problem = problems.get(status, f"cannot be written: {err.strip()}")
        raise LabError(f"{self.where}: {self.folder}/{self.lab}.json {problem}")

    def change(self, rule: Callable[[Reading], Book]) -> Reading:
        """Read, apply a rule and write; repeat this after a conflict. Return the reading that the rule was applied to.

        Raises:
            LabError: the store cannot be read or written; the rule may raise other errors.
        """
        for _ in range(_TRIES):
            reading = self.read()
            if reading.is_adrift:  # before the rule: one that raises writes nothing, and the time would not advance
                self.write(reading.book, after=reading)
                continue
            book = rule(reading)
            if book == reading.book or self.write(book, after=reading):
                return reading
        raise LabError(
            f"{self.where}: other commands changed the reservations {_TRIES} times during this change; try again"
        )


def _time_of(clock: _Clock | None, boot: str, *, up_s: float, wall_clock_s: float) -> tuple[float, bool]:
    """Return the store's time, and whether the machine (or container) has booted since the last write (adrift)."""
    if clock is None:
        return wall_clock_s, True
    now_s = up_s + clock.ahead_s
    if clock.boot == boot and now_s >= clock.written_s:
        return now_s, False
    return max(wall_clock_s, clock.written_s), True


def _leases_moved(book: Book, by_s: float) -> Book:
    """Move the ends of all leases. Bookings stay, because they end at a time of day."""
    return tuple(
        entry if entry.mode == "booking" else msgspec.structs.replace(entry, until_s=entry.until_s + by_s)
        for entry in book
    )


def local_store(lab_folder: Path, *, lab: str) -> ReservationStore:
    """Return the store of a soft lab, below the folder of its state."""

    def shell(argv: Sequence[str], stdin: str | None) -> tuple[int, str, str]:
        if stdin is not None:
            private_dir(lab_folder)
        try:
            done = subprocess.run(argv, input=stdin or "", capture_output=True, text=True, check=False, timeout=SHELL_S)
        except subprocess.TimeoutExpired as error:
            raise LabError(
                f"this machine: {lab_folder} has not answered for {SHELL_S:g} s, so nothing can be reserved; "
                "check whether its file system hangs"
            ) from error
        return done.returncode, done.stdout, done.stderr

    return ReservationStore(where="this machine", folder=str(lab_folder / "reservations"), lab=lab, shell=shell)


def node_store(node: Node, *, lab: str) -> ReservationStore:
    """Return the store of a rack lab, on its jump host."""

    def shell(argv: Sequence[str], stdin: str | None) -> tuple[int, str, str]:
        done = node.run(argv, stdin=stdin, check=False)
        return done.rc, done.stdout, done.stderr

    return ReservationStore(where=node.name, folder=FOLDER, lab=lab, shell=shell)
