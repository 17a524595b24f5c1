"""Commands that look at a lab's counters: counters, top."""

from __future__ import annotations

import fnmatch
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import click
from rich.live import Live
from rich.table import Table

from harness.cli.context import Session, json_option, pass_session
from harness.prometheus import exposition
from harness.quantities import format_rate
from testbed import counters as counters_module
from testbed import telemetry
from testbed.errors import UsageError
from testbed.lab import Lab, open_lab

__all__ = ["COMMANDS"]

_RECENT = 8
_RNIC_ERRORS = ("out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err", "rcvd_rnr_err")
_ERRORS = (
    *_RNIC_ERRORS,
    *(counters_module.MLX5[name] for name in _RNIC_ERRORS),
    "duplicate_request",
    "send_err",
    "queue_drops",
    "rx_dropped",
)
"""What a person looks for first, by the names of rdma_rxe and of mlx5."""


@click.command()
@click.argument("nodes", nargs=-1)
@click.option("--name", "pattern", default="*", show_default=True, help="Only counters that match, such as 'rxe*'.")
@click.option("--changed", "seconds", type=click.FloatRange(0.1), help="Only what moves within so many seconds.")
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
        found = _matching(lab, nodes, pattern)
        if seconds is not None:
            time.sleep(seconds)
            found = _moved(found, _matching(lab, nodes, pattern))
        if prometheus:
            click.echo(exposition(lab.name, found), nl=False)
        elif as_json:
            session.json(found)
        else:
            rows = [(node, name, f"{value:,}") for node, values in found.items() for name, value in values.items()]
            session.table(("node", "counter", "in that time" if seconds else "value"), rows)


def _matching(lab: Lab, nodes: tuple[str, ...], pattern: str) -> dict[str, dict[str, int]]:
    known = (*lab.topology.host_by_name, *lab.topology.switch_by_name)
    if unknown := [node for node in nodes if node not in known]:
        raise UsageError(f"no node {', '.join(unknown)} in {lab.name}: it has {', '.join(known)}")
    found = counters_module.read(lab, nodes or None)
    return {
        node: {name: value for name, value in sorted(values.items()) if fnmatch.fnmatchcase(name, pattern)}
        for node, values in found.items()
    }


def _moved(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    found = counters_module.deltas(before, after)
    for node, values in after.items():
        found[node] |= {name: value for name, value in values.items() if name not in before.get(node, {})}
    return {node: {name: count for name, count in sorted(values.items()) if count} for node, values in found.items()}


@dataclass(kw_only=True)
class _Screen:
    """What `top` shows; filled by the watchers' threads."""

    last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    first: dict[tuple[str, str], int] = field(default_factory=dict)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lock: threading.Lock = field(default_factory=threading.Lock)
    began_ns: int = field(default_factory=time.monotonic_ns)

    def sample(self, one: telemetry.Sample) -> None:
        with self.lock:
            for name, value in one.values.items():
                key = (one.node, name)
                at_ns, before = self.last.get(key, (one.at_ns, value))
                if name.endswith("x_bytes") and one.at_ns > at_ns:  # of rx and tx; what waits in a queue has none
                    self.rates[key] = counters_module.delta(before, value) * 8e9 / (one.at_ns - at_ns)
                self.last[key] = (one.at_ns, value)
                self.first.setdefault(key, value)

    def change(self, one: telemetry.Change) -> None:
        with self.lock:
            at_s = (one.at_ns - self.began_ns) / 1e9
            self.recent.appendleft(f"{at_s:7.2f} s  {one.node}: {one.subject} {one.text or 'is gone'}")

    def table(self, rows: int) -> Table:
        """Ports by what they carry, then counters of trouble that moved, then the last changes."""
        with self.lock:
            now_ns = time.monotonic_ns()
            # A port that has not moved for two seconds carries nothing.
            live = {
                key: rate
                for key, rate in self.rates.items()
                if now_ns - self.last[key][0] < 2_000_000_000 and not key[1].startswith(("lo.", "mgmt"))  # noqa: PLR2004
            }
            busiest = sorted(live.items(), key=lambda item: -item[1])[: max(4, rows - _RECENT - 8)]
            trouble = [
                (node, name, moved)
                for (node, name), (_, value) in sorted(self.last.items())
                if name.rpartition(".")[2] in _ERRORS
                and (moved := counters_module.delta(self.first[node, name], value))
            ]
            table = Table(box=None, pad_edge=False, header_style="bold", title="Ctrl-C ends it", title_justify="left")
            for column in ("node", "what", "now"):
                table.add_column(column, overflow="ellipsis", no_wrap=True)
            for (node, name), rate in busiest:
                table.add_row(node, name.removesuffix("_bytes"), format_rate(rate))
            for node, name, moved in trouble:
                table.add_row(node, name, f"[yellow]+{moved:,}[/yellow]")
            for line in self.recent:
                table.add_row("", f"[dim]{line}[/dim]", "")
            return table


@click.command()
@click.option("--for", "seconds", type=click.FloatRange(0.5), help="End after so many seconds. Default: Ctrl-C.")
@pass_session
def top(session: Session, *, seconds: float | None) -> None:
    """Watch the lab live: rates of its ports, counters of trouble, links and routes as they change."""
    screen, until = _Screen(), None if seconds is None else time.monotonic() + seconds
    with (
        open_lab(session.inventory()) as lab,
        telemetry.start(lab, on_sample=screen.sample, on_change=screen.change),
        Live(console=session.out, refresh_per_second=2, screen=session.out.is_terminal, transient=True) as live,
    ):
        try:
            while until is None or time.monotonic() < until:
                live.update(screen.table(session.out.height))
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
        finally:
            if not session.out.is_terminal:
                live.update(screen.table(60))
    if session.out.is_terminal:
        session.out.print(screen.table(60))


COMMANDS = (counters, top)
