"""Locate loss and delay in a fabric by probes on every path: `faultbed probe`."""

from __future__ import annotations

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options.numbers import FiniteRange, parse_duration
from faultbed.harness.confidence import share_interval
from faultbed.harness.ledger.statistics.decision import TAIL, Decision, Outcome
from faultbed.harness.ledger.statistics.shares import decide_share
from faultbed.harness.quantities import format_duration
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.suggestions import first_of
from faultbed.traffic.probes import prober as probe_module
from faultbed.traffic.probes.prober import ProbeResult, ProbeSpec
from faultbed.traffic.probes.rtt import PathTimes

__all__ = ["COMMANDS"]

MAX_LOSS = 0.05
"""Default share of its probes that every link must provably not lose."""
_NAMED = 3
"""Number of links that a sentence names."""
_SHOWN = 12
"""Number of paths whose times are printed, the slowest ones."""


@click.command()
@click.option("--for", "duration", default="5s", show_default=True, metavar="TIME", help="Duration: 5s, 2m.")
@click.option("--rate", default=20.0, show_default=True, type=FiniteRange(0.1), help="Probes a second and QP.")
@click.option("--qps", default=4, show_default=True, type=click.IntRange(1, 64), help="Queue pairs between two RNICs.")
@click.option(
    "--max-loss",
    default=MAX_LOSS,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    help="Share of its probes that every link must provably not lose for exit code 0.",
)
@json_option
@pass_session
def probe(session: Session, *, duration: str, rate: float, qps: int, max_loss: float, as_json: bool) -> int:
    """Send datagrams over every link in both directions, and locate loss and delay.

    Exit code 1: a place loses datagrams, or a link provably loses more than --max-loss; 2: no place loses more than
    chance, but too few probes crossed some link to show that it loses less than --max-loss, or probes were lost whose
    path changed. Slow places are listed and do not change the exit code.

    Each RNIC sends to one RNIC in every rack, on several queue pairs, which ECMP spreads. The switches' kernels report
    the path of each queue pair. A place is named if it explains the lost probes much better than chance. Each probe is
    answered, which separates the network's round trip from the time of the responder's process. A place is slow if most
    probes that cross it take more than twice as long as those on paths of equal length.
    """
    spec = ProbeSpec(duration_s=parse_duration(duration), per_s=rate, qps=qps)
    inventory = session.inventory()
    hosts = [host.name for host in inventory.topology.hosts]
    with session.working(inventory, hosts, why="probe") as lab, session.progress() as progress:
        count = len(probe_module.pairs(lab.topology))
        progress(f"probing {count} pairs of RNICs on {qps} queue pairs each, {duration}")
        result = probe_module.run(lab, spec, lambda _event: lab.heartbeat())
    if as_json:
        session.json({**result.to_dict(), "max_loss": max_loss, "undecided": _undecided(result, max_loss)})
    else:
        _show(session, result, max_loss)
    return _exit_code(result, max_loss)


def _exit_code(result: ProbeResult, max_loss: float = MAX_LOSS) -> ExitCode:
    """Return the exit code. It is INCONCLUSIVE if a link may lose more than `max_loss` without being named.

    Too few probes crossed it, or those that were lost have no known path.
    """
    outcomes = {decision.outcome for decision in _by_link(result, max_loss).values()}
    if result.suspects or Outcome.BROKEN in outcomes:
        return ExitCode.FAIL
    is_open = result.uncovered or result.moved_lost or outcomes != {Outcome.HOLDS}
    return ExitCode.INCONCLUSIVE if is_open else ExitCode.PASS


def _by_link(result: ProbeResult, max_loss: float) -> dict[str, Decision]:
    """Return, by link, whether it loses at most `max_loss`; all of them together err with the risk of one."""
    tail = TAIL / max(len(result.links), 1)
    return {name: decide_share("max", max_loss, lost, sent, tail=tail) for name, (sent, lost) in result.links.items()}


def _undecided(result: ProbeResult, max_loss: float) -> list[str]:
    """Return the links whose probes do not show that they lose less than `max_loss`."""
    return [name for name, decision in _by_link(result, max_loss).items() if decision.why is not None]


def _lossy(result: ProbeResult, max_loss: float) -> list[str]:
    """Return the links that provably lose more than `max_loss`, whether or not a place is named for it."""
    return [name for name, decision in _by_link(result, max_loss).items() if decision.outcome is Outcome.BROKEN]


