"""Part `starts` of the bench: the time to start programs on the lab, with warm parents over without.

Each pair of measurements begins with a reset. For the one without, the warm parents are killed, so that every program
starts an interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from bench.rows import Row, mark
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.observe.watcher import Watcher
from faultbed.traffic.engine.engine_client import Engines

__all__ = ["measure"]

PAIRS = 2
_COMMAND_S = 300.0


def measure(inventory: Inventory, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield, for each kind of start, the ratio of its times with and without warm parents, and both times.

    Raises:
        LabError: a machine has no warm parent after a reset, or a command failed.
    """
    whats = _starts(inventory)
    times_s: dict[str, list[tuple[float, float]]] = {what: [] for what in whats}
    for number in range(PAIRS):
        times: list[dict[str, float]] = []
        for kind in ("warm", "cold"):
            lifecycle.reset(inventory, lambda _: None)
            with open_lab(inventory) as lab:
                parents = {name: lab.warm_parent(name) for name in lab.nodes()}
                if missing := [name for name, parent in parents.items() if parent is None]:
                    raise LabError(f"{', '.join(missing)}: no warm parent after a reset; run `faultbed up --fresh`")
                if kind == "cold":
                    for name, parent in parents.items():
                        lab.node(name).run(["kill", "-KILL", str(parent["pid"] if parent else "")])
            times.append({what: _timed(inventory, start) for what, start in whats.items()})
            progress(f"pair {number + 1} of {PAIRS}, {kind}: {times[-1]}")
        for what in whats:
            times_s[what].append((times[0][what], times[1][what]))
    for what, pairs in times_s.items():
        yield _row(what, pairs, GOALS[what])


GOALS = {
    "a watcher answers": 0.5,
    "engines of all hosts answer": 0.5,
    "inject packet.drop --for 1s, whole command": 0.5,
    "traffic collective all-reduce, 64 KiB, 5 iterations, whole command": 0.5,
}
"""Largest ratio of each start's time with warm parents to that without (issue 51's table, as ratios)."""


def _starts(inventory: Inventory) -> dict[str, Callable[[Lab], None]]:
    first = inventory.topology.hosts[0]
    rnic = f"{first.name}:{first.rnics[0].name}"
    collective = ("collective", "all-reduce", "--size", "64KiB", "--iterations", "5")
    starts: tuple[Callable[[Lab], None], ...] = (
        lambda lab: Watcher(lab, first.name).close(),
        lambda lab: Engines.start(lab, [host.name for host in inventory.topology.hosts]).close(),
        lambda lab: _command(lab, "inject", "packet.drop", rnic, "--set", "share=0.5", "--for", "1s"),
        lambda lab: _command(lab, "traffic", *collective),
    )
    return dict(zip(GOALS, starts, strict=True))


def _timed(inventory: Inventory, start: Callable[[Lab], None]) -> float:
    """Return the seconds of a start on a lab that is connected already."""
    with open_lab(inventory) as lab:
        for name in lab.nodes():
            lab.node(name).run(["true"])
        began_s = time.monotonic()
        start(lab)
        return time.monotonic() - began_s


def _command(lab: Lab, *words: str) -> None:
    argv = [sys.executable, "-m", "faultbed", "--lab", str(lab.inventory.resolve()), *words]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False, cwd=folder)
    if done.returncode not in (0, 2):
        raise LabError(f"`faultbed {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-800:]}")


def _row(what: str, pairs: list[tuple[float, float]], most: float) -> Row:
    ratios = [warm_s / cold_s for warm_s, cold_s in pairs]
    middle = statistics.median(ratios)
    warm_s, cold_s = (statistics.median(values) for values in zip(*pairs, strict=True))
    return (
        f"{what}: with / without warm parents ({warm_s:.2f} s / {cold_s:.2f} s)",
        f"{middle:.2f}",
        f"{min(ratios):.2f}..{max(ratios):.2f}, n={len(ratios)}",
        f"<= {most:g}",
        mark(reached=middle <= most),
    )
