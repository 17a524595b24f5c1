"""The command that puts the ranks of a job on RNICs: place."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.model.predicting import resolve_without_fabric
from faultbed.harness.cli.options.new_file import write_new_file
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment.toml_text import experiment_toml
from faultbed.harness.experiment.workload_file import Collective, Job
from faultbed.harness.model import calibration as calibration_module
from faultbed.harness.model.experiment_prediction import DRAWS, Draw, default_parameters, predict
from faultbed.harness.model.job_placement import POLICIES, Crossing, Policy, crossing, placed, spares
from faultbed.harness.model.routing_prediction import ALL_RANKS, JobTraffic, job_traffic
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.selectors import select
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.text_files import decoded
from faultbed.traffic.workloads.job import JobPhase

__all__ = ["COMMANDS"]

AS_GIVEN = "as given"
_SHOWN = 12
"""Ranks of a row of the table; `--json` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A placement: its RNICs by rank, what it makes cross, and the predicted iteration or why there is none."""

    policy: str
    ranks: tuple[str, ...]
    spares: tuple[str, ...]
    crossing: Crossing
    iteration_s: Draw | None
    why: str = ""


@click.command("place")
@click.argument("experiment", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="Repeatable; default: all.")
@click.option(
    "--on",
    "where",
    multiple=True,
    metavar="RNIC",
    help="An RNIC to choose from, or a selector of several; repeatable. Default: those of the job.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of random placements.")
@click.option(
    "--write",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the experiment with the placement of the one --policy.",
)
@json_option
@pass_session
def place_command(
    session: Session,
    /,
    *,
    experiment: Path,
    policies: tuple[Policy, ...],
    where: tuple[str, ...],
    seed: int,
    target: Path | None,
    as_json: bool,
) -> None:
    """Put the ranks of an EXPERIMENT's job or collective on RNICs of a lab, by policy; no lab is touched.

    Shown for each policy: which dimensions of the grid send from zone to zone, the bytes of an iteration between zones
    and between racks, and the predicted time of an iteration, which is modelled. RNICs that stay free are listed as
    spares, those next to most of the ranks first.

    \b
      faultbed --lab soft-zones-8 place job.toml --on 'host[*]:rnic[0]' --policy layered --write placed.toml
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    if target is not None and len(policies) != 1:
        raise UsageError("--write: name the one --policy whose placement to write")
    inventory = session.inventory()
    content = experiment.read_bytes()
    given = experiment_module.decode(content, source=str(experiment))
    fitted = resolve_without_fabric(given, content, inventory)[0]
    work = fitted.workload
    if not isinstance(work, Collective | Job):
        raise UsageError(f"{experiment}: workload: only jobs (grid) and collectives have ranks to place")
    rnics = tuple(dict.fromkeys(work.ranks))
    traffic = _traffic(work, len(rnics), inventory)
    free = _free(inventory, where, rnics)
    is_local_refused = traits_of(inventory.kind).is_emulated
    calibration = calibration_module.load(lab_dir(inventory.name), inventory=inventory.digest)
    parameters = default_parameters(inventory.kind) if calibration is None else calibration.parameters

    def iteration(ranks: tuple[str, ...]) -> Draw | None:
        moved = replace(fitted, workload=replace(work, ranks=ranks), faults=(), expectations=())
        again = resolve_without_fabric(moved, content, inventory)[0]
        return predict(again, (), inventory, parameters, draws=DRAWS, seed=seed).fault_free.iteration_s

    by_policy = {AS_GIVEN: rnics} | {
        policy: placed(policy, inventory.topology, traffic, free, seed=seed, is_local_refused=is_local_refused)
        for policy in policies or POLICIES
    }
    rows = [_row(policy, ranks, free, traffic, inventory.topology, iteration) for policy, ranks in by_policy.items()]
    if target is not None:
        _write(target, content, str(experiment), rows[-1])
    if as_json:
        session.json({"fidelity": "modelled", "placements": [dataclasses.asdict(row) for row in rows]})
        return
    _show(session, rows)
    if target is not None:
        session.out.print(f"wrote {target}: `faultbed run {target}` runs the job as {rows[-1].policy} places it")


