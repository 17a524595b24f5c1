"""Commands that compute what routing schemes do to a job's flows. No lab is touched."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import numpy as np

from harness.analysis.links.routing_prediction import AUTO, CollectiveTraffic, Spread, flows_of, predict
from harness.cli.command_group import Commands
from harness.cli.context import Session, json_option, pass_session
from harness.cli.options.numbers import FiniteRange
from harness.cli.traffic.traffic_group import ALGORITHM_NAMES, read_size
from testbed.errors import UsageError
from testbed.model.selectors import select
from testbed.model.topology import Topology
from testbed.routing.offered_load import Fabric
from testbed.routing.replacements import Replacement, replacements
from testbed.routing.schemes import SCHEMES, Flow, Routing, scheme_named
from traffic.engine.engine_client import endpoint
from traffic.schedules import COLLECTIVES

__all__ = ["COMMANDS"]

F = TypeVar("F", bound=Callable[..., Any])
_EVEN = 1 + 1e-9
"""Ratios of two MMRs up to here are rounding."""

_SHARE = FiniteRange(0.01, 100.0)
_STATIC = tuple(name for name, scheme in SCHEMES.items() if scheme.is_static)
_job_options = (
    click.option("--rank", "ranks", multiple=True, help="An RNIC, in rank order; repeatable. Default: one per host."),
    click.option("--collective", default="all-to-all", show_default=True, type=click.Choice(COLLECTIVES)),
    click.option("--algorithm", default=AUTO, show_default=True, type=click.Choice(ALGORITHM_NAMES)),
    click.option("--size", default="1MiB", show_default=True, help="Buffer of the collective."),
    click.option("--qps-per-peer", default=1, show_default=True, type=click.IntRange(1, 128)),
)


def _of_a_job(command: F) -> F:
    for option in reversed(_job_options):
        command = option(command)
    return command


@click.group(cls=Commands)
def routing() -> None:
    """Compute how routing schemes share a job's load over equal-cost links. Modelled: no packet is sent.

    \b
    A job on hosts 1 to 4, after host4 was replaced by host5 of another rack:
      faultbed --lab soft-3rack routing predict --rank host1 --rank host2 --rank host3 --rank host5
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself


