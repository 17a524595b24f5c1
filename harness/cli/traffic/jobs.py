"""Jobs of ranks: `faultbed traffic job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from faultbed.harness.analysis.ranks.storage_reads import reads_of
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options import rows_file
from faultbed.harness.cli.options.qp import qp_option
from faultbed.harness.cli.options.recording_options import (
    check_record,
    out_option,
    record_options,
    write_record,
    write_rows,
)
from faultbed.harness.cli.options.section_options import section_from, section_options
from faultbed.harness.cli.traffic.flows_and_collectives import exit_code, run_ranks
from faultbed.harness.experiment.job_sections import write_grid
from faultbed.harness.experiment.workload_file import Job
from faultbed.harness.experiment.workload_specs import job_spec
from faultbed.harness.record import workload_series
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.workloads import interference, recording
from faultbed.traffic.workloads import job as job_module
from faultbed.traffic.workloads.interference import Interference, Place
from faultbed.traffic.workloads.job import JobResult, JobSpec
from faultbed.traffic.workloads.storage_service import StorageTimes

__all__ = ["COMMANDS", "job"]

T = TypeVar("T")


@click.command()
@section_options(Job, without=("qp", "resilience"), defaults={"iterations": 10})
@click.option(
    "--alone",
    is_flag=True,
    help="Then run each group of each phase alone, and print its slowdown beside the others (interference).",
)
@qp_option
@out_option
@record_options
@json_option
@pass_session
def job(
    session: Session,
    /,
    *,
    alone: bool,
    out: Path | None,
    record: Path | None,
    record_format: str,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a training job on a grid of ranks: compute, then concurrent collectives along its dimensions."""
    work: Job = section_from(Job, options)
    spec = job_spec(work)
    places, _, algorithms = job_module.fit(session.inventory(), spec)
    jobs_alone = interference.alone(spec, [place.name for place in places], algorithms) if alone else {}
    for spec_alone in jobs_alone.values():
        job_module.fit(session.inventory(), spec_alone)
    check_record(record)
    result = run_ranks(session, spec.ranks, f"job {write_grid(spec.grid)}", partial(_start, spec))
    if record is not None:
        write_record(session, recording.of_job(result), record, record_format)
    write_rows(session, rows_file.of_ranks(result), out)
    code = _job_exit_code(session, result)
    by_place = {} if code else _run_alone(session, jobs_alone)
    disturbed = interference.interference(result, by_place)
    if as_json:
        more = {"interference": [{**asdict(item), "ratio": item.ratio} for item in disturbed]} if alone else {}
        session.json(result.to_dict() | more)
    else:
        _print_job(session, spec, result, disturbed)
    if code and alone:
        session.err.print("no group was run alone, because the whole job failed")
    codes_alone = [
        _job_exit_code(session, job_result, title=_title_alone(jobs_alone[place]))
        for place, job_result in by_place.items()
    ]
    return max([code, *codes_alone])


def _print_job(session: Session, spec: JobSpec, result: JobResult, disturbed: Sequence[Interference]) -> None:
    """Print the table of groups, the times of iterations, and the times of storage."""
    _print_groups(session, spec, result, disturbed)
    times = (
        f"; iteration P50 {result.iteration_p50_ns / 1e6:.1f} ms, P95 {result.iteration_p95_ns / 1e6:.1f}, "
        f"P99 {result.iteration_p99_ns / 1e6:.1f}"
    )
    session.out.print(
        f"{result.iterations_completed} iterations, {result.wrong_elements} wrong elements"
        f"{times if result.iterations_completed else ''}"
    )
    if result.storage_times is not None:
        session.out.print(_storage_text(result.storage_times))
    if result.readers:
        session.out.print(_readers_text(result), soft_wrap=True)


def _job_exit_code(session: Session, result: JobResult, title: str = "") -> int:
    """Return the exit code for the job `title`, and report its failure on stderr."""
    if result.wrong_elements:
        if title:
            session.err.print(f"{title}: {result.wrong_elements} wrong elements", soft_wrap=True)
        return ExitCode.FAIL
    return exit_code(session, result.outcome, f"{title}: {result.where}" if title else result.where)


def _storage_text(times: StorageTimes) -> str:
    words = f"waits for data: P50 {times.ingest_wait_p50_ns / 1e6:.1f} ms, P99 {times.ingest_wait_p99_ns / 1e6:.1f} ms"
    if not times.checkpoints:
        return words
    return (
        f"{words}; {times.checkpoints} checkpoints, stored in P50 {times.stored_p50_ns / 1e6:.0f} ms, at most "
        f"{times.stored_max_ns / 1e6:.0f}; ranks waited P50 {times.checkpoint_wait_p50_ns / 1e6:.0f} ms for them, "
        f"at most {times.checkpoint_wait_max_ns / 1e6:.0f}"
    )


def _readers_text(result: JobResult) -> str:
    reads = reads_of(workload_series.series_of(result), workload_series.readers_of(result))
    ratio = reads.p99_ratio
    return f"reads beside the job: {'' if ratio is None else f'P99 ratio {ratio:.2f}, '}{reads.describe()}"


def _run_alone(session: Session, jobs: Mapping[Place, JobSpec]) -> dict[Place, JobResult]:
    return {
        place: run_ranks(session, spec_alone.ranks, _title_alone(spec_alone), partial(_start, spec_alone))
        for place, spec_alone in jobs.items()
    }


def _title_alone(spec: JobSpec) -> str:
    ranks = f" with {spec.ranks_per_rnic} ranks each" if spec.ranks_per_rnic > 1 else ""
    return f"job of {' and '.join(spec.ranks)}{ranks} alone"


def _start(spec: JobSpec, lab: Lab, on_event: OnEvent) -> Running[JobResult]:
    return job_module.start(lab, spec, on_event=on_event)


def _print_groups(session: Session, spec: JobSpec, result: JobResult, disturbed: Sequence[Interference]) -> None:
    ratios = {
        (disturbance.phase, disturbance.members): (f"{disturbance.alone_ns / 1e3:.0f}", f"{disturbance.ratio:.2f}")
        for disturbance in disturbed
    }
    rows = [
        (
            spec.phases[group.phase].along,
            spec.phases[group.phase].collective,
            result.algorithms[group.phase],
            str(spec.phases[group.phase].size_bytes),
            " ".join(str(rank) for rank in group.members),
            f"{group.time_ns / 1e3:.0f}" if result.iterations_completed else "n/a",
            f"{group.busbw_gbytes_per_s:.5f}" if group.busbw_gbytes_per_s else "n/a",
            *(ratios.get((group.phase, group.members), ("", "")) if ratios else ()),
        )
        for group in result.groups
    ]
    columns = ("along", "collective", "algorithm", "size(B)", "ranks", "time(us)", "busbw(GB/s)")
    session.table((*columns, *(("alone(us)", "interference") if ratios else ())), rows)


COMMANDS = (job,)
