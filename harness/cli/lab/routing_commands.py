"""Commands about routing schemes: what they would do to a job's flows, computed, and what a lab's switches do now."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from click.core import ParameterSource

from faultbed.harness.cli.command_group import Commands
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.lab.routing_plan import routing_plan
from faultbed.harness.cli.options.new_file import write_new_file
from faultbed.harness.cli.options.parsed import parsed
from faultbed.harness.cli.options.qp import ranks_per_rnic_option
from faultbed.harness.cli.options.weights import weight_option, weights_of
from faultbed.harness.cli.traffic.flows_and_collectives import ALGORITHM_NAMES, read_size
from faultbed.harness.experiment.job_sections import parse_grid, parse_phase
from faultbed.harness.experiment.toml_text import inline
from faultbed.harness.model.failure_prediction import FailurePrediction, better_from, predict_failures
from faultbed.harness.model.routing_prediction import (
    ALL_RANKS,
    JobTraffic,
    Spread,
    flows_of,
    job_traffic,
    predict,
)
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import open_lab
from faultbed.testbed.model.selectors import select
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import switch_routing
from faultbed.testbed.routing.offered_load import Fabric, offered_load
from faultbed.testbed.routing.replacements import Replacement, replacements
from faultbed.testbed.routing.schemes import SCHEMES, Flow, Routing, scheme_named
from faultbed.testbed.suggestions import hint
from faultbed.traffic.engine.engine_client import endpoint
from faultbed.traffic.engine.task_specs import refuse_local
from faultbed.traffic.schedules import COLLECTIVES
from faultbed.traffic.workloads.collective import AUTO
from faultbed.traffic.workloads.job import JobPhase
from faultbed.traffic.workloads.ranks import MAX_RANKS

__all__ = ["COMMANDS", "job_of", "of_a_job"]

F = TypeVar("F", bound=Callable[..., Any])
_EVEN = 1 + 1e-9
"""Ratios of two MMRs up to here are rounding."""

_ITERATIONS, _MOST_ITERATIONS = 12, 2000
"""Iterations of a written experiment: the usual number, and the most."""
_SENT_BYTES = 4 << 20
"""Bytes that the switch of a written experiment must send up: what BGP sends changes the MMR by under 1 %."""
_LEAST_FLOW_BYTES = 16 << 10
"""Mean bytes of a queue pair in an iteration, so that ACKs, which take other paths, change the MMR by under 5 %."""

_HASHED, _PLACED = "e-ecmp", "te"
"""The two schemes that `predict --failures` compares in a sentence."""
_STATIC = tuple(name for name, scheme in SCHEMES.items() if scheme.is_static and not scheme.is_placed)
_job_options = (
    click.option("--rank", "ranks", multiple=True, help="An RNIC, in rank order; repeatable. Default: one per host."),
    click.option(
        "--collective",
        default="all-to-all",
        show_default=True,
        type=click.Choice(COLLECTIVES),
        help="Collective of all ranks.",
    ),
    click.option(
        "--algorithm",
        default=AUTO,
        show_default=True,
        type=click.Choice(ALGORITHM_NAMES),
        help="Its algorithm; auto: the quickest by the cost model.",
    ),
    click.option("--size", default="1MiB", show_default=True, help="Size of its buffer."),
    click.option(
        "--grid",
        default="",
        metavar="DIM=N,...",
        help="Grid of a job, as in `traffic job`, instead of a collective; needs --phase.",
    ),
    click.option(
        "--phase",
        "phases",
        multiple=True,
        metavar="DIM:COLLECTIVE:SIZE[:ALGORITHM]",
        help="With --grid; repeatable. The bytes of an iteration's phases are added up.",
    ),
    click.option(
        "--qps-per-peer",
        default=1,
        show_default=True,
        type=click.IntRange(1, 128),
        help="Queue pairs from a rank to each rank that it sends to.",
    ),
    ranks_per_rnic_option,
)


def of_a_job(command: F) -> F:
    """Add the options that describe a job; `job_of` reads them."""
    for option in reversed(_job_options):
        command = option(command)
    return command


@click.group(cls=Commands)
def routing() -> None:
    """Compute how routing schemes share a job's load over equal-cost links, and show the scheme of a lab's switches.

    `predict` and `conflicts` are modelled: no packet is sent. [fabric] of an experiment applies a scheme.

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
    help="Routing scheme to predict. Repeatable; default: all.",
)
@of_a_job
@click.option("--failed", multiple=True, metavar="LINK", help="A link that carries nothing; repeatable.")
@click.option(
    "--failures",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Print the fullest link with 0 to N failed uplinks, drawn at random, instead of each switch's MMR.",
)
@weight_option
@click.option(
    "--draws",
    default=200,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Random draws of queue pair numbers, for schemes that hash.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of the draws.")
@json_option
@pass_session
def routing_predict(
    session: Session,
    /,
    *,
    schemes: tuple[str, ...],
    failed: tuple[str, ...],
    failures: int | None,
    weights: tuple[str, ...],
    draws: int,
    seed: int,
    as_json: bool,
    **job: Any,
) -> None:
    """Print the maximum/mean ratio (MMR) of every switch's uplinks under each scheme.

    1 is even; 2 means that the busiest uplink carries twice its fair share, so a collective limited by it takes twice
    as long. For schemes with a hash: mean, and 1st to 99th percentile over random queue pair numbers. `te` places the
    flows of each RNIC to each host over the uplinks that are left.

    With --failures: bytes of the fullest link over the least that any placement can have, the mean over drawn sets of
    failed uplinks, and from how many failures on e-ecmp is better than te.
    """
    if failures and failed:
        raise UsageError("--failures draws the links that fail, and --failed names them; give one of the two")
    inventory = session.inventory()
    topology = inventory.topology
    placed, traffic = job_of(inventory, **job)
    seeds = {switch.name: inventory.hash_seed(switch.name) for switch in topology.switches}
    parameters = Routing(weights=weights_of(topology, weights), hash_seeds=seeds)
    chosen = dict.fromkeys(schemes or SCHEMES, parameters)
    if failures:
        predictions = predict_failures(topology, placed, traffic, chosen, most=failures, draws=draws, seed=seed)
        _show_failures(session, predictions, as_json=as_json)
        return
    answers = predict(
        topology,
        placed,
        traffic,
        chosen,
        failed=frozenset(failed),
        draws=draws,
        seed=seed,
    )
    if as_json:
        session.json([dataclasses.asdict(answer) for answer in answers])
        return
    columns = list(dict.fromkeys(name for answer in answers for name in (*answer.uplinks, *answer.tiers)))
    if not columns:
        session.out.print("no switch of this lab sends these flows up over more than one link: all schemes are equal")
        return
    rows = [
        (answer.scheme, str(answer.draws), *(_cell({**answer.uplinks, **answer.tiers}.get(name)) for name in columns))
        for answer in answers
    ]
    session.table(("scheme", "draws", *columns), rows)


def _show_failures(session: Session, predictions: Sequence[FailurePrediction], *, as_json: bool) -> None:
    schemes = list(predictions[0].fullest)
    has_both = {_HASHED, _PLACED} <= set(schemes)
    first = better_from(predictions, _HASHED, _PLACED) if has_both else None
    if as_json:
        rows = [dataclasses.asdict(prediction) for prediction in predictions]
        session.json({"failures": rows, "e_ecmp_better_from": first})
        return
    session.table(
        ("failed uplinks", "drawn sets", *schemes),
        [(str(one.failed), str(one.orders), *(f"{one.fullest[name]:.2f}" for name in schemes)) for one in predictions],
    )
    if has_both:
        until = f"with 0 to {predictions[-1].failed} failed uplinks"
        answer = f"from {first} failed uplinks on" if first is not None else f"nowhere {until}"
        session.out.print(f"{_HASHED} is better than {_PLACED} {answer} (modelled)", soft_wrap=True)


@routing.command("conflicts")
@click.option(
    "--scheme", default="static-parity", show_default=True, type=click.Choice(_STATIC), help="Static routing scheme."
)
@of_a_job
@click.option(
    "--replace", "replaced", default=1, show_default=True, type=click.IntRange(1, 4), help="Hosts to replace."
)
@click.option("--worst", default=10, show_default=True, type=click.IntRange(1), help="Placements to print.")
@click.option(
    "--write",
    "experiment",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the experiment that reproduces the worst placement.",
)
@json_option
@pass_session
def routing_conflicts(
    session: Session,
    /,
    *,
    scheme: str,
    replaced: int,
    worst: int,
    experiment: Path | None,
    as_json: bool,
    **job: Any,
) -> None:
    """Find the replacement of a job's hosts with the worst load balance under a static scheme."""
    inventory = session.inventory()
    topology = inventory.topology
    placed, traffic = job_of(inventory, **job)
    fabric = Fabric.of(topology, scheme_named(scheme))

    def flows(names: Sequence[str]) -> list[Flow]:
        return flows_of(traffic, names, np.random.default_rng(1))

    before = next(replacements(fabric, placed, flows, replaced=0))
    count = conflicts = 0
    kept: list[Replacement] = []
    for candidate in replacements(fabric, placed, flows, replaced=replaced):
        count += 1
        conflicts += candidate.mmr > before.mmr * _EVEN
        kept = heapq.nlargest(worst, [*kept, candidate], key=lambda placement: placement.mmr)
    if experiment is not None:
        sent = flows(kept[0].ranks)
        pairs = ((endpoint(topology, flow.src), endpoint(topology, flow.dst)) for flow in sent)
        refuse_local(inventory.kind, "--write: the job", pairs)
        _write(experiment, scheme, traffic, kept[0], iterations=_iterations_of(fabric, kept[0], sent))
    if as_json:
        session.json(
            {
                "scheme": scheme,
                "before": dataclasses.asdict(before),
                "placements": count,
                "worse": conflicts,
                "worst": [dataclasses.asdict(placement) for placement in kept],
            }
        )
        return
    session.table(
        ("replaced", "ranks", "switch", "MMR"),
        [
            (
                ", ".join(f"{gone} by {come}" for gone, come in placement.moved) or "none",
                " ".join(placement.ranks),
                placement.switch,
                f"{placement.mmr:.2f}",
            )
            for placement in (before, *kept)
        ],
    )
    session.out.print(f"{scheme}: {conflicts} of {count} placements load some switch's uplinks less evenly than before")
    if experiment is not None:
        session.out.print(f"wrote {experiment}: `faultbed run {experiment}` reproduces the worst placement")


@routing.command("show")
@click.argument("switches", nargs=-1)
@json_option
@pass_session
def routing_show(session: Session, *, switches: tuple[str, ...], as_json: bool) -> None:
    """Show the current rules and next hops of SWITCHES (default: all): a scheme's, and BGP's own.

    \b
      faultbed --lab soft-3rack routing show rtsw1
    """  # noqa: D301 - as above
    with open_lab(session.inventory()) as lab:
        known = tuple(lab.topology.switch_by_name)
        if unknown := [name for name in switches if name not in known]:
            raise UsageError(f"no switch {', '.join(unknown)} in {lab.name}; {hint(unknown[0], known)}")
        state = switch_routing.read(lab, switches or known)
    if as_json:
        session.json({"schemes": state.schemes, "switches": state.switches})
        return
    rows = [(name, *row) for name, switch_state in state.switches.items() for row in _routing_rows(switch_state)]
    session.table(("switch", "packets", "table", "next hops"), rows)
    left = [name for name, switch_state in state.switches.items() if _parts_of_scheme(switch_state)]
    if left and not state.schemes:
        parts = ", ".join(_parts_of_scheme(state.switches[left[0]]))
        session.out.print(
            f"{parts} left on {', '.join(left)}, although no scheme is held; run `faultbed heal`", soft_wrap=True
        )
    elif state.schemes and set(state.switches) == set(known) and not left:
        session.out.print(
            f"{', '.join(state.schemes)} is held, but no switch has a rule of it; if no run is in progress, run "
            "`faultbed heal`",
            soft_wrap=True,
        )
    else:
        session.out.print(
            f"scheme: {', '.join(state.schemes) or 'none; switches route by BGP and the ECMP of the kernel'}"
        )


def _parts_of_scheme(switch_state: Mapping[str, Any]) -> list[str]:
    """Return which parts of a scheme a switch has: rules, routes, next-hop groups, marks."""
    parts = {
        "rules": switch_state["rules"],
        "routes": set(switch_state["tables"]) - {"main"},
        "next-hop groups": switch_state["groups"],
        "marks": switch_state["marked"] is not None,
    }
    return [name for name, is_there in parts.items() if is_there]


def _routing_rows(switch_state: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (packets, table, next hops) of a switch's rules, and of what BGP spreads over several next hops."""
    rows = []
    for rule in switch_state["rules"]:
        routes = switch_state["tables"].get(str(rule["table"]), {})
        hops = [routes[rule["to"]]] if rule["to"] in routes else list(routes.values()) if rule["to"] is None else []
        groups = [
            switch_state["groups"].get(hop.removeprefix("group "), {})
            for hops_of_route in hops
            for hop in hops_of_route
        ]
        ports = dict.fromkeys(
            [port for group in groups for port in group.get("ports", ())]
            or [hop for hops_of_route in hops for hop in hops_of_route]
        )
        buckets = max((group.get("buckets", 0) for group in groups), default=0)
        packets = f"to {rule['to']}" if rule["to"] else f"with mark {rule['mark']}" if rule["mark"] else "all"
        packets = f"from {rule['in']} {packets}" if rule["in"] else packets
        hops_text = ", ".join(ports) + (f" ({buckets} buckets)" if buckets else "")
        rows.append((packets, str(rule["table"]), hops_text or "none: as BGP"))
    if switch_state["marked"] is not None:
        rows.append((f"{sum(switch_state['marked'])} marked so far", "nftables", ""))
    spread = Counter(", ".join(hops) for hops in switch_state["tables"].get("main", {}).values() if len(hops) > 1)
    return [*rows, *((f"to {count} prefixes", "main (BGP)", hops) for hops, count in spread.items())]


def _iterations_of(fabric: Fabric, worst: Replacement, flows: Sequence[Flow]) -> int:
    """Return how many iterations show the computed load of a placement's switch beside ACKs and control traffic.

    Raises:
        UsageError: there is no such switch, or its load is too small to show.
    """
    if not worst.switch:
        raise UsageError(
            "--write: no switch sends these flows up over more than one link, so there is nothing to measure"
        )
    load = offered_load(fabric, flows)
    sent = sum(load[link.name, worst.switch] for link in fabric.topology.uplinks if link.a.node == worst.switch)
    iterations = max(_ITERATIONS, math.ceil(_SENT_BYTES / sent))
    mean = sum(flow.size_bytes for flow in flows) / len(flows)
    if mean < _LEAST_FLOW_BYTES or iterations > _MOST_ITERATIONS:
        raise UsageError(
            f"--write: a queue pair sends {mean:.0f} bytes in an iteration, so that ACKs and control traffic would "
            f"change the ratio (at least {_LEAST_FLOW_BYTES} bytes are needed); give a larger size or fewer queue pairs"
        )
    return iterations


def _write(path: Path, scheme: str, traffic: JobTraffic, worst: Replacement, *, iterations: int) -> None:
    """Write the experiment whose uplinks are loaded as a placement's were computed to be."""
    moved = "-".join(f"{gone}-by-{come}" for gone, come in worst.moved)
    text = f"""\
# {scheme} after {moved.replace("-", " ")}: computed MMR of {worst.switch} {worst.mmr:.2f}.
# Written by `faultbed routing conflicts --write`.
name = {inline(f"{scheme}-{moved}")}
seed = 1

[fabric]
routing = {inline(scheme)}

[workload]
{_workload(traffic)}
ranks = {inline(worst.ranks)}
qps_per_peer = {traffic.qps_per_peer}
ranks_per_rnic = {traffic.ranks_per_rnic}
iterations = {iterations}

[[expect]]
metric = {inline(f"mmr.{worst.switch}")}
min = {worst.mmr * 0.95:.3f}
max = {worst.mmr * 1.05:.3f}

[[expect]]
metric = "wrong_elements"
max = 0
"""
    write_new_file("--write", path, text.encode())


def _workload(traffic: JobTraffic) -> str:
    """Return the lines of [workload] that say which collectives run."""
    words: dict[str, Any]
    if traffic.is_one_collective:
        (only,) = traffic.phases
        words = {"collective": only.collective, "algorithm": only.algorithm, "size": f"{only.size_bytes}B"}
    else:
        phases = [f"{phase.along}:{phase.collective}:{phase.size_bytes}B:{phase.algorithm}" for phase in traffic.phases]
        words = {"grid": ",".join(f"{name}={size}" for name, size in traffic.grid), "phases": phases}
    return "\n".join(f"{key} = {inline(value)}" for key, value in words.items())


def job_of(
    inventory: Inventory,
    *,
    ranks: tuple[str, ...],
    collective: str,
    algorithm: str,
    size: str,
    grid: str,
    phases: tuple[str, ...],
    qps_per_peer: int,
    ranks_per_rnic: int,
) -> tuple[tuple[str, ...], JobTraffic]:
    """Return the RNICs of the job that `_job_options` describe, and what it sends."""
    placed = _placed(inventory.topology, ranks, ranks_per_rnic)
    if bool(grid) != bool(phases):
        raise UsageError("--grid and --phase go together: a job has dimensions and collectives along them")
    if phases:
        _refuse_collective()
        job_phases = tuple(parsed("--phase", parse_phase, text) for text in phases)
    else:
        job_phases = (
            JobPhase(along=ALL_RANKS, collective=collective, size_bytes=read_size(size), algorithm=algorithm),
        )
    traffic = job_traffic(
        job_phases,
        rnics=len(placed),
        lab_kind=inventory.kind,
        grid=parsed("--grid", parse_grid, grid) if grid else (),
        qps_per_peer=qps_per_peer,
        ranks_per_rnic=ranks_per_rnic,
    )
    return placed, traffic


def _refuse_collective() -> None:
    """Reject options that describe one collective, if there is a grid."""
    source_of = click.get_current_context().get_parameter_source
    for name in ("collective", "algorithm", "size"):
        if source_of(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name} describes one collective of all ranks; with --grid, give it in --phase")


def _placed(topology: Topology, ranks: tuple[str, ...], ranks_per_rnic: int) -> tuple[str, ...]:
    """Return the RNICs of a job, each once."""
    written = ranks or tuple(host.name for host in topology.hosts)
    placed = tuple(endpoint(topology, name).name for text in written for name in select(topology, text))
    if len(placed) < 2:  # noqa: PLR2004 - one rank sends nothing
        raise UsageError(f"--rank: a job needs at least 2 ranks; got {len(placed)}")
    if twice := sorted({name for name in placed if placed.count(name) > 1}):
        raise UsageError(
            f"--rank: {', '.join(twice)} is named twice; give each RNIC once "
            "(--ranks-per-rnic gives RNICs several ranks)"
        )
    if len(placed) * ranks_per_rnic > MAX_RANKS:
        raise UsageError(
            f"--ranks-per-rnic {ranks_per_rnic}: {len(placed)} RNICs would have {len(placed) * ranks_per_rnic} ranks; "
            f"a job has at most {MAX_RANKS}"
        )
    return placed


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.p1 == spread.p99:
        return f"{spread.mean:.2f}"
    return f"{spread.mean:.2f} ({spread.p1:.2f} to {spread.p99:.2f})"


routing.add_command(routing_plan)

COMMANDS = (routing,)
