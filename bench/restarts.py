"""Parts `restart-*` of the bench: whether a restarted job has the state of a job without a loss, and phase times.

For a loss, the traffic engine of a host is killed after a random iteration; the host continues to run. Each job has one
loss, and its final state is compared with that of a job without a loss. With `shrink` that is not possible, because the
state depends on the number of ranks. Instead, each rank compares its state with the closed form element by element
(`faultbed.traffic.node.ranks.rank_state`), and all ranks must have the same state.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.rows import Row, mark
from faultbed.harness.analysis.ettr import Ettr, ettr
from faultbed.harness.analysis.restarts import timed_restarts
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import WorkloadEvidence
from faultbed.harness.record.workload_series import ranks_of, resilience_of, series_of
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.workloads.elastic import driver
from faultbed.traffic.workloads.elastic.elastic_results import ElasticResult
from faultbed.traffic.workloads.elastic.machine import MODES, Mode, Policy, host_of
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

__all__ = ["LOSSES", "PARTS", "JobEnd", "end_of", "ettr_rows", "measure", "measure_ettr", "rows_of"]

LOSSES = 20
PARTS = (*(f"restart-{mode}" for mode in MODES), "restart-ettr")
CHECKPOINT_EVERY, ITERATIONS = 5, 36
LONG_CHECKPOINT_EVERY, LONG_ITERATIONS = 50, 400
"""Iterations between checkpoints, and of a job, for ETTR. The job is so long that losses cost more time than noise."""
FIRST_LOSS, LAST_LOSS = 6, 26
"""Range of iterations after which an engine is killed: late enough that a checkpoint is complete, early enough that the
job catches up before it ends."""
JOB_TIMEOUT_S = 180.0
_KILL = ("pkill", "-KILL", "-f", "faultbed[.]traffic[.]node[.]engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """Result of a job with a loss. `wrong` says how it differs from a job without a loss; None: no difference."""

    wrong: str | None
    phases_ns: dict[str, int]
    lost_iterations: int
    ettr: Ettr | None


def measure(lab: Lab, mode: Mode, progress: Callable[[str], None], *, losses: int) -> Iterator[Row]:
    """Run a job without a loss, then jobs with one loss each; yield the rows of their restarts.

    Raises:
        LabError: the job without a loss failed.
    """
    *ranks, spare = _rnics(lab)
    spec = _spec(ranks, host_of(spare), ITERATIONS, CHECKPOINT_EVERY)
    resilience = Resilience(policy=Policy(restart=mode), spares=(spare,) if mode == "spare" else ())
    without_loss = _run_without_loss(lab, spec, resilience)
    rng = random.Random(f"{mode} {losses}")  # noqa: S311
    ends = []
    for number in range(losses):
        loss = host_of(rng.choice(ranks)), rng.randrange(FIRST_LOSS, LAST_LOSS)
        ends.append(end_of(lab, _run_with_losses(lab, spec, resilience, [loss]), without_loss, mode=mode))
        times = ", ".join(f"{name} {took_ns / 1e9:.2f} s" for name, took_ns in ends[-1].phases_ns.items())
        outcome = ends[-1].wrong or f"as without a loss: {times}"
        progress(f"{mode}, loss {number + 1} of {losses}: {loss[0]} after {loss[1]} iterations: {outcome}")
    yield from rows_of(mode, ends)


def measure_ettr(lab: Lab, progress: Callable[[str], None], *, schedules: int) -> Iterator[Row]:
    """Run jobs that lose an engine one to three times, at random; yield rows that compare their ETTR with the formula.

    Raises:
        LabError: the job without a loss failed.
    """
    *ranks, other = _rnics(lab)
    spec = _spec(ranks, host_of(other), LONG_ITERATIONS, LONG_CHECKPOINT_EVERY)
    resilience = Resilience(policy=Policy(restart="same"))
    without_loss = _run_without_loss(lab, spec, resilience)
    rng = random.Random(f"ettr {schedules}")  # noqa: S311
    ends = []
    for number in range(schedules):
        possible = range(2 * LONG_CHECKPOINT_EVERY, LONG_ITERATIONS - LONG_CHECKPOINT_EVERY)
        moments = sorted(rng.sample(possible, rng.randint(1, 3)))
        losses = [(host_of(rng.choice(ranks)), moment) for moment in moments]
        ends.append(
            end_of(
                lab, _run_with_losses(lab, spec, resilience, losses), without_loss, mode="same", restarts=len(losses)
            )
        )
        progress(f"schedule {number + 1} of {schedules}: {moments}: {ends[-1].wrong or _ettr_line(ends[-1].ettr)}")
    yield from ettr_rows(ends)


def _spec(ranks: Sequence[str], storage: str, iterations: int, every: int) -> JobSpec:
    return JobSpec(
        grid=(("dp", len(ranks)),),
        phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 16),),
        ranks=tuple(ranks),
        iterations=iterations,
        storage=Storage(host=storage, checkpoint_bytes=1 << 17, every=every),
    )


def _run_without_loss(lab: Lab, spec: JobSpec, resilience: Resilience) -> ElasticResult:
    result = driver.start(lab, spec, resilience).wait(JOB_TIMEOUT_S)
    if result.outcome == "failed" or result.restarts or any(state.wrong for state in result.states):
        raise LabError(f"a job without a loss ended as {result.outcome}, {result.where}; its states: {result.states}")
    return result


def _rnics(lab: Lab) -> tuple[str, ...]:
    """Return the first RNIC of the first four hosts.

    Raises:
        LabError: the lab has fewer hosts.
    """
    rnics = tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4])
    if len(rnics) < 4:  # noqa: PLR2004  # three ranks, and a host for the spare and the storage
        raise LabError(f"{lab.name} has {len(rnics)} hosts, but restarts are measured on 4; choose another lab")
    return rnics


def _run_with_losses(
    lab: Lab, spec: JobSpec, resilience: Resilience, losses: Sequence[tuple[str, int]]
) -> ElasticResult:
    """Run a job, and kill the engines of some hosts, each after a given number of iterations."""
    running = driver.start(lab, spec, resilience)
    with running:
        deadline = time.monotonic() + JOB_TIMEOUT_S
        for number, (host, iteration) in enumerate(losses):
            while not running.is_over and time.monotonic() < deadline:
                job = running.job
                if job.finished >= iteration and job.restarts == number and job.is_iterating:
                    break
                time.sleep(0.005)
            lab.node(host).run(_KILL)
        return running.wait(JOB_TIMEOUT_S)


def end_of(lab: Lab, result: ElasticResult, without_loss: ElasticResult, *, mode: Mode, restarts: int = 1) -> JobEnd:
    """Compare a job with losses with a job without a loss. Each loss must cause one restart."""
    checkpoint_every = result.spec.storage.every if result.spec.storage is not None else 0
    digests = {state.sha256 for state in result.states}
    expected = digests if mode == "shrink" else {state.sha256 for state in without_loss.states}
    rank_count = len(without_loss.ranks) - (mode == "shrink")
    problems = {
        f"it ended as {result.outcome}: {result.where}": result.outcome != "recovered",
        f"it restarted {len(result.restarts)} times": len(result.restarts) != restarts,
        f"{len(result.ranks)} ranks, {len(result.states)} states": not len(result.ranks)
        == len(result.states)
        == rank_count,
        "wrong elements": result.wrong_elements or any(state.wrong for state in result.states),
        "a rank did not finish all iterations": any(
            state.iterations != result.spec.iterations for state in result.states
        ),
        "state differs from the job without a loss": len(digests) != 1 or digests != expected,
        "more iterations lost than a checkpoint covers": any(
            restart.lost_iterations is None or restart.lost_iterations > checkpoint_every for restart in result.restarts
        ),
    }
    resilience = resilience_of(result)
    run = RunEvidence(
        lab=LabEvidence(
            name=lab.name, kind=lab.kind, accelerator=lab.accelerator, topology=lab.topology, state="CLEAN"
        ),
        workload=WorkloadEvidence(
            planned={"storage": {"every": checkpoint_every}},
            t0_ns=result.window.start_ns,
            end_ns=result.window.end_ns,
            ranks=ranks_of(result),
            series=series_of(result),
            resilience=resilience,
        ),
    )
    return JobEnd(
        wrong="; ".join(problem for problem, is_present in problems.items() if is_present) or None,
        phases_ns={phase.name: phase.length_ns for timed in timed_restarts(resilience, {}) for phase in timed.phases},
        lost_iterations=max((restart.lost_iterations or 0 for restart in result.restarts), default=0),
        ettr=ettr(run, None, (), first_fault_ns=run.workload.end_ns),
    )


def rows_of(mode: str, ends: list[JobEnd]) -> Iterator[Row]:
    """Yield the number of jobs that ended correctly, and the median of each of their phases."""
    right = [end for end in ends if end.wrong is None]
    wrong = "; ".join(end.wrong for end in ends if end.wrong is not None)
    title = f"{mode}: state after a loss as without one"
    yield title, f"{len(right)} of {len(ends)}", wrong, f"{len(ends)}", mark(reached=len(right) == len(ends) > 0)
    if not right:
        return
    lost = [end.lost_iterations for end in right]
    within = mark(reached=max(lost) <= CHECKPOINT_EVERY)
    yield (
        f"{mode}: iterations lost",
        f"{statistics.median(lost):g}",
        f"{min(lost)}..{max(lost)}",
        f"<= {CHECKPOINT_EVERY}",
        within,
    )
    totals = [sum(end.phases_ns.values()) for end in right]
    for phase in right[0].phases_ns:
        yield _seconds(f"{mode}: {phase}", [end.phases_ns[phase] for end in right])
    yield _seconds(f"{mode}: from the last iteration before the loss until the job had caught up", totals)


def ettr_rows(ends: list[JobEnd]) -> Iterator[Row]:
    """Yield the number of schedules with the measured ETTR inside the formula's interval, and the ratio of the two."""
    known = [(end.ettr, end.ettr.formula) for end in ends if end.wrong is None and end.ettr and end.ettr.formula]
    ratios = sorted(measured.ratio / formula.predicted for measured, formula in known if formula.predicted)
    inside = [holds for measured, formula in known if (holds := formula.holds(measured.ratio)) is not None]
    wrong = "; ".join(end.wrong for end in ends if end.wrong is not None)
    yield "schedules whose job ended as without a loss, with an ETTR", f"{len(known)} of {len(ends)}", wrong, "", ""
    unknown = f"{len(known) - len(inside)} without an interval"
    yield "measured ETTR in the formula's 95 % interval", f"{sum(inside)} of {len(inside)}", unknown, "", ""
    if ratios:
        spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}, n={len(ratios)}"
        yield "measured ETTR / predicted", f"{statistics.median(ratios):.3f}", spread, "", ""


def _ettr_line(measured: Ettr | None) -> str:
    if measured is None or measured.formula is None:
        return "no ETTR: too few iterations before the first loss"
    noise = measured.interval()
    measured_interval = "none" if noise is None else f"{noise.low:.3f} to {noise.high:.3f}"
    return f"measured {measured.ratio:.3f} ({measured_interval}), formula {measured.formula}"


def _seconds(title: str, times_ns: list[int]) -> Row:
    ordered = sorted(time_ns / 1e9 for time_ns in times_ns)
    return (
        title,
        f"{statistics.median(ordered):.2f} s",
        f"{ordered[0]:.2f}..{ordered[-1]:.2f} s, n={len(ordered)}",
        "",
        "",
    )
