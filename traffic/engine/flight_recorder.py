"""Flight recorder contents, and a sentence that says where a rank was when it did not finish. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.traffic.engine.run_results import Outcome

__all__ = ["STORAGE_WAITS", "Entry", "Flight", "RankEnd", "flight_of", "standing"]

STORAGE_WAITS = {
    "data": "waits for data from storage",
    "checkpoint": "waits for its checkpoint to be stored",
    "restore": "waits for its checkpoint from storage",
}
"""What a rank waits for, by the phases in which it waits for the storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event on a rank, in controller ns (`faultbed.traffic.node.ranks.recorder` lists the kinds of events).

    `connection` is -1 for an event without a connection, and in recordings from before peers could have several.
    """

    at_ns: int
    what: str
    iteration: int
    step: int
    peer: int
    qpn: int
    segment: int
    psn: int
    connection: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flight recorder of one rank, oldest entry first, and the rank's position in its program."""

    rank: int
    endpoint: str
    standing: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a collective ended for one rank. For a failed rank, `where` is its position."""

    rank: int
    endpoint: str
    outcome: Outcome
    where: str | None


def flight_of(message: Mapping[str, Any], *, rank: int, endpoint: str, offset_ns: int) -> Flight:
    """Build a `Flight` from an engine's `flight` event."""
    entries = (dict(zip(message["fields"], entry, strict=True)) for entry in message["entries"])
    return Flight(
        rank=rank,
        endpoint=endpoint,
        standing=standing(message),
        entries=tuple(Entry(**{**entry, "at_ns": entry["at_ns"] + offset_ns}) for entry in entries),
    )


def standing(message: Mapping[str, Any]) -> str:
    """Describe the position of a rank: the step and the peer that it waits for, or its phase."""
    if message["phase"] in STORAGE_WAITS:
        return f"iteration {message['iteration']}, {STORAGE_WAITS[message['phase']]}"
    if message["phase"] != "comm":
        return f"iteration {message['iteration']}, {message['phase']}"
    open_lanes = [lane for lane in message["lanes"] if lane["done"] < lane["segments"]]
    if not open_lanes:
        return f"iteration {message['iteration']}, at its end"
    first = min(open_lanes, key=lambda lane: (lane["step"], lane["direction"] != "in"))
    preposition = "from" if first["direction"] == "in" else "to"
    state = "" if first["state"] == "up" else f", {first['state']}"
    return (
        f"iteration {message['iteration']}, step {first['step']}: waits for segment {first['done']} of "
        f"{first['segments']} {preposition} rank {first['peer']} (QP {first['qpn']}{state})"
    )
