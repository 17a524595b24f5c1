"""Where a lab's book of reservations is kept, and how several users change it without a server.

    soft lab    in the lab's folder on the controller: its VMs answer on 127.0.0.1 only, so all its users are here, and
                a book inside a VM would go back in time with every reset
    rack lab    on the lab's jump host (group `jump` of the inventory; its first host where there is none), over SSH

Both run the same two shell scripts: read (with the time there), and write if nobody has written meanwhile. All rules
are applied here, to what was read (`testbed.tenancy.reservation`); whoever comes second reads again.

A write may be cut off anywhere, and the book is then the old one or the new one: the text is taken in whole and
checked before there is a lock to hold others up with, and a file that is there but cannot be read is no empty book.

Leases must not end because somebody sets a clock. The book's time goes on with its machine's time since boot
(proc(5), uptime), from where the last write left it. After a boot the clock of day is asked once, which may be hours
ahead (a hardware clock in local time): bookings go by it, and whoever works on the lab has what was left of the lease.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from testbed.directories import private_dir
from testbed.errors import LabError
from testbed.remote.remote_node import Node
from testbed.tenancy.reservation import Book, Entry

__all__ = ["FOLDER", "BookStore", "Reading", "local_store", "node_store"]

FOLDER = "/var/lib/faultbed/reservations"
"""On the jump host. To be shared by several accounts it must be writable for their group."""

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
_OVERTAKEN, _NOT_WRITABLE, _LOCKED, _TORN = 3, 4, 5, 6
_TRIES = 50
_SCHEMA = 2

Shell = Callable[[Sequence[str], str | None], tuple[int, str, str]]
"""Runs a command with a text on its stdin, and gives its exit status, stdout and stderr."""


class _Clock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The book's time at its last write, and by how much it is ahead of the time since that boot."""

    boot: str
    ahead_s: float
    written_s: float


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = _SCHEMA
    entries: tuple[Entry, ...] = ()
    clock: _Clock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A book as it was at `now_s` of its own time; `digest` is what a write must find unchanged, "" no book.

    `boot` and `up_s` are the machine's boot and the seconds since; `adrift` says that the time is not yet bound to
    that boot: the next write does it.
    """

    book: Book
    now_s: float
    digest: str
    boot: str = ""
    up_s: float = 0.0
    adrift: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BookStore:
    """One lab's book on one machine."""

    where: str
    folder: str
    lab: str
    shell: Shell

    def read(self) -> Reading:
        """The book now.

        Raises:
            LabError: its machine does not answer as it should, or another version wrote the book.
        """
        status, out, err = self.shell(["sh", "-c", _READ, "read", self.folder, self.lab], None)
        words, _, text = out.partition("\nnone\n" if out.endswith("\nnone\n") else "\nbook\n")
        stamps = words.split("\n")
        if status or len(stamps) != 3:  # noqa: PLR2004 (the boot, seconds since, seconds since 1970)
            raise LabError(f"{self.where}: the reservations cannot be read: {err.strip() or 'no answer'}")
        boot, up_s, day_s = stamps[0], float(stamps[1]), float(stamps[2])
        if out.endswith("\nnone\n"):
            return Reading(book=(), now_s=day_s, digest="", boot=boot, up_s=up_s)
        try:
            file = msgspec.json.decode(text, type=_File)
        except msgspec.DecodeError as error:
            raise LabError(
                f"{self.where}:{self.folder}/{self.lab}.json is no book of reservations of this version ({error}): "
                "if nobody uses the lab, remove it"
            ) from error
        now_s, adrift = _time_of(file.clock, boot, up_s=up_s, day_s=day_s)
        book = _moved(file.entries, now_s - file.clock.written_s) if adrift and file.clock else file.entries
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Reading(book=book, now_s=now_s, digest=digest, boot=boot, up_s=up_s, adrift=adrift)

    def write(self, book: Book, *, after: Reading) -> bool:
        """Write the book if it still is the one that was read; tell whether it was.

        Raises:
            LabError: it cannot be written there.
        """
        clock = _Clock(boot=after.boot, ahead_s=after.now_s - after.up_s, written_s=after.now_s)
        text = msgspec.json.format(msgspec.json.encode(_File(entries=book, clock=clock))).decode() + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        argv = ["sh", "-c", _WRITE, "write", self.folder, self.lab, after.digest, digest]
        status, _, err = self.shell(argv, text)
        if status in {0, _OVERTAKEN}:
            return status == 0
        if status == _NOT_WRITABLE:
            raise LabError(
                f"{self.where}: {self.folder} cannot be written: as root there, `install -d -m 2775 -g GROUP "
                f"{self.folder}` with a group of all who share the lab ({err.strip()})"
            )
        whats = {_LOCKED: "is locked by a write that does not end", _TORN: "was not written: not all of it arrived"}
        what = whats.get(status, f"cannot be written: {err.strip()}")
        raise LabError(f"{self.where}: {self.folder}/{self.lab}.json {what}")

    def change(self, rule: Callable[[Reading], Book]) -> Reading:
        """Apply a rule to the book as it is, again until nobody came between; give back what was read.

        Raises:
            LabError: the book cannot be read or written; and whatever the rule raises.
        """
        for _ in range(_TRIES):
            reading = self.read()
            if reading.adrift:  # before any rule: one that refuses writes nothing, and time would stand still
                self.write(reading.book, after=reading)
                continue
            book = rule(reading)
            if book == reading.book or self.write(book, after=reading):
                return reading
        raise LabError(f"{self.where}: others changed the book of reservations {_TRIES} times while this one tried")


def _time_of(clock: _Clock | None, boot: str, *, up_s: float, day_s: float) -> tuple[float, bool]:
    """The book's time, and whether it is adrift: its machine has booted since, or counts anew (a container's does)."""
    if clock is None:
        return day_s, True
    now_s = up_s + clock.ahead_s
    if clock.boot == boot and now_s >= clock.written_s:
        return now_s, False
    return max(day_s, clock.written_s), True


def _moved(book: Book, by_s: float) -> Book:
    """The book with the leases of what goes on, which are no hours of a day, moved."""
    return tuple(
        entry if entry.mode == "booking" else msgspec.structs.replace(entry, until_s=entry.until_s + by_s)
        for entry in book
    )


def local_store(lab_folder: Path, *, lab: str) -> BookStore:
    """The book of a soft lab, below the folder of its state."""

    def shell(argv: Sequence[str], stdin: str | None) -> tuple[int, str, str]:
        if stdin is not None:
            private_dir(lab_folder)
        done = subprocess.run(argv, input=stdin or "", capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout, done.stderr

    return BookStore(where="this machine", folder=str(lab_folder / "reservations"), lab=lab, shell=shell)


def node_store(node: Node, *, lab: str) -> BookStore:
    """The book of a rack lab, on its jump host."""

    def shell(argv: Sequence[str], stdin: str | None) -> tuple[int, str, str]:
        done = node.run(argv, stdin=stdin, check=False)
        return done.rc, done.stdout, done.stderr

    return BookStore(where=node.name, folder=FOLDER, lab=lab, shell=shell)
