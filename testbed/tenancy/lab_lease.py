"""Leases of a part of a lab, for as long as a command changes it.

The command refreshes its lease whenever it makes progress (`LabLease.refresh`). No background thread does, so that a
command that hangs loses its lease. The next refresh then raises, and the command must not change the lab any more.

Expiry uses CLOCK_BOOTTIME, which advances during suspend: a laptop that wakes up must not believe its lease is fresh.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import home_dir, lab_dir, private_dir
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy import dirty, interventions, reservation
from faultbed.testbed.tenancy.interventions import boot_and_pid_namespace, who
from faultbed.testbed.tenancy.reservation import WHOLE_LAB, Entry, Mode, ReservationLost, Reserved, covered
from faultbed.testbed.tenancy.reservation_store import NotWritten, Reading, ReservationStore

__all__ = [
    "INHERITED",
    "TTL_S",
    "LabLease",
    "hold",
    "hold_if_recorded",
    "is_dead",
    "now_s",
    "owner",
    "reserve_by_hand",
    "store_of",
    "this_process",
    "who",
]

TTL_S = 300.0
"""Time from the last refresh to the end of a lease. A run on a starved machine is never silent for so long. The lease
of a process that died on this machine is free at once."""


_SURE = 0.8
"""Fraction of a lease after which its holder no longer relies on it. The rest covers the drift between the clocks of
holder and store: at most 17 %, if chrony slews both apart at full speed (83333 ppm each, chrony.conf(5),
maxslewrate)."""
_SKIP_STORE = 0.6
"""Fraction of the lease that must remain for us to skip a check with the reservation store."""

INHERITED = "FAULTBED_HOLDING"
"""Environment variable with the token of a lease that programs started by its holder may use."""


@dataclass(kw_only=True)
class LabLease:
    """This command's lease of a part of a lab. Thread-safe. `refresh` calls the store once per fifth of the lease."""

    store: ReservationStore
    token: str
    covers: tuple[str, ...]
    ttl_s: float
    _sure_until: float
    _is_inherited: bool = False
    _parent: str | None = None
    """Process from which the lease is inherited. If it dies, others could reserve the lab: this process takes over."""
    _lost: FaultbedError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Extend the lease; call this on progress.

        Raises:
            ReservationLost: the lease has expired or was released, and may belong to another user.
            LabError: the store does not answer, for longer than the lease lasts.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            before_s = now_s()
            is_orphan = self._parent is not None and is_dead(self._parent)
            if self._sure_until - before_s > _SKIP_STORE * self.ttl_s and not is_orphan:
                return

            def rule(now: Reading) -> reservation.Book:
                book = reservation.refresh(now.book, self.token, until_s=now.now_s + self.ttl_s)
                return reservation.taken_over(book, self.token, process=this_process()) if is_orphan else book

            try:
                self.store.change(rule)
            except ReservationLost as error:
                self._lost = error
                raise
            except FaultbedError as error:
                if now_s() < self._sure_until:
                    return  # the lease is still valid; the next refresh tries again
                self._lost = error
                raise
            if is_orphan:
                self._parent, self._is_inherited = None, False
            # Counted from before the request, because the store's clock was read after it.
            self._sure_until = before_s + _SURE * self.ttl_s

    def heartbeat(self) -> None:
        """Refresh without raising (for a reader's thread); the next `refresh` raises the loss."""
        with contextlib.suppress(FaultbedError):
            self.refresh()

    def held_by_others(self) -> tuple[str, ...]:
        """Return what other live commands hold now; nothing if the store cannot be read."""
        with contextlib.suppress(FaultbedError):
            now = self.store.read()
            entries = reservation.live(now.book, now_s=now.now_s, is_dead=is_dead)
            of_others = [
                entry for entry in entries if entry.token != self.token and entry.mode in ("shared", "exclusive")
            ]
            return tuple(sorted({name for entry in of_others for name in entry.covers}))
        return ()

    def release(self, *, was_dirty: bool = False, is_dirty: bool = False) -> None:
        """Release the lease; a DIRTY part stays reserved for its owner. An inherited lease is not released.

        Raises:
            ReservationLost: the lease had ended before, so other users may have used the lab meanwhile.
        """
        if self._is_inherited:
            return
        me = owner()
        reading = self.store.change(
            lambda now: reservation.end_entry(
                now.book, self.token, owner=me, was_dirty=was_dirty, is_dirty=is_dirty, now_s=now.now_s
            )
        )
        reservation.refresh(reading.book, self.token, until_s=reading.now_s)