def _silent(result: ProbeResult) -> list[str]:
    """Return the links over which no probe arrived, although they are not suspects (too few probes to tell)."""
    return [name for name, (sent, lost) in result.links.items() if sent and lost == sent]


def _show(session: Session, result: ProbeResult, max_loss: float) -> None:
    named = {name for suspect in result.suspects for name in suspect.names}
    rows = [
        (name, f"{sent:,}", f"{lost:,}", f"{100 * lost / sent:.2f} %" if sent else "", "lossy" if name in named else "")
        for name, (sent, lost) in result.links.items()
    ]
    session.table(("link", "probes", "lost", "share", ""), rows)
    for suspect in result.suspects:
        share = share_interval(suspect.lost, suspect.sent, level=0.95)
        session.out.print(
            f"{' or '.join(suspect.names)} loses {100 * suspect.lost / suspect.sent:.1f} % of the probes that cross it "
            f"({100 * share.low:.1f} to {100 * share.high:.1f} %; {suspect.lost:,} of {suspect.sent:,})"
        )
    if not result.suspects:
        sent, lost = sum(group.sent for group in result.probes), sum(group.lost for group in result.probes)
        session.out.print(f"no place loses more than chance: {lost:,} of {sent:,} probes")
        if lossy := _lossy(result, max_loss):
            session.out.print(f"{first_of(lossy, _NAMED)} lose more than {max_loss:.3g} of their probes")
        if unsure := _undecided(result, max_loss):
            session.out.print(
                f"too few probes to show that {first_of(unsure, _NAMED)} lose less than {max_loss:.3g}: use a longer "
                "--for, a higher --rate, or a larger --max-loss"
            )
        elif result.links and not lossy:
            session.out.print(f"every link that was probed loses less than {max_loss:.3g} of its probes")
        if silent := _silent(result):
            session.out.print(
                f"nothing came over {', '.join(silent)}: too few probes to blame a place; use a longer --for"
            )
    _show_times(session, result)
    if result.uncovered:
        session.out.print(f"not covered: {', '.join(result.uncovered)}; more --qps, or a link is down")
    if result.moved:
        and_lost = f", and {result.moved_lost} of them were lost at an unknown place" if result.moved_lost else ""
        session.out.print(f"{result.moved} probes are left out: their path changed during the measurement{and_lost}")


def _show_times(session: Session, result: ProbeResult) -> None:
    """Print the slowest round trips, compared with paths of the same number of hops, and the places that cause them."""
    answered = [path for path in result.paths if path.network is not None and path.responder is not None]
    if not answered:
        session.out.print("no probe was answered, so round trips are unknown")
        return
    ordered = sorted(answered, key=lambda path: -(path.times or 0.0))
    session.out.print()
    session.table(
        ("there and back", "answered", "network: min", "median", "P99", "of similar paths", "responder: median", "P99"),
        [
            (
                _round_trip_text(path),
                f"{path.answered:,} of {path.sent:,}",
                *(format_duration(ns) for ns in (path.network.min_ns, path.network.median_ns, path.network.p99_ns)),
                "" if path.times is None else f"{path.times:.2f}",
                *(format_duration(ns) for ns in (path.responder.median_ns, path.responder.p99_ns)),
            )
            for path in ordered[:_SHOWN]
            if path.network is not None and path.responder is not None
        ],
    )
    if len(ordered) > _SHOWN:
        session.out.print(f"the {_SHOWN} slowest of {len(ordered)} paths; --json has all")
    for slow in result.slow:
        session.out.print(
            f"{' or '.join(slow.names)} is slow: round trips over it take {slow.times:.1f} times as long as over "
            f"similar paths ({slow.slow:,} of {slow.answered:,} more than {slow.level:g} times)"
        )
    if not result.slow:
        session.out.print("no place makes round trips longer than those over similar paths")
    session.out.print(
        f"times are {result.stamps} times: those of the network include waits of both processes for a CPU",
        soft_wrap=True,
    )


def _round_trip_text(path: PathTimes) -> str:
    """Return a path as `host1:rxe0 rtsw1 ctsw1 rtsw2 host3:rxe0`, with the return path if that differs."""
    forward = " ".join(path.path)
    return forward if path.back == path.path[::-1] else f"{forward}, back by {' '.join(path.back[1:-1])}"


COMMANDS = (probe,)
"""The command of this module, for the root command."""
