"""Who may touch what of a shared lab: the rules, without a clock, a disk or a network.

A lab has one book of entries. An entry covers hosts, switches and links by name (or the whole lab, `*`) and ends by
itself: nobody has to be asked when a user is gone. Its mode says what the owner may do beside it:

    booking      by hand, for hours; the owner's claims go beside it, nobody else's
    shared       a flow or a fault by hand, for as long as it lasts; beside other such claims of the same owner
    exclusive    an experiment or a test session: nothing beside it, not of the same owner either
    dirty        what such a claim left behind on a rack: nobody else's, until its owner has healed it

Two entries conflict when they cover a common thing and are not both the owner's in this sense (`conflicts`).
All times are seconds of the one clock of the machine that keeps the book.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from testbed.errors import LabError
from testbed.model.topology import Topology

__all__ = [
    "WHOLE_LAB",
    "Book",
    "Entry",
    "Mode",
    "ReservationLost",
    "Reserved",
    "conflicts",
    "covered",
    "leave",
    "live",
    "outside",
    "overlap",
    "refresh",
    "release",
    "take",
    "tell",
]

WHOLE_LAB = "*"
DIRTY_S = 30 * 86400.0
"""What is DIRTY stays so until somebody heals it; a month later nobody remembers, and preflight has the word."""
Mode = Literal["booking", "shared", "exclusive", "dirty"]
Book = tuple["Entry", ...]
IsDead = Callable[[str], bool]
NOTHING: Mapping[str, frozenset[str]] = MappingProxyType({})


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reservation. `process` names the process that holds it, when it ends with that process."""

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
    """Somebody else holds it."""


class ReservationLost(LabError):
    """What was held is not held any more: whoever thought so must stop touching the lab."""


def _nobody_is_dead(_process: str) -> bool:
    return False


def conflicts(one: Entry, other: Entry) -> bool:
    """Whether both cannot be in the book at the same time."""
    if one.token == other.token or not overlap(one.covers, other.covers):
        return False
    if one.owner != other.owner:
        return True
    modes = {one.mode, other.mode}
    if "dirty" in modes:  # its owner is told by the lab's own mark, and has to get there to heal it
        return False
    # A person's second booking would only hide the first one's end.
    return modes == {"booking"} or ("booking" not in modes and "exclusive" in modes)


def live(book: Book, *, now_s: float, is_dead: IsDead = _nobody_is_dead) -> Book:
    """The entries that still count: not run out, and not of a process that is known to have died."""
    return tuple(
        entry for entry in book if entry.until_s > now_s and not (entry.process is not None and is_dead(entry.process))
    )


def take(
    book: Book,
    wanted: Entry,
    *,
    now_s: float,
    is_dead: IsDead = _nobody_is_dead,
    never_all: Mapping[str, frozenset[str]] = NOTHING,
) -> Book:
    """The book with `wanted` in it; an entry of the same token is replaced. What has run out goes.

    Args:
        book: the entries so far.
        wanted: the new one.
        now_s: the time of the machine that keeps the book.
        is_dead: whether a process is known to have died.
        never_all: by switch, links that may never be hurt all at once: an uplink that a claim covers may be down.

    Raises:
        Reserved: somebody holds a part of it, or the rest of such links; the sentence says who, why and until when.
    """
    left = live(book, now_s=now_s, is_dead=is_dead)
    for entry in left:
        if conflicts(entry, wanted):
            raise Reserved(
                f"{_things(_common(entry.covers, wanted.covers))} is reserved: {tell(entry, now_s=now_s)}; wait, take "
                f"other targets, or ask; `faultbed release --force{_name_of(entry)}` ends it if nobody is there"
            )
    _refuse_the_last(left, wanted, never_all, now_s=now_s)
    return (*(entry for entry in left if entry.token != wanted.token), wanted)


def _refuse_the_last(left: Book, wanted: Entry, never_all: Mapping[str, frozenset[str]], *, now_s: float) -> None:
    """Each of two faults may leave a rack an uplink, and both together none. One claim of all is not judged here."""
    others = [entry for entry in left if entry.token != wanted.token and entry.mode != "booking"]
    for switch, links in never_all.items():
        ours = links & set(wanted.covers)
        theirs = [entry for entry in others if links & set(entry.covers) - ours]
        held = ours.union(*(entry.covers for entry in theirs))
        if wanted.mode != "booking" and ours and ours != links <= held:
            raise Reserved(
                f"{_things(tuple(sorted(ours)))}: the other uplinks of {switch} may be down ("
                f"{'; '.join(tell(entry, now_s=now_s) for entry in theirs)}), and the rack behind it with them; wait, "
                "or take another target; faultbed_safety.all_uplinks says whether this lab allows it"
            )


