"""The command that models DCQCN and PFC at one bottleneck, and checks the queues of an inventory: congestion."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.cli.options.parsed import parsed
from faultbed.harness.model.dcqcn import WINDOW_S, Outcome, Settings, simulate
from faultbed.harness.model.qos_check import findings
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.units import parse_duration_ns, parse_size_bytes

__all__ = ["COMMANDS"]

_MOST_SETTINGS = 256
_WRONG = 2


@click.command()
@click.option("--flows", default="2,4,8", show_default=True, metavar="N1,N2,...", help="Numbers of senders.")
@click.option(
    "--gbps",
    default=40.0,
    show_default=True,
    type=FiniteRange(min=0, min_open=True),
    help="Rate of the bottleneck and of each sender's link, in Gb/s.",
)
@click.option(
    "--kmin", default="5kB", show_default=True, metavar="SIZE,...", help="Queue below which no packet is marked."
)
@click.option(
    "--kmax", default="200kB", show_default=True, metavar="SIZE,...", help="Queue above which every packet is marked."
)
@click.option("--pmax", default="0.01", show_default=True, metavar="P,...", help="Share of packets marked at Kmax.")
@click.option(
    "--timer", default="55us", show_default=True, metavar="TIME,...", help="Interval at which a sender raises its rate."
)
@click.option("--xoff", metavar="SIZE", help="Queue above which PFC pauses. Default: no PFC.")
@click.option("--xon", metavar="SIZE", help="Queue at which a pause ends. Default: two thirds of --xoff.")
@click.option("--for", "length", default="200ms", show_default=True, metavar="TIME", help="Simulated time.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of the random marks.")
@click.option(
    "--check",
    "inventory",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="INVENTORY",
    help="Only check the QoS profile of this inventory: headroom for a pause, and marks before pauses.",
)
@click.option(
    "--cable",
    default=40.0,
    show_default=True,
    type=FiniteRange(min=0),
    help="For --check: length of the cables, in metres.",
)
@click.option("--pool", metavar="SIZE", help="For --check: shared buffer of a switch; without it Kmax is not checked.")
@click.option(
    "--busy-ports",
    default=8,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="For --check: ports that use the shared buffer at the same time.",
)
@json_option
@pass_session
def congestion(session: Session, /, *, inventory: Path | None, as_json: bool, **options: Any) -> int:
    """Model DCQCN and PFC: flows that share one bottleneck, for every combination of settings at once.

    Shares are means over 100 ms, relative to the fair share: in windows of 1 ms four flows or more are not within 10 %
    of it. `victim` is the share of its rate that a flow through the paused port to an idle port keeps. Nothing is sent.

    \b
      faultbed congestion --flows 2,4,8 --kmax 100kB,200kB
      faultbed congestion --check inventory/rack-h100.example.yml --pool 32MiB
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    if inventory is not None:
        return _check(session, inventory, options, as_json=as_json)
    settings = _settings(options)
    duration_s = parsed("--for", parse_duration_ns, options["length"]) / 1e9
    outcomes = simulate(settings, duration_s=duration_s, seed=options["seed"])
    if as_json:
        rows = [{**dataclasses.asdict(outcome), "victim_share": outcome.victim_share} for outcome in outcomes]
        session.json({"fidelity": "modelled", "window_s": min(WINDOW_S, duration_s / 2), "outcomes": rows})
        return 0
    session.table(
        ("flows", "kmin", "kmax", "pmax", "timer", "share", "use", "queue", "p99", "fluid", "paused", "victim"),
        [_row(outcome) for outcome in outcomes],
    )
    session.out.print(
        f"modelled; share: slowest and fastest flow over {format_duration(min(WINDOW_S, duration_s / 2) * 1e9)}, of "
        "the fair share; fluid: queue at the fixed point of the fluid model (SIGCOMM 2015)",
        soft_wrap=True,
    )
    return 0


def _check(session: Session, path: Path, options: dict[str, Any], *, as_json: bool) -> int:
    lab = lab_inventory.load(path)
    pool = None if options["pool"] is None else float(parsed("--pool", parse_size_bytes, options["pool"]))
    found = findings(lab, cable_m=options["cable"], pool_bytes=pool, busy_ports=options["busy_ports"])
    if as_json:
        session.json({"fidelity": "modelled", "findings": [dataclasses.asdict(finding) for finding in found]})
        return _WRONG if found else 0
    for finding in found:
        session.out.print(f"{path}: {finding.place}: {finding.what}; {finding.do}", soft_wrap=True)
    left_out = [] if lab.qos is None or lab.qos.buffer is not None else ["headroom: the profile has no buffer"]
    left_out += ["Kmax against xoff: give --pool"] if pool is None else []
    unchecked = f"; not checked: {'; '.join(left_out)}" if left_out else ""
    session.out.print(f"modelled; {len(found)} findings{unchecked}", soft_wrap=True)
    return _WRONG if found else 0


def _settings(options: dict[str, Any]) -> list[Settings]:
    def numbers(name: str, kind: Any) -> list[Any]:
        words = [word.strip() for word in str(options[name]).split(",") if word.strip()]
        if not words:
            raise UsageError(f"--{name}: give at least one value")
        return [parsed(f"--{name}", kind, word) for word in words]

    xoff = math.inf if options["xoff"] is None else float(parsed("--xoff", parse_size_bytes, options["xoff"]))
    xon = xoff * 2 / 3 if options["xon"] is None else float(parsed("--xon", parse_size_bytes, options["xon"]))
    combinations = list(
        itertools.product(
            numbers("flows", int),
            numbers("kmin", parse_size_bytes),
            numbers("kmax", parse_size_bytes),
            numbers("pmax", float),
            numbers("timer", parse_duration_ns),
        )
    )
    if len(combinations) > _MOST_SETTINGS:
        raise UsageError(f"congestion: {len(combinations)} settings, of at most {_MOST_SETTINGS}; give fewer values")
    return [
        Settings(
            flows=flows,
            gbps=options["gbps"],
            kmin_bytes=kmin,
            kmax_bytes=kmax,
            pmax=pmax,
            timer_s=timer_ns / 1e9,
            xoff_bytes=xoff,
            xon_bytes=xon,
        )
        for flows, kmin, kmax, pmax, timer_ns in combinations
    ]


def _row(outcome: Outcome) -> tuple[str, ...]:
    settings = outcome.settings
    return (
        str(settings.flows),
        format_bytes(settings.kmin_bytes),
        format_bytes(settings.kmax_bytes),
        f"{settings.pmax:g}",
        format_duration(settings.timer_s * 1e9),
        f"{outcome.least_share:.2f} to {outcome.most_share:.2f}",
        f"{outcome.utilisation:.1%}",
        format_bytes(outcome.queue_mean_bytes),
        format_bytes(outcome.queue_p99_bytes),
        "none" if outcome.fixed_point_bytes is None else format_bytes(outcome.fixed_point_bytes),
        f"{outcome.paused:.1%}",
        f"{outcome.victim_share:.2f}",
    )


COMMANDS = (congestion,)
