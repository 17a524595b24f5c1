"""What a flight recorder held, and in words where a rank was when it did not come to an end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traffic.engine.run_results import Outcome

__all__ = ["Entry", "Flight", "RankEnd", "flight_of", "standing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that happened on a rank (`traffic.node.ranks.recorder` says what there is), in controller ns."""

    at_ns: int
    what: str
    iteration: int
    step: int
    peer: int
    qpn: int
    segment: int
    psn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The recorder of one rank, oldest entry first, and where the rank was."""

    rank: int
    endpoint: str
    standing: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a collective ended for one rank. `where` says where it was, when it failed."""

    rank: int
    endpoint: str
    outcome: Outcome
    where: str | None


def flight_of(message: Mapping[str, Any], *, rank: int, endpoint: str, offset_ns: int) -> Flight:
    """A `flight` event of an engine."""
    entries = (dict(zip(message["fields"], entry, strict=True)) for entry in message["entries"])
    return Flight(
        rank=rank,
        endpoint=endpoint,
        standing=standing(message),
        entries=tuple(Entry(**{**entry, "at_ns": entry["at_ns"] + offset_ns}) for entry in entries),
    )


def standing(message: Mapping[str, Any]) -> str:
    """Where a rank is: in which step it waits for which peer, or that it does not wait."""
    waits = {"data": "waits for data from storage", "checkpoint": "waits for its checkpoint to be stored"}
    if message["phase"] in waits:
        return f"iteration {message['iteration']}, {waits[message['phase']]}"
    if message["phase"] != "comm":
        return f"iteration {message['iteration']}, {message['phase']}"
    open_lanes = [lane for lane in message["lanes"] if lane["done"] < lane["segments"]]
    if not open_lanes:
        return f"iteration {message['iteration']}, at its end"
    first = min(open_lanes, key=lambda lane: (lane["step"], lane["direction"] != "in"))
    way = "from" if first["direction"] == "in" else "to"
    state = "" if first["state"] == "up" else f", {first['state']}"
    return (
        f"iteration {message['iteration']}, step {first['step']}: waits for segment {first['done']} of "
        f"{first['segments']} {way} rank {first['peer']} (QP {first['qpn']}{state})"
    )