def refresh(book: Book, token: str, *, until_s: float) -> Book:
    """The book with the end of one entry moved to `until_s`, never back.

    Raises:
        ReservationLost: it is not in the book any more: it ran out, and somebody else has come or it was released.
    """
    if all(entry.token != token for entry in book):
        raise ReservationLost(
            "the reservation is not in the lab's book any more: it was not refreshed in time, or somebody released it "
            "by force; what runs must not touch the lab any further"
        )
    return tuple(
        msgspec.structs.replace(entry, until_s=max(entry.until_s, until_s)) if entry.token == token else entry
        for entry in book
    )


def release(book: Book, token: str) -> Book:
    """The book without one entry; it need not be there."""
    return tuple(entry for entry in book if entry.token != token)


def leave(book: Book, token: str, *, owner: str, was_dirty: bool, is_dirty: bool, now_s: float) -> Book:
    """The book when a claim is over. What it left DIRTY stays covered; what its owner has healed is free.

    `was_dirty`: so was the lab when the claim began, which then has made nothing worse that would have to be kept.
    """
    mine, rest = f"dirty-{owner}", release(book, token)
    left = next((entry for entry in book if entry.token == token), None)
    if not is_dirty:
        return release(rest, mine)
    if was_dirty or left is None:
        return rest
    before = next((entry for entry in rest if entry.token == mine), None)
    covers = {*left.covers, *(before.covers if before else ())}
    stays = msgspec.structs.replace(
        before or left,
        token=mine,
        mode="dirty",
        covers=(WHOLE_LAB,) if WHOLE_LAB in covers else tuple(sorted(covers)),
        until_s=now_s + DIRTY_S,
        process=None,
    )
    return (*release(rest, mine), stays)


def outside(book: Book, owner: str, covers: Iterable[str], *, now_s: float) -> tuple[str, ...]:
    """Of `covers`, what lies outside the owner's bookings; nothing when the owner has none."""
    booked = {
        thing
        for entry in live(book, now_s=now_s)
        if (entry.owner, entry.mode) == (owner, "booking")
        for thing in entry.covers
    }
    if not booked or WHOLE_LAB in booked:
        return ()
    return tuple(sorted(set(covers) - booked))


def covered(topology: Topology, names: Iterable[str]) -> tuple[str, ...]:
    """What a reservation of these names covers: a host or a switch with its links, or a link alone. None: everything.

    Raises:
        UsageError: there is no such thing in the lab.
    """
    things: set[str] = set()
    for name in names:
        target = topology.resolve(name)
        if target.link is not None:
            things.add(target.link.name)
        else:
            things |= {target.node, *(link.name for link in topology.links_of(target.node))}
    return tuple(sorted(things)) or (WHOLE_LAB,)


def tell(entry: Entry, *, now_s: float) -> str:
    """An entry as one phrase: who, why, since when, for how long."""
    if entry.mode == "dirty":
        ago = _minutes(now_s - entry.since_s)
        return f"left DIRTY by {entry.who}, {entry.why}, {ago} ago, who has to `faultbed heal` it"
    return (
        f"{entry.who}, {entry.why}, since {_minutes(now_s - entry.since_s)}, "
        f"for another {_minutes(entry.until_s - now_s)} unless refreshed"
    )


def overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two lists of what is covered have something in common."""
    return WHOLE_LAB in one or WHOLE_LAB in other or not set(one).isdisjoint(other)


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    if WHOLE_LAB in one:
        return other
    return one if WHOLE_LAB in other else tuple(sorted(set(one) & set(other)))


def _name_of(entry: Entry) -> str:
    """One name, after a space, that tells an entry from those beside it; nothing for the whole lab."""
    return "" if WHOLE_LAB in entry.covers else " " + min(entry.covers, key=lambda name: (":" in name, name))


def _things(covers: tuple[str, ...]) -> str:
    if WHOLE_LAB in covers:
        return "the lab"
    shown = ", ".join(covers[:3])
    return shown if len(covers) <= 3 else f"{shown} and {len(covers) - 3} more"  # noqa: PLR2004 (what one reads at once)


def _minutes(seconds: float) -> str:
    if seconds < 120:  # noqa: PLR2004 (below two minutes, seconds say more)
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004
