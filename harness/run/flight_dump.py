"""Write flight recorders to a file when `kill -USR1` requests them while a workload runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultbed.harness.record import rundir
from faultbed.traffic.engine.running_traffic import OnEvent

__all__ = ["STEM", "stem_now", "to_each", "writer"]

STEM = "flights-requested"
"""Stem of the names of such files in a run directory."""


def stem_now() -> str:
    """Return a stem with the present time, for folders in which several commands may write."""
    return f"{STEM}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def writer(folder: Path, stem: str, report: Callable[[str], None]) -> OnEvent:
    """Return a handler of workload events that writes each `flights` event to the next free `stem`-N.json in `folder`.

    `report` receives the file's path and the position of each rank. It receives a failed write, too: the workload goes
    on.
    """

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "flights":
            _write(event, folder, stem, report)

    return on_event


def to_each(*handlers: OnEvent) -> OnEvent:
    """Return a handler that passes each event to all of these handlers, in this order."""

    def on_event(event: dict[str, Any]) -> None:
        for handler in handlers:
            handler(event)

    return on_event


def _write(event: dict[str, Any], folder: Path, stem: str, report: Callable[[str], None]) -> None:
    flights, silent = event["flights"], event["silent"]
    if not flights and not silent:
        report("flight recorders were requested (SIGUSR1), but only ranks have them, and this workload has none")
        return
    for flight in flights:
        report(f"rank {flight.rank} on {flight.endpoint}: {flight.standing}")
    if silent:
        report(f"no reply from {', '.join(silent)}")
    if not flights:
        return
    number = 1
    while (path := folder / f"{stem}-{number}.json").exists():
        number += 1
    try:
        rundir.write_flights(path, flights)
    except OSError as error:
        report(f"flight recorders of {len(flights)} ranks: {path}: {error.strerror or error}")
        return
    report(f"flight recorders of {len(flights)} ranks: {path}")
