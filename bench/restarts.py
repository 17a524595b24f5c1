"""Restarts of a job: whether its state afterwards is that of a job without a loss, and how long each phase takes.

A loss is an engine that is killed after a random iteration, on a host that goes on running. Each loss has a job of its
own, so that each result is compared. With `shrink`, the state is that of the ranks before and of the fewer ones after;
each rank compares it element by element with the closed form (`traffic.node.ranks.rank_state`), and all ranks must
have the same one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.rows import Row, mark
from harness.analysis.ettr import Ettr, ettr
from harness.analysis.restarts import phases_of_restarts
from harness.record.measurements import Measurements
from harness.record.workload_series import ranks_of, resilience_of, series_of
from testbed.errors import LabError
from testbed.lab import Lab
from traffic.workloads.elastic import driver
from traffic.workloads.elastic.elastic_results import ElasticResult
from traffic.workloads.elastic.machine import MODES, Mode, Policy, host_of
from traffic.workloads.elastic.resilience import Resilience
from traffic.workloads.job import JobPhase, JobSpec
from traffic.workloads.storage_service import Storage

__all__ = ["LOSSES", "PARTS", "JobEnd", "end_of", "measure", "rows_of"]

LOSSES = 20
PARTS = tuple(f"restart-{mode}" for mode in MODES)
EVERY, ITERATIONS = 5, 40
FIRST, LAST = 6, 30
"""Iterations after which an engine is killed: a checkpoint is complete, and enough is left to catch up."""
PATIENCE_S = 180.0
_KILL = ("pkill", "-KILL", "-f", "traffic[.]node[.]engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What counts of one job with a loss. `wrong` says why it did not end as a job without one; None: it did."""

    wrong: str | None
    phases_ns: dict[str, int]
    lost_iterations: int
    ettr: Ettr | None


def measure(lab: Lab, mode: Mode, progress: Callable[[str], None], *, losses: int) -> Iterator[Row]:
    """Run a job without a loss, then jobs with one loss each; yield the rows of their restarts.

    Raises:
        LabError: the job without a loss did not end as it must.
    """
    *ranks, spare = _rnics(lab)
    spec = JobSpec(
        grid=(("dp", len(ranks)),),
        phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 16),),
        ranks=tuple(ranks),
        iterations=ITERATIONS,
        storage=Storage(host=host_of(spare), checkpoint_bytes=1 << 17, every=EVERY),
    )
    resilience = Resilience(policy=Policy(restart=mode), spares=(spare,) if mode == "spare" else ())
    quiet = driver.start(lab, spec, resilience).wait(PATIENCE_S)
    if quiet.outcome != "completed" or any(one.wrong for one in quiet.states):
        raise LabError(f"a job without a loss ended as {quiet.outcome}, {quiet.where}; its states: {quiet.states}")
    choice = random.Random(losses)  # noqa: S311
    ends = []
    for number in range(losses):
        host, iteration = host_of(choice.choice(ranks)), choice.randrange(FIRST, LAST)
        result = _with_loss(lab, spec, resilience, host, iteration)
        ends.append(end_of(lab, result, mode, quiet))
        progress(
            f"{mode}, loss {number + 1} of {losses}: {host} after {iteration} iterations: {ends[-1].wrong or 'ok'}"
        )
    yield from rows_of(mode, ends)


def _rnics(lab: Lab) -> tuple[str, ...]:
    """Return the first RNIC of the first four hosts.

    Raises:
        LabError: the lab has fewer hosts.
    """
    rnics = tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4])
    if len(rnics) < 4:  # noqa: PLR2004  # three ranks, and a host for the spare and the storage
        raise LabError(f"{lab.name} has {len(rnics)} hosts, but restarts are measured on 4; choose another lab")
    return rnics


def _with_loss(lab: Lab, spec: JobSpec, resilience: Resilience, host: str, iteration: int) -> ElasticResult:
    running = driver.start(lab, spec, resilience)
    with running:
        deadline = time.monotonic() + PATIENCE_S
        while running.job.finished < iteration and not running.is_over and time.monotonic() < deadline:
            time.sleep(0.005)
        lab.node(host).run(_KILL)
        return running.wait(PATIENCE_S)