def store_of(inventory: Inventory) -> ReservationStore:
    """Return the lab's reservation store, wherever it is.

    Raises:
        Unreachable: a rack's jump host has no pinned key.
    """
    return backend_of(inventory.kind).store(inventory)


@contextlib.contextmanager
def hold(
    inventory: Inventory, names: Iterable[str] = (), *, why: str, mode: Mode, ttl_s: float = TTL_S
) -> Iterator[LabLease]:
    """Hold a lease of the named targets, or of the whole lab, while the block runs.

    Raises:
        Reserved: another user or command holds a part of it.
        UsageError: a name is not in the lab, or is outside this user's bookings.
        ReservationLost: the block has ended, but the lease was lost before.
    """
    interventions.watch(lab_dir(inventory.name))
    requested = covered(inventory.topology, names)
    store, was_dirty = store_of(inventory), _is_dirty(inventory)
    lease = _acquire(store, requested, why=why, mode=mode, ttl_s=ttl_s, never_all=_never_all(inventory))
    try:
        yield lease
    except BaseException:
        with contextlib.suppress(FaultbedError):
            lease.release(was_dirty=was_dirty, is_dirty=_is_dirty(inventory))
        raise
    if lease._lost is not None:  # noqa: SLF001 (this function and the class belong together)
        raise lease._lost  # noqa: SLF001
    is_dirty = _is_dirty(inventory)
    try:
        lease.release(was_dirty=was_dirty, is_dirty=is_dirty)
    except NotWritten:  # the lease ends with this process, but a DIRTY part must stay reserved
        if was_dirty or is_dirty:
            raise


@contextlib.contextmanager
def hold_if_recorded(inventory: Inventory, names: Iterable[str] = (), *, why: str) -> Iterator[None]:
    """Hold an exclusive lease if its record can be written; on a full disk the block runs without one.

    For commands that only end faults or the lab: a full disk must not keep those in place.

    Raises:
        Reserved: another user or command holds a part of it, as for `hold`.
        UsageError: as for `hold`.
    """
    with contextlib.ExitStack() as lease:
        with contextlib.suppress(NotWritten):
            lease.enter_context(hold(inventory, names, why=why, mode="exclusive"))
        yield


def _is_dirty(inventory: Inventory) -> bool:
    """Return whether a DIRTY part must stay reserved. Not on a soft lab: its users see the mark in its folder."""
    return not traits_of(inventory.kind).has_snapshot and dirty.is_unknown(lab_dir(inventory.name))


def reserve_by_hand(inventory: Inventory, names: Iterable[str], *, for_s: float, why: str) -> tuple[Entry, Reading]:
    """Book names for `for_s` seconds, independent of this process. An earlier booking of this user is replaced.

    Raises:
        Reserved: another user holds a part of it.
        UsageError: a name is not in the lab, or the time is 0.
    """
    if for_s <= 0:
        raise UsageError("--for: a reservation needs more than 0 s; `faultbed release` ends one")
    requested = covered(inventory.topology, names)
    me = owner()
    booked: list[Entry] = []

    def rule(now: Reading) -> reservation.Book:
        entry = Entry(
            token=f"booking-{me}",
            owner=me,
            mode="booking",
            covers=requested,
            who=who(),
            why=why,
            since_s=now.now_s,
            until_s=now.now_s + for_s,
        )
        booked[:] = [entry]
        return reservation.reserve(now.book, entry, now_s=now.now_s, is_dead=is_dead)

    reading = store_of(inventory).change(rule)
    return booked[0], reading


