"""Judge a finished run, and write its measurements, verdict and report to the run directory."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

from faultbed.harness.analysis import noise
from faultbed.harness.error_words import describe, show_unforeseen
from faultbed.harness.record import rundir
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.judge_run import judge_run
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.run_record import RunRecord, begin_pass, seal, seal_lab
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import DirtyLab, FaultbedError, LabError
from faultbed.testbed.lab import Lab

__all__ = ["Finished", "conclude", "not_recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished run: its directory, verdict and report."""

    run_dir: RunDir
    verdict: VerdictFile
    report: Path


def conclude(
    resolved: ResolvedRun, lab: Lab, run_dir: RunDir, record: RunRecord, floor: noise.NoiseFloor | None
) -> Finished:
    """Write everything that a run recorded, judge it from these files, and write its verdict and report.

    Raises:
        OSError: the run directory cannot be written.
    """
    backend = backend_of(lab.kind)
    record.errors.extend(backend.health(lab.inventory_model))
    measured = record.last
    if measured is None or measured.phase != "measured":  # it did not begin
        measured = begin_pass(record, "measured")
    for run in record.passes:
        if not run.is_sealed and (run is measured or run.work.result is not None):
            seal(run)
    seal_lab(lab, record)
    if flights := getattr(measured.work.result, "flights", ()):  # flows have none
        run_dir.write_flights(flights)
    run_dir.write_samples(run_dir.read_run().workload)
    run_dir.write_environment(
        rundir.describe_environment(
            **dataclasses.asdict(backend.environment(lab)),
            started_utc=run_dir.started.astimezone(UTC).isoformat(timespec="seconds"),
            accelerator=lab.accelerator,
            left_out=resolved.left_out,
            routing=resolved.experiment.fabric.routing if resolved.experiment.fabric else None,
        )
    )
    if floor is not None:
        run_dir.write_noise_floor(noise.encode(floor))
    judged = judge_run(run_dir)
    run_dir.write_ledger(judged.ledger)
    run_dir.write_verdict(judged.verdict)
    # matplotlib takes a second to import, and most commands draw nothing.
    from faultbed.harness.report import run_page as report  # noqa: PLC0415

    return Finished(run_dir=run_dir, verdict=judged.verdict, report=report.render(run_dir.path))


def not_recorded(
    resolved: ResolvedRun, lab: Lab, run_dir: RunDir, record: RunRecord, error: Exception
) -> FaultbedError:
    """Return the error to raise if a run was done but cannot be recorded. It has all that is known about the run.

    A verdict ERROR is written nevertheless, if the run directory accepts it.
    """
    faults = record.injector.end_sentence if record.injector is not None else ""
    lab_sentence = f"the lab is {record.lab_state}" + "".join(f": {line}" for line in record.lab_diff[:1])
    problems = "; ".join(filter(None, (*record.errors, f"the run could not be recorded: {describe(error)}")))
    check = Check(
        name="error", verdict=Verdict.ERROR, observed=None, bound=None, unit="", meaning="no error", detail=problems
    )
    verdict = VerdictFile(
        experiment=resolved.plan.experiment, seed=resolved.plan.seed, lab=lab.name, verdict=Verdict.ERROR,
        checks=(check,), faults=(), lab_state=record.lab_state,
    )  # fmt: skip
    with contextlib.suppress(OSError):
        run_dir.write_verdict(verdict)
    show_unforeseen(error)
    kind = DirtyLab if record.lab_state == "DIRTY" else LabError
    return kind("; ".join(filter(None, (f"{run_dir.path}: {problems}", faults, lab_sentence))))