@routing.command("predict")
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    type=click.Choice(tuple(SCHEMES)),
    help="Repeatable; default: every scheme.",
)
@_of_a_job
@click.option("--failed", multiple=True, metavar="LINK", help="A link that carries nothing; repeatable.")
@click.option(
    "--weight",
    "weights",
    multiple=True,
    metavar="LINK=SHARE",
    help="weighted: share of a link (default 1); repeatable.",
)
@click.option("--draws", default=200, show_default=True, type=click.IntRange(1, 10_000), help="For schemes that hash.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the draws.")
@json_option
@pass_session
def routing_predict(
    session: Session,
    *,
    schemes: tuple[str, ...],
    ranks: tuple[str, ...],
    collective: str,
    algorithm: str,
    size: str,
    qps_per_peer: int,
    failed: tuple[str, ...],
    weights: tuple[str, ...],
    draws: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print the maximum/mean ratio (MMR) of every switch's uplinks under each scheme.

    1 is even; 2 means that the busiest uplink carries twice its fair share, so that a collective bound by it takes
    twice as long. Schemes that hash are drawn: mean, and 1st to 99th percentile over sets of queue pair numbers.
    """
    topology = session.inventory().topology
    traffic = CollectiveTraffic(
        collective=collective, algorithm=algorithm, size_bytes=read_size(size), qps_per_peer=qps_per_peer
    )
    parameters = Routing(weights=_weights(topology, weights))
    answers = predict(
        topology,
        _placed(topology, ranks),
        traffic,
        dict.fromkeys(schemes or SCHEMES, parameters),
        failed=frozenset(failed),
        draws=draws,
        seed=seed,
    )
    if as_json:
        session.json([dataclasses.asdict(one) for one in answers])
        return
    columns = list(dict.fromkeys(name for one in answers for name in (*one.uplinks, *one.tiers)))
    if not columns:
        session.out.print("no switch of this lab sends these flows up over more than one link: every scheme is alike")
        return
    rows = [
        (one.scheme, str(one.draws), *(_cell({**one.uplinks, **one.tiers}.get(name)) for name in columns))
        for one in answers
    ]
    session.table(("scheme", "draws", *columns), rows)


@routing.command("conflicts")
@click.option("--scheme", default="static-parity", show_default=True, type=click.Choice(_STATIC))
@_of_a_job
@click.option("--replace", "replaced", default=1, show_default=True, type=click.IntRange(1, 4), help="So many hosts.")
@click.option("--worst", default=10, show_default=True, type=click.IntRange(1), help="Placements to print.")
@json_option
@pass_session
def routing_conflicts(
    session: Session,
    *,
    scheme: str,
    ranks: tuple[str, ...],
    collective: str,
    algorithm: str,
    size: str,
    qps_per_peer: int,
    replaced: int,
    worst: int,
    as_json: bool,
) -> None:
    """Search every replacement of a job's hosts for the placement that a static scheme shares worst."""
    topology = session.inventory().topology
    traffic = CollectiveTraffic(
        collective=collective, algorithm=algorithm, size_bytes=read_size(size), qps_per_peer=qps_per_peer
    )
    placed = _placed(topology, ranks)
    fabric = Fabric.of(topology, scheme_named(scheme))

    def flows(names: Sequence[str]) -> list[Flow]:
        return flows_of(traffic, names, np.random.default_rng(1))

    before = next(replacements(fabric, placed, flows, replaced=0))
    count = conflicts = 0
    kept: list[Replacement] = []
    for one in replacements(fabric, placed, flows, replaced=replaced):
        count += 1
        conflicts += one.mmr > before.mmr * _EVEN
        kept = heapq.nlargest(worst, [*kept, one], key=lambda placement: placement.mmr)
    if as_json:
        session.json(
            {
                "scheme": scheme,
                "before": dataclasses.asdict(before),
                "placements": count,
                "worse": conflicts,
                "worst": [dataclasses.asdict(one) for one in kept],
            }
        )
        return
    session.table(
        ("replaced", "ranks", "switch", "MMR"),
        [
            (
                ", ".join(f"{gone} by {come}" for gone, come in one.moved) or "none",
                " ".join(one.ranks),
                one.switch,
                f"{one.mmr:.2f}",
            )
            for one in (before, *kept)
        ],
    )
    session.out.print(f"{scheme}: {conflicts} of {count} placements load some switch's uplinks less evenly than before")


def _placed(topology: Topology, ranks: tuple[str, ...]) -> tuple[str, ...]:
    written = ranks or tuple(host.name for host in topology.hosts)
    placed = tuple(endpoint(topology, name).name for text in written for name in select(topology, text))
    if len(placed) < 2:  # noqa: PLR2004 - one rank sends nothing
        raise UsageError(f"--rank: a job needs at least 2 ranks; got {len(placed)}")
    if twice := sorted({name for name in placed if placed.count(name) > 1}):
        raise UsageError(f"--rank: {', '.join(twice)} is named twice; give each RNIC once")
    return placed


def _weights(topology: Topology, words: tuple[str, ...]) -> dict[str, float]:
    weights = {}
    names = {link.name for link in topology.uplinks}
    for word in words:
        name, equals, share = word.rpartition("=")
        if not equals or name not in names:
            raise UsageError(f"--weight {word}: want LINK=SHARE; links are {', '.join(sorted(names))}")
        weights[name] = float(_SHARE.convert(share, None, None))
    return weights


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.p1 == spread.p99:
        return f"{spread.mean:.2f}"
    return f"{spread.mean:.2f} ({spread.p1:.2f} to {spread.p99:.2f})"


COMMANDS = (routing,)
