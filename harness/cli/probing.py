"""Where a fabric loses, by probes on every way through it: `faultbed probe`."""

from __future__ import annotations

import click

from harness.cli.context import Session, json_option, pass_session
from harness.cli.faults import parse_duration
from harness.statistics import share_interval
from harness.verdict import ExitCode
from traffic import probe as probe_module
from traffic.probe import ProbeResult, ProbeSpec

__all__ = ["COMMANDS"]


@click.command()
@click.option("--for", "duration", default="5s", show_default=True, metavar="TIME", help="How long.")
@click.option("--rate", default=20.0, show_default=True, type=click.FloatRange(0.1), help="Probes a second and QP.")
@click.option("--qps", default=4, show_default=True, type=click.IntRange(1, 64), help="Queue pairs between two RNICs.")
@json_option
@pass_session
def probe(session: Session, *, duration: str, rate: float, qps: int, as_json: bool) -> int:
    """Send datagrams over every link, both ways, and say where they are lost. Exit code 1: somewhere.

    From each RNIC to one in every rack, on so many queue pairs that ECMP spreads them; the way of each is asked of the
    switches' kernels. A place is named when what its probes lost is explained by it much better than by chance.
    """
    spec = ProbeSpec(duration_s=parse_duration(duration), per_s=rate, qps=qps)
    inventory = session.inventory()
    hosts = [host.name for host in inventory.topology.hosts]
    with session.working(inventory, hosts, why="probe") as lab, session.progress() as progress:
        count = len(probe_module.pairs(lab.topology))
        progress(f"probing {count} pairs of RNICs on {qps} queue pairs each, {duration}")
        result = probe_module.run(lab, spec, lambda _event: lab.heartbeat())
    if as_json:
        session.json(result.to_dict())
    else:
        _show(session, result)
    return ExitCode.FAIL if result.suspects else ExitCode.PASS


def _show(session: Session, result: ProbeResult) -> None:
    named = {name for one in result.suspects for name in one.names}
    rows = [
        (name, f"{sent:,}", f"{lost:,}", f"{100 * lost / sent:.2f} %" if sent else "", "lossy" if name in named else "")
        for name, (sent, lost) in result.links.items()
    ]
    session.table(("link", "probes", "lost", "share", ""), rows)
    for one in result.suspects:
        share = share_interval(one.lost, one.sent, level=0.95)
        session.out.print(
            f"{' or '.join(one.names)} loses {100 * one.lost / one.sent:.1f} % of what crosses it "
            f"({100 * share.low:.1f} to {100 * share.high:.1f} %; {one.lost:,} of {one.sent:,} probes)"
        )
    if not result.suspects:
        sent, lost = sum(one.sent for one in result.probes), sum(one.lost for one in result.probes)
        session.out.print(f"no place loses more than chance: {lost:,} of {sent:,} probes")
    if result.uncovered:
        session.out.print(f"not covered: {', '.join(result.uncovered)}; more --qps, or a link is down")
    if result.moved:
        session.out.print(f"{result.moved} ways changed meanwhile; their probes are left out")


COMMANDS = (probe,)
"""The command of this module, for the root command."""