def _never_all(inventory: Inventory) -> dict[str, frozenset[str]]:
    """Return, by rack switch, the uplinks that must not all be affected at once; empty if the lab allows that."""
    if inventory.may_lose_all_uplinks:
        return {}
    links = {
        switch.name: frozenset(link.name for link in inventory.topology.links_of(switch.name) if link.is_uplink)
        for switch in inventory.topology.switches
        if switch.role == "rtsw"
    }
    return {name: uplinks for name, uplinks in links.items() if len(uplinks) > 1}


def _acquire(
    store: ReservationStore,
    covers: tuple[str, ...],
    *,
    why: str,
    mode: Mode,
    ttl_s: float,
    never_all: Mapping[str, frozenset[str]] = reservation.NOTHING,
) -> LabLease:
    token, me, before_s = secrets.token_hex(8), owner(), now_s()
    parent: str | None = None

    def rule(now: Reading) -> reservation.Book:
        nonlocal token, parent
        inherited = next((entry for entry in now.book if entry.token == os.environ.get(INHERITED)), None)
        if inherited is not None and (WHOLE_LAB in inherited.covers or set(covers) <= set(inherited.covers)):
            token, parent = inherited.token, inherited.process
            return reservation.refresh(now.book, token, until_s=max(inherited.until_s, now.now_s + ttl_s))
        if uncovered := reservation.outside(now.book, me, covers, now_s=now.now_s):
            targets = "the whole lab" if WHOLE_LAB in uncovered else ", ".join(uncovered)
            raise UsageError(
                f"{why} would touch {targets}, which is outside your reservation: `faultbed reserve` with more names, "
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
        return reservation.reserve(now.book, entry, now_s=now.now_s, is_dead=is_dead, never_all=never_all)

    try:
        store.change(rule)
    except (Reserved, UsageError):
        raise
    except BaseException:
        # Interrupted, perhaps after the write. The entry would block this user for a whole lease, so remove it.
        if token != os.environ.get(INHERITED):
            with contextlib.suppress(FaultbedError):
                store.change(lambda now: reservation.release(now.book, token))
        raise
    lease = LabLease(
        store=store, token=token, covers=covers, ttl_s=ttl_s, _sure_until=before_s + _SURE * ttl_s,
        _is_inherited=token == os.environ.get(INHERITED), _parent=parent,
    )  # fmt: skip
    if parent is not None:
        lease.refresh()  # takes the lease over if the parent has died already
    return lease


def now_s() -> float:
    """Return the seconds of CLOCK_BOOTTIME, which cannot be set and advances during suspend (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def owner() -> str:
    """Return the owner of this user's reservations: one identity for each FAULTBED_HOME, created at first use."""
    path = private_dir(home_dir()) / "owner"
    if not path.exists():
        temporary = path.with_name(f"owner.{secrets.token_hex(4)}")
        temporary.write_text(secrets.token_hex(8), encoding="ascii")
        with contextlib.suppress(FileExistsError):  # another process of this user was first: use its identity
            path.hardlink_to(temporary)
        temporary.unlink()
    return path.read_text(encoding="ascii").strip()


def this_process() -> str:
    """Return an id of this process that is unique on this machine, also across boots and PID namespaces."""
    return f"{boot_and_pid_namespace()}:{os.getpid()}:{_start_of(os.getpid())}"


def is_dead(process: str) -> bool:
    """Return whether a process is known to be dead; False for processes of other machines."""
    try:
        machine, pid, start = process.rsplit(":", 2)
        return machine == boot_and_pid_namespace() and _start_of(int(pid)) != start
    except ValueError:  # another version wrote it
        return False


def _start_of(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot: field 22 of its stat (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return None