def end_of(lab: Lab, result: ElasticResult, mode: Mode, quiet: ElasticResult) -> JobEnd:
    """Judge a job with one loss by one without any."""
    digests = {one.sha256 for one in result.states}
    wanted = digests if mode == "shrink" else {one.sha256 for one in quiet.states}
    size = len(quiet.ranks) - (mode == "shrink")
    problems = {
        f"it ended as {result.outcome}: {result.where}": result.outcome != "recovered",
        f"it restarted {len(result.restarts)} times": len(result.restarts) != 1,
        f"{len(result.ranks)} ranks, {len(result.states)} states": not len(result.ranks) == len(result.states) == size,
        "wrong elements": result.wrong_elements or any(one.wrong for one in result.states),
        "not all iterations": any(one.iterations != result.spec.iterations for one in result.states),
        "another state": len(digests) != 1 or digests != wanted,
        "more iterations lost than a checkpoint covers": any(
            one.lost_iterations is None or one.lost_iterations > EVERY for one in result.restarts
        ),
    }
    resilience = resilience_of(result)
    restarts = phases_of_restarts(resilience, {}) if resilience is not None else ()
    run = Measurements(
        lab=lab.name,
        lab_kind=lab.kind,
        accelerator=lab.accelerator,
        topology=lab.topology,
        t0_ns=result.window.start_ns,
        end_ns=result.window.end_ns,
        workload={"storage": {"every": EVERY}},
        ranks=ranks_of(result),
        series=series_of(result),
        resilience=resilience,
        lab_state="CLEAN",
    )
    return JobEnd(
        wrong="; ".join(what for what, is_so in problems.items() if is_so) or None,
        phases_ns={phase.name: phase.length_ns for _, phases in restarts for phase in phases},
        lost_iterations=max((one.lost_iterations or 0 for one in result.restarts), default=0),
        ettr=ettr(run, None, (), first_fault_ns=run.end_ns),
    )


def rows_of(mode: str, ends: list[JobEnd]) -> Iterator[Row]:
    """Yield how many jobs ended right, and the median of each phase over them."""
    right = [end for end in ends if end.wrong is None]
    wrong = "; ".join(end.wrong for end in ends if end.wrong is not None)
    what = f"{mode}: state after a loss as without one"
    yield what, f"{len(right)} of {len(ends)}", wrong, f"{len(ends)}", mark(reached=len(right) == len(ends) > 0)
    if not right:
        return
    lost = [end.lost_iterations for end in right]
    within = mark(reached=max(lost) <= EVERY)
    yield (
        f"{mode}: iterations lost",
        f"{sorted(lost)[len(lost) // 2]}",
        f"{min(lost)}..{max(lost)}",
        f"<= {EVERY}",
        within,
    )
    yield _ettr_row(mode, [end.ettr for end in right if end.ettr is not None])
    totals = [sum(end.phases_ns.values()) for end in right]
    for phase in right[0].phases_ns:
        yield _seconds(f"{mode}: {phase}", [end.phases_ns[phase] for end in right])
    yield _seconds(f"{mode}: from the last iteration before the loss to where the job was", totals)


def _ettr_row(mode: str, ettrs: list[Ettr]) -> Row:
    known = [(one.ratio, one.formula) for one in ettrs if one.formula is not None]
    inside = sum(formula.low <= measured <= formula.high for measured, formula in known)
    spread = (
        f"{min(measured for measured, _ in known):.2f}..{max(measured for measured, _ in known):.2f}" if known else ""
    )
    return f"{mode}: ETTR in the formula's 95 % interval", f"{inside} of {len(known)}", spread, "", ""


def _seconds(what: str, times_ns: list[int]) -> Row:
    ordered = sorted(time_ns / 1e9 for time_ns in times_ns)
    return (
        what,
        f"{ordered[len(ordered) // 2]:.2f} s",
        f"{ordered[0]:.2f}..{ordered[-1]:.2f} s, n={len(ordered)}",
        "",
        "",
    )
