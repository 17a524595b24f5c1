"""Commands that show a lab's counters: counters, top."""

from __future__ import annotations

import contextlib
import fnmatch
import time

import click
from rich.live import Live

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.lab.prometheus import exposition
from faultbed.harness.cli.lab.screen import REPORT_MS, Screen
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.testbed.errors import UsageError
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.observe import counters as counters_module
from faultbed.testbed.observe import telemetry

__all__ = ["COMMANDS"]

_ALL = 60
"""Rows of the last frame, which may be longer than a screen."""


@click.command()
@click.argument("nodes", nargs=-1)
@click.option("--name", "pattern", default="*", show_default=True, help="Only counters that match, such as 'rxe*'.")
@click.option("--changed", "seconds", type=FiniteRange(0.1), help="Only counters that change within this time, in s.")
@click.option("--prometheus", is_flag=True, help="Print the text format of Prometheus.")
@json_option
@pass_session
def counters(
    session: Session, *, nodes: tuple[str, ...], pattern: str, seconds: float | None, prometheus: bool, as_json: bool
) -> None:
    """Show counters and states of NODES (default: every host and switch): RNICs, links, queues, GPUs, IP, TCP.

    \b
    faultbed counters host1 --name 'rxe0.*'
    faultbed counters --changed 5                      what moves, and by how much
    faultbed counters --prometheus > faultbed.prom     for the node exporter's textfile collector
    """  # noqa: D301 (click's mark for text that is not to be wrapped)
    with open_lab(session.inventory()) as lab:
        snapshot = _matching(lab, nodes, pattern)
        if seconds is not None:
            time.sleep(seconds)
            snapshot = _growth(snapshot, _matching(lab, nodes, pattern))
        if prometheus:
            click.echo(exposition(lab.name, snapshot, increments=seconds is not None), nl=False)
        elif as_json:
            session.json(snapshot)
        else:
            rows = [(node, name, f"{value:,}") for node, values in snapshot.items() for name, value in values.items()]
            session.table(("node", "counter", "in that time" if seconds else "value"), rows)


def _matching(lab: Lab, nodes: tuple[str, ...], pattern: str) -> dict[str, dict[str, int]]:
    known = (*lab.topology.host_by_name, *lab.topology.switch_by_name)
    if unknown := [node for node in nodes if node not in known]:
        raise UsageError(f"no node {', '.join(unknown)} in {lab.name}: it has {', '.join(known)}")
    snapshot = counters_module.read(lab, nodes or None)
    return {
        node: {name: value for name, value in sorted(values.items()) if fnmatch.fnmatchcase(name, pattern)}
        for node, values in snapshot.items()
    }


def _growth(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    growth = counters_module.deltas(before, after)
    for node, values in after.items():
        growth[node] |= {name: value for name, value in values.items() if name not in before.get(node, {})}
    return {node: {name: count for name, count in sorted(values.items()) if count} for node, values in growth.items()}


@click.command()
@click.option("--for", "seconds", type=FiniteRange(0.5), help="End after this number of seconds. Default: at Ctrl-C.")
@pass_session
def top(session: Session, *, seconds: float | None) -> None:
    """Watch the lab live: rates of ports, error counters, and changes of links and routes."""
    screen = Screen(began_ns=time.monotonic_ns())
    until = None if seconds is None else time.monotonic() + seconds
    with (
        open_lab(session.inventory()) as lab,
        telemetry.start(lab, report_ms=REPORT_MS, on_sample=screen.sample, on_change=screen.change) as following,
        Live(console=session.out, refresh_per_second=2, screen=session.out.is_terminal, transient=True) as live,
    ):
        with contextlib.suppress(KeyboardInterrupt):
            while until is None or time.monotonic() < until:
                live.update(screen.table(session.out.height, now_ns=time.monotonic_ns(), heard_ns=following.heard_ns()))
                time.sleep(0.5)
        last = screen.table(_ALL, now_ns=time.monotonic_ns(), heard_ns=following.heard_ns())
    session.out.print(last)  # in a file or a pipe, rich prints nothing of a transient display


COMMANDS = (counters, top)
