"""Rules of reservations on a shared lab. Pure: the caller provides the time, and reads and writes the entries.

A lab has one list of entries. An entry covers hosts, switches and links by name, or the whole lab (`*`), and expires by
itself. Its mode decides which entries may overlap it:

    booking      made by hand, for hours; entries of the same owner may overlap it
    shared       a flow or a fault by hand, while it lasts; other shared entries of the same owner may overlap it
    exclusive    an experiment or a test session; only bookings of the same owner may overlap it
    dirty        a part of a rack that an entry left DIRTY; blocked for other users until its owner has healed it

Two entries conflict if they cover a common name and may not overlap (`conflicts`). All times are seconds of the store's
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from faultbed.testbed.errors import LabError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.suggestions import first_of

__all__ = [
    "WHOLE_LAB",
    "Book",
    "Entry",
    "Mode",
    "ReservationLost",
    "Reserved",
    "conflicts",
    "covered",
    "describe",
    "end_entry",
    "live",
    "outside",
    "overlap",
    "refresh",
    "release",
    "reserve",
    "taken_over",
]

WHOLE_LAB = "*"
DIRTY_S = 30 * 86400.0
"""How long a DIRTY entry stays if it is not healed; preflight finds what is still wrong a month later."""
Mode = Literal["booking", "shared", "exclusive", "dirty"]
Book = tuple["Entry", ...]
IsDead = Callable[[str], bool]
NOTHING: Mapping[str, frozenset[str]] = MappingProxyType({})


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reservation. `process` names the process that holds it, if it ends with that process."""

    token: str
    owner: str
    mode: Mode
    covers: tuple[str, ...]
    who: str
    why: str
    since_s: float
    until_s: float
    process: str | None = None


class Reserved(LabError):
    """Another user or command holds the reservation."""


class ReservationLost(LabError):
    """A reservation has expired or was removed: its holder must stop changing the lab."""


def _is_never_dead(_process: str) -> bool:
    return False


def conflicts(entry: Entry, other: Entry) -> bool:
    """Return whether two entries must not exist at the same time."""
    if entry.token == other.token or not overlap(entry.covers, other.covers):
        return False
    if entry.owner != other.owner:
        return True
    modes = {entry.mode, other.mode}
    if "dirty" in modes:  # the owner needs access to heal it
        return False
    # A second booking of the same user would only hide the end of the first one.
    return modes == {"booking"} or ("booking" not in modes and "exclusive" in modes)


def live(book: Book, *, now_s: float, is_dead: IsDead = _is_never_dead) -> Book:
    """Return the entries that still count: not expired, and not of a process that is known to be dead."""
    return tuple(
        entry for entry in book if entry.until_s > now_s and not (entry.process is not None and is_dead(entry.process))
    )


def reserve(
    book: Book,
    requested: Entry,
    *,
    now_s: float,
    is_dead: IsDead = _is_never_dead,
    never_all: Mapping[str, frozenset[str]] = NOTHING,
) -> Book:
    """Add an entry; one with the same token is replaced, and expired ones are removed.

    Args:
        book: the entries so far.
        requested: the new entry.
        now_s: the store's time.
        is_dead: whether a process is known to be dead.
        never_all: by rack switch, its uplinks, of which at least one must stay up. An uplink that an entry covers may
            go down at any time.

    Raises:
        Reserved: another entry covers a part of it, or the other entries leave a switch no further uplink; the message
            says who, why and until when.
    """
    left = live(book, now_s=now_s, is_dead=is_dead)
    for entry in left:
        if conflicts(entry, requested):
            raise Reserved(
                f"{_names(_common(entry.covers, requested.covers))} is reserved: {describe(entry, now_s=now_s)}; wait, "
                f"choose other targets, or ask its owner; `faultbed release --force{_name_of(entry)}` ends an "
                "abandoned reservation"
            )
    _refuse_the_last(left, requested, never_all, now_s=now_s)
    return (*(entry for entry in left if entry.token != requested.token), requested)


def _refuse_the_last(left: Book, requested: Entry, never_all: Mapping[str, frozenset[str]], *, now_s: float) -> None:
    """Refuse an entry that, with others, could take down all uplinks of a rack. A single entry may cover all."""
    others_entries = [entry for entry in left if entry.token != requested.token and entry.mode != "booking"]
    for switch, links in never_all.items():
        own = links & set(requested.covers)
        blocking = [entry for entry in others_entries if links & set(entry.covers) - own]
        may_be_down = own.union(*(entry.covers for entry in blocking))
        if requested.mode != "booking" and own and own != links <= may_be_down:
            raise Reserved(
                f"{_names(tuple(sorted(own)))}: the other uplinks of {switch} may be down ("
                f"{'; '.join(describe(entry, now_s=now_s) for entry in blocking)}), and the rack behind it with them; "
                "wait, or choose another target (faultbed_safety.all_uplinks allows it)"
            )


