"""Holding a part of a lab for as long as something is done to it.

A holding is refreshed by what is done (`Holding.refresh`, called on progress), never by a thread of its own: whoever
hangs loses it. When it is lost, the next refresh or `require` raises, and nothing more may be touched.

Whether it is still ours is told by time that passes while this machine sleeps, too (CLOCK_BOOTTIME): a laptop that is
opened again must not think that its lease has just begun.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed.directories import home_dir, lab_dir, private_dir
from testbed.errors import FaultbedError, UsageError
from testbed.inventory.lab_inventory import Inventory
from testbed.lab import open_keeper
from testbed.tenancy import dirty, interventions, reservation
from testbed.tenancy.reservation import WHOLE_LAB, Entry, Mode, ReservationLost, Reserved, covered
from testbed.tenancy.reservation_store import BookStore, Reading, local_store, node_store

__all__ = [
    "INHERITED",
    "TTL_S",
    "Holding",
    "book_of",
    "hold",
    "is_dead",
    "now_s",
    "owner",
    "reserve_by_hand",
    "this_process",
    "who",
]

TTL_S = 300.0
"""How long a claim outlives its last refresh. Longer than any silence of a run on a starved machine; a claim of a
process that has died on this machine is free at once."""


_SURE = 0.8
"""Of a lease, how long its holder is sure of it. Two clocks that are slewed apart as fast as chrony does it (83333 ppm
each, chrony.conf(5), maxslewrate) differ by less."""
_ASK = 0.6
"""Of a lease, what of it must be left so that the book need not be asked."""

INHERITED = "FAULTBED_HOLDING"
"""Environment variable with the token of a holding that programs started below its holder may work under."""


@dataclass(kw_only=True)
class Holding:
    """A part of a lab that is ours. Thread-safe; `refresh` asks the book once in a fifth of the time."""

    store: BookStore
    token: str
    covers: tuple[str, ...]
    ttl_s: float
    _sure_until: float
    _borrowed: bool = False
    _lost: FaultbedError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Something went on: hold it for another while.

        Raises:
            ReservationLost: it is somebody else's, or free.
            LabError: the machine that keeps the book does not answer, for longer than the reservation lasts.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            asked = now_s()
            if self._sure_until - asked > _ASK * self.ttl_s:
                return
            try:
                self.store.change(lambda now: reservation.refresh(now.book, self.token, until_s=now.now_s + self.ttl_s))
            except ReservationLost as error:
                self._lost = error
                raise
            except FaultbedError as error:
                if now_s() < self._sure_until:
                    return  # still ours; asked again at the next progress
                self._lost = error
                raise
            # Counted from before the question: the book's clock was read after it.
            self._sure_until = asked + _SURE * self.ttl_s

    def heartbeat(self) -> None:
        """`refresh` for places that cannot raise (a reader's thread); the next `refresh` raises the loss."""
        with contextlib.suppress(FaultbedError):
            self.refresh()

    def others(self) -> tuple[str, ...]:
        """Return what other commands that are alive hold now; nothing where the book cannot be read."""
        with contextlib.suppress(FaultbedError):
            now = self.store.read()
            entries = reservation.live(now.book, now_s=now.now_s, is_dead=is_dead)
            theirs = [one for one in entries if one.token != self.token and one.mode in ("shared", "exclusive")]
            return tuple(sorted({name for one in theirs for name in one.covers}))
        return ()

    def release(self, *, was_dirty: bool = False, is_dirty: bool = False) -> None:
        """Give it back, or leave it to its owner alone where it is DIRTY; what was borrowed stays with its holder."""
        if self._borrowed:
            return
        me = owner()
        self.store.change(
            lambda now: reservation.leave(
                now.book, self.token, owner=me, was_dirty=was_dirty, is_dirty=is_dirty, now_s=now.now_s
            )
        )


def book_of(inventory: Inventory) -> BookStore:
    """The lab's book of reservations, wherever it is kept.

    Raises:
        Unreachable: a rack's jump host has no pinned key.
    """
    if inventory.kind == "soft":
        return local_store(lab_dir(inventory.name), lab=inventory.name)
    return node_store(open_keeper(inventory), lab=inventory.name)


@contextlib.contextmanager
def hold(
    inventory: Inventory, names: Iterable[str] = (), *, why: str, mode: Mode, ttl_s: float = TTL_S
) -> Iterator[Holding]:
    """Hold the things of these names, or the whole lab, while the block runs.

    Raises:
        Reserved: somebody else holds a part of it.
        UsageError: there is no such thing, or it is outside what this user has booked by hand.
        ReservationLost: at the end, when it was lost on the way.
    """
    interventions.watch(lab_dir(inventory.name))
    wanted = covered(inventory.topology, names)
    store, was_dirty = book_of(inventory), _is_dirty(inventory)
    holding = _claim(store, wanted, why=why, mode=mode, ttl_s=ttl_s, never_all=_never_all(inventory))
    try:
        yield holding
    except BaseException:
        with contextlib.suppress(FaultbedError):
            holding.release(was_dirty=was_dirty, is_dirty=_is_dirty(inventory))
        raise
    if holding._lost is not None:  # noqa: SLF001 (this function is the class's other half)
        raise holding._lost  # noqa: SLF001
    holding.release(was_dirty=was_dirty, is_dirty=_is_dirty(inventory))


def _is_dirty(inventory: Inventory) -> bool:
    """Whether others have to be kept away; all users of a soft lab have one mark, for its folder is theirs together."""
    return inventory.kind == "rack" and dirty.is_unknown(lab_dir(inventory.name))


def reserve_by_hand(inventory: Inventory, names: Iterable[str], *, for_s: float, why: str) -> tuple[Entry, Reading]:
    """Book things for a while, beyond the end of this process; a booking that this user has already is replaced.

    Raises:
        Reserved: somebody else holds a part of it.
        UsageError: there is no such thing.
    """
    wanted = covered(inventory.topology, names)
    me = owner()
    made: list[Entry] = []

    def rule(now: Reading) -> reservation.Book:
        entry = Entry(
            token=f"booking-{me}",
            owner=me,
            mode="booking",
            covers=wanted,
            who=who(),
            why=why,
            since_s=now.now_s,
            until_s=now.now_s + for_s,
        )
        made[:] = [entry]
        return reservation.take(now.book, entry, now_s=now.now_s, is_dead=is_dead)

    reading = book_of(inventory).change(rule)
    return made[0], reading


def _never_all(inventory: Inventory) -> dict[str, frozenset[str]]:
    """By rack switch, the uplinks that may not all be hurt at once, whoever hurts them; none where that is allowed."""
    if inventory.may_lose_all_uplinks:
        return {}
    links = {
        switch.name: frozenset(link.name for link in inventory.topology.links_of(switch.name) if link.is_uplink)
        for switch in inventory.topology.switches
        if switch.role == "rtsw"
    }
    return {name: uplinks for name, uplinks in links.items() if len(uplinks) > 1}


def _claim(
    store: BookStore,
    covers: tuple[str, ...],
    *,
    why: str,
    mode: Mode,
    ttl_s: float,
    never_all: Mapping[str, frozenset[str]] = reservation.NOTHING,
) -> Holding:
    token, me, asked = secrets.token_hex(8), owner(), now_s()

    def rule(now: Reading) -> reservation.Book:
        nonlocal token
        above = next((entry for entry in now.book if entry.token == os.environ.get(INHERITED)), None)
        if above is not None and (WHOLE_LAB in above.covers or set(covers) <= set(above.covers)):
            token = above.token
            return reservation.refresh(now.book, token, until_s=max(above.until_s, now.now_s + ttl_s))
        if beyond := reservation.outside(now.book, me, covers, now_s=now.now_s):
            what = "the whole lab" if WHOLE_LAB in beyond else ", ".join(beyond)
            raise UsageError(
                f"{why} would touch {what}, which is outside your reservation: `faultbed reserve` with more names, "
                "or `faultbed release` first"
            )
        entry = Entry(
            token=token,
            owner=me,
            mode=mode,
            covers=covers,
            who=f"{who()} (process {os.getpid()})",
            why=why,
            since_s=now.now_s,
            until_s=now.now_s + ttl_s,
            process=this_process(),
        )
        return reservation.take(now.book, entry, now_s=now.now_s, is_dead=is_dead, never_all=never_all)

    try:
        store.change(rule)
    except (Reserved, UsageError):
        raise
    except BaseException:  # cut off, and perhaps written all the same: not to be in our own way for a whole lease
        if token != os.environ.get(INHERITED):
            with contextlib.suppress(FaultbedError):
                store.change(lambda now: reservation.release(now.book, token))
        raise
    borrowed = token == os.environ.get(INHERITED)
    sure_until = asked + _SURE * ttl_s
    return Holding(store=store, token=token, covers=covers, ttl_s=ttl_s, _sure_until=sure_until, _borrowed=borrowed)


def now_s() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def owner() -> str:
    """Whose reservations these are: one identity for each FAULTBED_HOME, made at first use."""
    path = private_dir(home_dir()) / "owner"
    if not path.exists():
        mine = path.with_name(f"owner.{secrets.token_hex(4)}")
        mine.write_text(secrets.token_hex(8), encoding="ascii")
        with contextlib.suppress(FileExistsError):  # another process of ours was first: its identity is ours
            path.hardlink_to(mine)
        mine.unlink()
    return path.read_text(encoding="ascii").strip()


def who() -> str:
    """The person, as others see it in the book."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def this_process() -> str:
    """This process, told apart from every other one of this machine since it started, also of other PID namespaces."""
    return f"{_machine()}:{os.getpid()}:{_start_of(os.getpid())}"


def is_dead(process: str) -> bool:
    """Whether a process is known to be dead. Of a process on another machine nobody knows that here."""
    machine, pid, start = process.rsplit(":", 2)
    return machine == _machine() and _start_of(int(pid)) != start


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (a text, not a path)


def _start_of(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot: field 22 of its stat (proc(5)), counted after the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return None