def _traffic(work: Collective | Job, rnics: int, inventory: Inventory) -> JobTraffic:
    if isinstance(work, Job):
        grid, phases = work.grid, work.phases
    else:
        phase = JobPhase(
            along=ALL_RANKS, collective=work.collective, size_bytes=work.size_bytes, algorithm=work.algorithm
        )
        grid, phases = (), (phase,)
    return job_traffic(phases, rnics=rnics, lab_kind=inventory.kind, grid=grid, ranks_per_rnic=work.ranks_per_rnic)


def _free(inventory: Inventory, where: Sequence[str], rnics: Sequence[str]) -> tuple[str, ...]:
    """Return the RNICs to choose from.

    Raises:
        UsageError: a word is no RNIC and selects none, or there are fewer RNICs than the job needs.
    """
    names = dict.fromkeys(name for word in where for name in select(inventory.topology, word))
    for name in names:
        if (kind := inventory.topology.resolve(name).kind) != "rnic":
            raise UsageError(f"--on {name}: a {kind}; name an RNIC, such as host1:rxe0 or host[*]:rnic[0]")
    free = tuple(names) or tuple(rnics)
    if len(free) < len(rnics):
        raise UsageError(f"--on: {len(free)} RNICs for a job on {len(rnics)}; name more of them")
    return free


def _row(
    policy: str,
    ranks: tuple[str, ...],
    free: Sequence[str],
    traffic: JobTraffic,
    topology: Topology,
    iteration: Callable[[tuple[str, ...]], Draw | None],
) -> _Row:
    """Return a placement with what it makes cross; `iteration` predicts the time of an iteration."""
    iteration_s, why = None, ""
    try:
        iteration_s = iteration(ranks)
    except FaultbedError as error:
        why = str(error)
    return _Row(
        policy=policy,
        ranks=ranks,
        spares=spares(topology, ranks, free),
        crossing=crossing(topology, traffic, ranks),
        iteration_s=iteration_s,
        why=why,
    )


def _show(session: Session, rows: Sequence[_Row]) -> None:
    names = {ALL_RANKS: "the collective"}
    session.table(
        ("policy", "zones crossed by", "between zones", "between racks", "predicted iteration"),
        [
            (
                row.policy,
                " ".join(names.get(name, name) for name in row.crossing.zones) or "nothing",
                format_bytes(round(row.crossing.zone_bytes)),
                format_bytes(round(row.crossing.rack_bytes)),
                "not predicted" if row.iteration_s is None else format_duration(row.iteration_s.median * 1e9),
            )
            for row in rows
        ],
    )
    for row in rows:
        more = f" and {len(row.ranks) - _SHOWN} more (--json)" if len(row.ranks) > _SHOWN else ""
        session.out.print(f"{row.policy}: ranks = {list(row.ranks[:_SHOWN])}{more}", soft_wrap=True, markup=False)
        if row.spares:
            session.out.print(f"{row.policy}: spares = {list(row.spares[:_SHOWN])}", soft_wrap=True, markup=False)
    for why in dict.fromkeys(row.why for row in rows if row.why):
        session.out.print(f"not predicted: {why}", soft_wrap=True, markup=False)
    session.out.print("modelled: bytes of an iteration by the schedules of its collectives; nothing was sent")


def _write(path: Path, content: bytes, source: str, row: _Row) -> None:
    """Write the experiment with other ranks, and with spares where it has a section for them."""
    raw: dict[str, Any] = tomllib.loads(decoded(content, source))
    raw["workload"] = {**raw["workload"], "ranks": list(row.ranks)}
    if "resilience" in raw["workload"] and row.spares:
        raw["workload"]["resilience"] = {**raw["workload"]["resilience"], "spares": list(row.spares)}
    text = experiment_toml(raw)
    experiment_module.decode(text, source=str(path))
    write_new_file("--write", path, text)


COMMANDS = (place_command,)