def refresh(book: Book, token: str, *, until_s: float) -> Book:
    """Move the end of one entry to `until_s`, never back.

    Raises:
        ReservationLost: the entry is gone: it expired and was replaced, or it was released.
    """
    if all(entry.token != token for entry in book):
        raise ReservationLost(
            "the reservation is gone: it was not refreshed in time, or another user released it by force; this command "
            "must not change the lab any further"
        )
    return tuple(
        msgspec.structs.replace(entry, until_s=max(entry.until_s, until_s)) if entry.token == token else entry
        for entry in book
    )


def taken_over(book: Book, token: str, *, process: str) -> Book:
    """Return the entries with a new process for one of them, because the process that made it has died."""
    return tuple(msgspec.structs.replace(entry, process=process) if entry.token == token else entry for entry in book)


def release(book: Book, token: str) -> Book:
    """Remove one entry, if it exists."""
    return tuple(entry for entry in book if entry.token != token)


def end_entry(book: Book, token: str, *, owner: str, was_dirty: bool, is_dirty: bool, now_s: float) -> Book:
    """Remove an entry that has ended. If it left the lab DIRTY, what it covered stays reserved for its owner.

    With `was_dirty`, the lab was DIRTY already when the entry began, so nothing more is reserved.
    """
    dirty_token, rest = f"dirty-{owner}", release(book, token)
    ended = next((entry for entry in book if entry.token == token), None)
    if not is_dirty:
        return release(rest, dirty_token)
    if was_dirty or ended is None:
        return rest
    earlier = next((entry for entry in rest if entry.token == dirty_token), None)
    covers = {*ended.covers, *(earlier.covers if earlier else ())}
    dirty_entry = msgspec.structs.replace(
        earlier or ended,
        token=dirty_token,
        mode="dirty",
        covers=(WHOLE_LAB,) if WHOLE_LAB in covers else tuple(sorted(covers)),
        until_s=now_s + DIRTY_S,
        process=None,
    )
    return (*release(rest, dirty_token), dirty_entry)


def outside(book: Book, owner: str, covers: Iterable[str], *, now_s: float) -> tuple[str, ...]:
    """Return the part of `covers` outside the owner's bookings; nothing if the owner has none."""
    booked = {
        name
        for entry in live(book, now_s=now_s)
        if (entry.owner, entry.mode) == (owner, "booking")
        for name in entry.covers
    }
    if not booked or WHOLE_LAB in booked:
        return ()
    return tuple(sorted(set(covers) - booked))


def covered(topology: Topology, names: Iterable[str]) -> tuple[str, ...]:
    """Return what these names cover: a host or switch with its links, or a link alone. No names: the whole lab.

    Raises:
        UsageError: a name is not in the lab.
    """
    names_covered: set[str] = set()
    for name in names:
        target = topology.resolve(name)
        if target.link is not None:
            names_covered.add(target.link.name)
        else:
            names_covered |= {target.node, *(link.name for link in topology.links_of(target.node))}
    return tuple(sorted(names_covered)) or (WHOLE_LAB,)


def describe(entry: Entry, *, now_s: float) -> str:
    """Return an entry as a phrase: who, why, since when, for how long."""
    if entry.mode == "dirty":
        ago = _minutes(now_s - entry.since_s)
        return f"left DIRTY by {entry.who}, {entry.why}, {ago} ago; run `faultbed heal` as that user"
    return (
        f"{entry.who}, {entry.why}, since {_minutes(now_s - entry.since_s)}, "
        f"for another {_minutes(entry.until_s - now_s)} unless refreshed"
    )


def overlap(covers: tuple[str, ...], other_covers: tuple[str, ...]) -> bool:
    """Return whether two lists of covered hosts, switches and links have a name in common."""
    return WHOLE_LAB in covers or WHOLE_LAB in other_covers or not set(covers).isdisjoint(other_covers)


def _common(covers: tuple[str, ...], other_covers: tuple[str, ...]) -> tuple[str, ...]:
    if WHOLE_LAB in covers:
        return other_covers
    return covers if WHOLE_LAB in other_covers else tuple(sorted(set(covers) & set(other_covers)))


def _name_of(entry: Entry) -> str:
    """Return a name, with a leading space, that distinguishes an entry from others; empty for the whole lab."""
    return "" if WHOLE_LAB in entry.covers else " " + min(entry.covers, key=lambda name: (":" in name, name))


def _names(covers: tuple[str, ...]) -> str:
    return "the lab" if WHOLE_LAB in covers else first_of(covers, 3)


def _minutes(seconds: float) -> str:
    if seconds < 120:  # noqa: PLR2004 (below two minutes, seconds are clearer)
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004
