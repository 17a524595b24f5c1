"""One experiment on one lab: known state → workload → faults → recovery → verdict → lab provably restored.

The run directory is made before the lab is touched. The plan, and the intent of every change, are on disk before the
change is made. An error during the run ends in a verdict (ERROR, with its message) instead of a traceback. The lab is
compared with its state before in any case.

What a run consists of beside its workload is decided by the parts of the registry (`faultbed.harness.parts.passes`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from faultbed.harness import judge
from faultbed.harness.analysis import noise
from faultbed.harness.error_words import describe
from faultbed.harness.parts.part import planned_by
from faultbed.harness.parts.passes import Calibration, Pass, PassRefuted, Setting
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.record import code, rundir
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import ends, flight_dump, workload
from faultbed.harness.run.conclude import Finished, conclude, not_recorded
from faultbed.harness.run.lease_watch import LeaseWatch
from faultbed.harness.run.prepare.resolve import ResolvedRun, passes_before, refusal, resolve, touched
from faultbed.harness.run.restart_lines import restart_lines
from faultbed.harness.run.run_record import RunRecord, begin_pass, sealed_at_end
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.inject.injector import Mutation, longest_lease_s
from faultbed.inject.journal import Journal
from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.tenancy import audit_log, dirty, interventions
from faultbed.testbed.tenancy.dirty import Work
from faultbed.testbed.tenancy.reservation import covered
from faultbed.traffic.engine.running_traffic import OnEvent, Running

__all__ = ["Finished", "ResolvedRun", "execute", "refusal", "resolve", "touched"]

Progress = Callable[[str], None]


def execute(
    resolved: ResolvedRun,
    inventory: Inventory,
    *,
    out: Path,
    progress: Progress,
    mutations: Mapping[str, Mutation] | None = None,
    guard: Callable[[], None] = lambda: None,
    control: bool = False,
) -> Finished:
    """Run a resolved experiment, judge it, and write its run directory.

    Args:
        resolved: the experiment, from `resolve`.
        inventory: the lab; a soft one must be up.
        out: folder of run directories.
        progress: called with each progress line.
        guard: called before the lab is changed and while the workload progresses; raises if the lab is not ours.
        mutations: make parts (`faults`, `routing`) a no-op; for the tests that prove that such a run is never a PASS.
        control: arm every fault with zero intensity, to measure what the harness itself costs
            (`faultbed.harness.parts.control_claims`).

    Raises:
        LabError: the lab is not up, or another command has ended its faults since this process began. Later errors
            end in the verdict.
        UsageError: the noise floor that is stored for the lab cannot be read.
        DirtyLab: the lab is marked DIRTY.
        Forbidden: the lab's owner does not allow one of the faults, or not as many at one time.
    """
    if control:
        mutations = {**(mutations or {}), "faults": "noop"}
        resolved = replace(resolved, plan=msgspec.structs.replace(resolved.plan, control=True))
    if reason := refusal(resolved, inventory):
        subject = {"kind": "run", "target": resolved.experiment.name}
        audit_log.append(lab_dir(inventory.name), "forbidden", **subject, detail=str(reason))
        raise reason
    is_whole_lab = traits_of(inventory.kind).has_snapshot  # a soft lab is reset, and compared, as a whole
    if not is_whole_lab:
        other_hosts = [host for host in inventory.topology.host_by_name if host not in resolved.hosts]
        inventory = without_hosts(inventory, other_hosts)
    with open_lab(inventory) as lab:
        lab.guard = _guard_of(lab, guard)
        if not is_whole_lab:
            lab.reserved = covered(lab.topology, touched(resolved, lab.topology))
        _refuse_after_intervention(lab)
        # Only a DIRTY lab is refused. `dirty.begin` handles changes that a killed command may have left.
        dirty.refuse(lab.state_dir, lab.name)
        conditions = noise.conditions_of(
            resolved.plan, lab=lab.name, accelerator=lab.accelerator, cpus=os.cpu_count() or 0
        )
        floor = noise.load(lab.state_dir, conditions, say=progress)
        run_dir = _make_run_dir(resolved, inventory, out, control=control)
        with Journal(run_dir.journal) as journal:
            setting = Setting(
                experiment=resolved.experiment,
                plan=resolved.plan,
                faults=resolved.faults,
                ranks=kind_of(resolved.experiment.workload).rank_names(resolved.experiment.workload),
                lab=lab,
                journal=journal,
                run_dir=run_dir,
                progress=progress,
                mutations=mutations or {},
            )
            record = RunRecord(setting=setting, lease_s=_lease_s(resolved))
            _run_and_compare(record, flight_dump.writer(run_dir.path, flight_dump.STEM, progress))
        if journal.failure is not None:
            record.errors.append(f"{journal.path}: {describe(journal.failure)}; what was done is not all recorded")
        try:
            return conclude(resolved, lab, run_dir, record, floor)
        except Exception as error:  # a full disk or an internal error: report the lab's state nevertheless
            raise not_recorded(resolved, lab, run_dir, record, error) from error
        except KeyboardInterrupt as error:
            lab_sentence = f"the lab was compared before: {record.lab_state}; {run_dir.path} has no verdict"
            ends.interrupted(error, record.injector, lab_sentence, is_dirty=record.lab_state == "DIRTY")
            raise


def _make_run_dir(resolved: ResolvedRun, inventory: Inventory, out: Path, *, control: bool) -> RunDir:
    """Make the run directory, with the plan and a copy of the trace that the workload replays."""
    run_dir = rundir.create(
        out,
        experiment=resolved.source,
        name=resolved.experiment.name,
        seed=resolved.plan.seed,
        lab=shipped.inventory_word(inventory.path),
        started=datetime.now(UTC),
        without=[exclusion.host for exclusion in resolved.left_out],
        control=control,
    )
    code.digest()  # read and cached now, because the source may be edited during the run
    run_dir.write_plan(resolved.plan)
    run_dir.write_ledger(judge.planned_ledger(planned_by(resolved.plan)))
    work = resolved.experiment.workload
    kind_of(work).keep_inputs(work, resolved.experiment.source, run_dir.path)
    return run_dir


def _lease_s(resolved: ResolvedRun) -> float:
    """Return for how many seconds faults and parts may outlive the process of the run."""
    return max(longest_lease_s(resolved.faults), *(part.outlives_s(resolved.experiment) for part in PARTS))


def _run_and_compare(record: RunRecord, on_flights: OnEvent) -> None:
    """Run the experiment, and compare the lab with its state before, whatever happens in between.

    After an error the run is judged with what was measured until then, and is an ERROR. Ctrl-C is raised again at the
    end.
    """
    setting = record.setting
    lab, journal = setting.lab, setting.journal
    work: Work | None = None
    interrupt: BaseException | None = None
    try:
        _to_known_state(setting)
        why = f"run {journal.path.parent.name}"
        work = dirty.begin(lab, why, lease_s=record.lease_s, progress=setting.progress)
        _calibrate(setting)
        for phase, line in passes_before(setting.plan).items():
            setting.progress(line)
            _run_pass(begin_pass(record, phase), on_flights)
            _to_known_state(setting)
        _run_pass(begin_pass(record, "measured"), on_flights)
    except PassRefuted as error:
        journal.note("pass_refuted", error=str(error))
    except Exception as error:  # noqa: BLE001 (whatever went wrong, the lab is compared)
        trace = "" if isinstance(error, FaultbedError) else "".join(traceback.format_exception(error))
        _record_error(record, describe(error), trace)
    except BaseException as error:  # noqa: BLE001 (raised again below)
        interrupt = error
    # Even if all faults were over when another command intervened, it may have changed what the run measured.
    intervention = interventions.since_begin(lab.state_dir, lab.reserved)
    if intervention and not any(intervention in error for error in record.errors):
        _record_error(record, intervention)
    if work is not None:
        _compare_lab(work, record, interrupt)
    elif interrupt is not None:
        raise interrupt
    else:
        record.lab_state, record.lab_diff = "DIRTY", ("not compared: the lab's state before the run could not be read",)
    journal.note("lab", state=record.lab_state, diff=list(record.lab_diff))


def _record_error(record: RunRecord, error: str, trace: str = "") -> None:
    record.errors.append(error)
    record.setting.journal.note("error", error=error, trace=trace)


def _compare_lab(work: Work, record: RunRecord, interrupt: BaseException | None) -> None:
    """Compare the lab with its state before the run. Raise the interrupt, if there was one, with the result."""
    lab, progress = record.setting.lab, record.setting.progress
    progress("comparing the lab with its state before")
    leftovers = record.last.left() if record.last is not None else ()
    if interrupt is not None:
        ends.reraise(interrupt, lab, work, record.injector, leftovers)
    outcome = ends.finish(lab, work, record.injector, record.receipts, leftovers)
    record.lab_state, record.lab_diff = outcome.state, outcome.reasons
    if outcome.state == "DIRTY":
        progress(outcome.sentence)


def _guard_of(lab: Lab, check_reservation: Callable[[], None]) -> Callable[[], None]:
    """Return a guard that also raises once another command has ended the faults of the lab."""

    def guard() -> None:
        check_reservation()
        _refuse_after_intervention(lab)

    return guard


def _refuse_after_intervention(lab: Lab) -> None:
    interventions.refuse(lab.state_dir, lab.name, lab.reserved)


def _to_known_state(setting: Setting) -> None:
    lab = setting.lab
    lab.guard()
    if traits_of(lab.kind).has_snapshot:
        with setting.journal.doing("reset"):
            backend_of(lab.kind).reset(lab.inventory_model, setting.progress, lab=lab)


def _calibrate(setting: Setting) -> None:
    """Have every part measure what it needs to know of the lab before the first pass."""
    calibration = Calibration(setting=setting, to_known_state=functools.partial(_to_known_state, setting))
    for part in PARTS:
        if (evidence := part.calibrate(calibration)) is not None:
            setting.run_dir.write_evidence(part.name, "calibrate", evidence)


def _run_pass(run: Pass, on_flights: OnEvent) -> None:
    """Run the workload once with everything that takes part in the pass, and write the evidence of it.

    Every pass has the same parts as far as they are not about faults: otherwise the ratio of two passes would include
    the cost of these parts.

    Raises:
        PassRefuted: its workload shows that the next passes are pointless.
        LabError: the lab could not be used.
    """
    setting, parts = run.setting, [*run.active.values()]
    with sealed_at_end(run), contextlib.ExitStack() as around:
        # The engines start in the background, while the parts prepare.
        around.enter_context(workload.engines_started_ahead(setting.experiment, setting.lab))
        for part in parts:
            around.enter_context(part.around())
        on_event = flight_dump.to_each(restart_lines(run.progress), run.on_event, on_flights)
        with setting.journal.doing("workload", phase=run.phase, workload=setting.plan.workload):
            run.work.running = workload.start(setting.experiment, setting.lab, on_event)
            with run.work.running as running:
                _follow(run, running)
        run.work.end_ns = running.ended_ns
        # Standstills before t0 do not count: while connections are made, an engine sometimes waits for its kernel.
        run.work.standstills = tuple(one for one in running.standstills if one.end_ns > run.work.t0_ns)
        for part in reversed(parts):
            part.end()


def _follow(run: Pass, running: Running[Any]) -> None:
    """Have the parts do what they do while the workload runs, and wait for its end."""
    setting, work, parts = run.setting, run.work, [*run.active.values()]
    work.began_ns, work.t0_ns, load = running.began_ns, running.started_ns, MachineLoad.watch()
    run.progress("workload is running")
    with setting.journal.doing("paths"), run.readings.reading():
        work.paths = workload.paths_of(setting.lab, running)
    for part in parts:
        part.begin()
    with run.ending.until_driven(), contextlib.ExitStack() as watching:
        watching.enter_context(LeaseWatch(setting.lab.guard, run.ending))
        for part in parts:
            watching.enter_context(part.watching())
        for part in parts:
            part.drive()
    if (reason := run.ending.reason) is not None:  # all faults are cleared
        if run.ending.error is not None:
            setting.errors.append(run.ending.error)
        setting.journal.note("stop", said=reason)
        run.progress(reason)
        running.stop()
    work.result = running.wait(workload.patience_s(setting.experiment, running))
    work.load = load()
