"""Where a lab's book of reservations is kept, and how several users change it without a server.

    soft lab    in the lab's folder on the controller: its VMs answer on 127.0.0.1 only, so all its users are here, and
                a book inside a VM would go back in time with every reset
    rack lab    on the lab's jump host (group `jump` of the inventory; its first host where there is none), over SSH

Both run the same two shell scripts: read (with the time there), and write if nobody has written meanwhile. All rules
are applied here, to what was read (`testbed.reservation`); whoever comes second reads again.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from testbed.errors import LabError
from testbed.node import Node
from testbed.paths import private_dir
from testbed.reservation import Book, Entry

__all__ = ["FOLDER", "BookStore", "Reading", "local_store", "node_store"]

FOLDER = "/var/lib/faultbed/reservations"
"""On the jump host. To be shared by several accounts it must be writable for their group."""

_READ = 'date +%s.%N; cat "$1/$2.json" 2>/dev/null; true'
_WRITE = """\
umask 002
mkdir -p "$1" || exit 4
exec 9>>"$1/$2.lock" || exit 4
flock -w 20 9 || exit 5
have=$(cat "$1/$2.json" 2>/dev/null | sha256sum | cut -c1-64)
[ "$have" = "$3" ] || exit 3
cat >"$1/$2.new" && sync "$1/$2.new" && mv "$1/$2.new" "$1/$2.json" || exit 4
"""
_OVERTAKEN, _NOT_WRITABLE, _LOCKED = 3, 4, 5
_TRIES = 50

Shell = Callable[[Sequence[str], str | None], tuple[int, str, str]]
"""Runs a command with a text on its stdin, and gives its exit status, stdout and stderr."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = 1
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A book as it was at `now_s` of its machine's clock; `digest` is what a write must find unchanged."""

    book: Book
    now_s: float
    digest: str


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
        stamp, _, text = out.partition("\n")
        if status or not stamp:
            raise LabError(f"{self.where}: the reservations cannot be read: {err.strip() or 'no answer'}")
        try:
            file = msgspec.json.decode(text or "{}", type=_File)
        except msgspec.DecodeError as error:
            raise LabError(
                f"{self.where}:{self.folder}/{self.lab}.json is no book of reservations of this version ({error}): "
                "if nobody uses the lab, remove it"
            ) from error
        return Reading(book=file.entries, now_s=float(stamp), digest=hashlib.sha256(text.encode()).hexdigest())

    def write(self, book: Book, *, after: Reading) -> bool:
        """Write the book if it still is the one that was read; tell whether it was.

        Raises:
            LabError: it cannot be written there.
        """
        text = msgspec.json.format(msgspec.json.encode(_File(entries=book))).decode() + "\n"
        argv = ["sh", "-c", _WRITE, "write", self.folder, self.lab, after.digest]
        status, _, err = self.shell(argv, text)
        if status in {0, _OVERTAKEN}:
            return status == 0
        if status == _NOT_WRITABLE:
            raise LabError(
                f"{self.where}: {self.folder} cannot be written: as root there, `install -d -m 2775 -g GROUP "
                f"{self.folder}` with a group of all who share the lab ({err.strip()})"
            )
        what = "is locked by a write that does not end" if status == _LOCKED else f"cannot be written: {err.strip()}"
        raise LabError(f"{self.where}: {self.folder}/{self.lab}.json {what}")

    def change(self, rule: Callable[[Reading], Book]) -> Reading:
        """Apply a rule to the book as it is, again until nobody came between; give back what was read.

        Raises:
            LabError: the book cannot be read or written; and whatever the rule raises.
        """
        for _ in range(_TRIES):
            reading = self.read()
            book = rule(reading)
            if book == reading.book or self.write(book, after=reading):
                return reading
        raise LabError(f"{self.where}: others changed the book of reservations {_TRIES} times while this one tried")


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
