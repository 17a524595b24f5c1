"""Flight recorders that somebody asked for while a workload runs (`kill -USR1`): written to a file, and told where."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.record import rundir
from traffic.engine.running_traffic import OnEvent

__all__ = ["STEM", "both", "stem_now", "writer"]

STEM = "flights-asked"
"""Of the names of such files in a run directory."""


def stem_now() -> str:
    """A name's beginning where many commands may write."""
    return f"{STEM}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def writer(folder: Path, stem: str, tell: Callable[[str], None]) -> OnEvent:
    """What takes a workload's events, and writes each `flights` to the next free `stem`-N.json in `folder`.

    `tell` is told where, and where each rank was. What cannot be written is told, too: the workload goes on.
    """

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "flights":
            _write(event, folder, stem, tell)

    return on_event


def both(first: OnEvent, second: OnEvent) -> OnEvent:
    """Each event to the one, then to the other."""

    def on_event(event: dict[str, Any]) -> None:
        first(event)
        second(event)

    return on_event


def _write(event: dict[str, Any], folder: Path, stem: str, tell: Callable[[str], None]) -> None:
    flights, silent = event["flights"], event["silent"]
    if not flights and not silent:
        tell("asked for flight recorders (SIGUSR1): only ranks have them, and this workload has none")
        return
    for flight in flights:
        tell(f"rank {flight.rank} on {flight.endpoint}: {flight.standing}")
    if silent:
        tell(f"nothing was heard of {', '.join(silent)}")
    if not flights:
        return
    number = 1
    while (path := folder / f"{stem}-{number}.json").exists():
        number += 1
    try:
        rundir.write_flights(path, flights)
    except OSError as error:
        tell(f"flight recorders of {len(flights)} ranks: {path}: {error.strerror or error}")
        return
    tell(f"flight recorders of {len(flights)} ranks: {path}")
