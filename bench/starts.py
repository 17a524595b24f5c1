"""Part `starts` of the bench: the time to start programs on the lab, with warm parents over without.

Each pair of measurements begins with a reset. For the one without, the warm parents are killed, so that every program
starts an interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.rows import Row, mark
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.observe.watcher import Watcher
from faultbed.traffic.engine.engine_client import Engines

__all__ = ["measure"]

PAIRS = 2
_COMMAND_S, _FLOW_S = 600.0, 60

Times = Mapping[str, float]
"""Seconds by the row that they are for."""

WATCHER, ENGINES = "a watcher answers", "engines of all hosts answer"
DROP, DROP_ARMED = "inject packet.drop --for 1s, whole command", "inject packet.drop, preparing to armed"
BESIDE, BESIDE_ARMED = (
    "inject link.flap beside a flow, whole command",
    "inject link.flap beside a flow, preparing to armed",
)
COLLECTIVE = "traffic collective all-reduce, 64 KiB, 5 iterations, whole command"
DEMO = "run demo on a lab that is up, whole command"
GOALS = {
    WATCHER: 0.5,
    ENGINES: 0.5,
    DROP: 0.5,
    DROP_ARMED: 0.5,
    COLLECTIVE: 0.5,
    BESIDE: 0.8,
    BESIDE_ARMED: 0.5,
    DEMO: 0.8,
}
"""Largest ratio of each start's time with warm parents to that without (issue 51's table, as ratios)."""


def measure(inventory: Inventory, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield, for each kind of start, the ratio of its times with and without warm parents, and both times.

    Raises:
        LabError: a machine has no warm parent after a reset, or a command failed.
    """
    times_s: dict[str, list[tuple[float, float]]] = {what: [] for what in GOALS}
    for number in range(PAIRS):
        times: list[dict[str, float]] = []
        for kind in ("warm", "cold"):
            times.append({})
            for start in _starts(inventory, with_demo=number == 0):
                _reset(inventory, is_warm=kind == "warm")
                times[-1] |= _timed(inventory, start)
            progress(f"pair {number + 1} of {PAIRS}, {kind}: {times[-1]}")
        for what, warm_s in times[0].items():
            times_s[what].append((warm_s, times[1][what]))
    for what, pairs in times_s.items():
        yield _row(what, pairs, GOALS[what])


def _reset(inventory: Inventory, *, is_warm: bool) -> None:
    """Restore the lab; unless it is to be warm, kill the warm parents.

    Raises:
        LabError: a machine has no warm parent after a reset.
    """
    lifecycle.reset(inventory, lambda _: None)
    with open_lab(inventory) as lab:
        parents = {name: lab.warm_parent(name) for name in lab.nodes()}
        if missing := [name for name, parent in parents.items() if parent is None]:
            raise LabError(f"{', '.join(missing)}: no warm parent after a reset; run `faultbed up --fresh`")
        for name, parent in parents.items():
            if not is_warm:
                lab.node(name).run(["kill", "-KILL", str(parent["pid"] if parent else "")])


def _starts(inventory: Inventory, *, with_demo: bool) -> list[Callable[[Lab], Times]]:
    first, other = inventory.topology.hosts[0], inventory.topology.hosts[-1]
    rnic, peer = (f"{host.name}:{host.rnics[0].name}" for host in (first, other))
    drop = ("inject", "packet.drop", rnic, "--set", "share=0.5", "--for", "1s")
    collective = ("traffic", "collective", "all-reduce", "--size", "64KiB", "--iterations", "5")

    def whole(what: str, start: Callable[[Lab], object]) -> Callable[[Lab], Times]:
        def timed(lab: Lab) -> Times:
            began_s = time.monotonic()
            start(lab)
            return {what: time.monotonic() - began_s}

        return timed

    def beside_a_flow(lab: Lab) -> Times:
        with _command(lab, "traffic", "flow", rnic, peer, "--for", f"{_FLOW_S}s") as flow:
            flow.wait_for("arrived")
            return _phases(lab, ("inject", "link.flap", "used-uplink[0]", "--for", "2s"), BESIDE, BESIDE_ARMED)

    starts = [
        whole(WATCHER, lambda lab: Watcher(lab, first.name).close()),
        whole(ENGINES, lambda lab: Engines.start(lab, [host.name for host in inventory.topology.hosts]).close()),
        lambda lab: _phases(lab, drop, DROP, DROP_ARMED),
        beside_a_flow,
        whole(COLLECTIVE, lambda lab: _run(lab, *collective)),
    ]
    return [*starts, whole(DEMO, lambda lab: _run(lab, "run", "demo"))] if with_demo else starts


def _timed(inventory: Inventory, start: Callable[[Lab], Times]) -> Times:
    """Return the times of a start on a lab that is connected already."""
    with open_lab(inventory) as lab:
        for name in lab.nodes():
            lab.node(name).run(["true"])
        return start(lab)


def _phases(lab: Lab, words: tuple[str, ...], whole: str, to_armed: str) -> Times:
    began_s = time.monotonic()
    with _command(lab, *words) as running:
        preparing_s, armed_s = running.wait_for("preparing"), running.wait_for("armed: ")
        running.end()
    return {whole: time.monotonic() - began_s, to_armed: armed_s - preparing_s}


def _run(lab: Lab, *words: str) -> None:
    with _command(lab, *words) as running:
        running.end()


class _Running:
    """A command of faultbed, whose lines are read as they come."""

    def __init__(self, words: tuple[str, ...], process: subprocess.Popen[str]) -> None:
        self._words, self._process = words, process
        self._lines: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            with self._news:
                self._lines.append((time.monotonic(), line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, text: str) -> float:
        """Return when (time.monotonic) the first line with this text came.

        Raises:
            LabError: none came.
        """

        def at_s() -> float | None:
            return next((at_s for at_s, line in self._lines if text in line), None)

        with self._news:
            self._news.wait_for(lambda: at_s() is not None or not self._reader.is_alive(), timeout=_COMMAND_S)
        if (found_s := at_s()) is None:
            raise LabError(f"{self._named()} printed no line with {text!r}: {self._output()}")
        return found_s

    def end(self) -> None:
        """Wait for its end.

        Raises:
            LabError: it failed.
        """
        code = self._process.wait(timeout=_COMMAND_S)
        self._reader.join(timeout=_COMMAND_S)
        if code not in (0, 2):
            raise LabError(f"{self._named()} ended with {code}: {self._output()}")

    def _named(self) -> str:
        return f"`faultbed {' '.join(self._words)}`"

    def _output(self) -> str:
        return "".join(line for _, line in self._lines).strip()[-800:]


@contextmanager
def _command(lab: Lab, *words: str) -> Iterator[_Running]:
    """Run a command of faultbed in a folder of its own; it is ended with the block if it still runs."""
    argv = [sys.executable, "-m", "faultbed", "--lab", str(lab.inventory.resolve()), *words]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(folder), bufsize=1
        ) as process,
    ):
        try:
            yield _Running(words, process)
        finally:
            process.terminate()
            process.wait(timeout=_COMMAND_S)


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
