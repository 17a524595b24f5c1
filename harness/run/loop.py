"""One experiment on one lab: known state → workload → faults → recovery → verdict → lab provably restored.

The run directory is made before the lab is touched. The plan, and the intent of every change, are on disk before the
change is made. An error during the run ends in a verdict (ERROR, with its message) instead of a traceback. The lab is
compared with its state before in any case.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from faultbed.harness import judge
from faultbed.harness.analysis import noise
from faultbed.harness.model.workload_traffic import demands_of_workload
from faultbed.harness.parts.part import planned_by
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.parts.twin_claims import wants_twin
from faultbed.harness.record import code, rundir
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import emulation_limit, ends, flight_dump, workload
from faultbed.harness.run.conclude import Finished, conclude, not_recorded
from faultbed.harness.run.faults.drive_faults import drive_all, end_early, prepare_all
from faultbed.harness.run.faults.live_guard import Live, StopWatcher
from faultbed.harness.run.faults.use_by_workloads import use_of
from faultbed.harness.run.online import Online
from faultbed.harness.run.prepare.bind_to_lab import needs_baseline
from faultbed.harness.run.prepare.resolve import ResolvedRun, refusal, resolve, touched
from faultbed.harness.run.restart_lines import restart_lines
from faultbed.harness.run.routing import routing_scheme
from faultbed.harness.run.routing.scheme_deviations import WorkloadTime, fault_times
from faultbed.harness.run.run_record import PassRecord, RunRecord, sealed_at_end
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.inject.injector import Injector, Mutation, longest_lease_s
from faultbed.inject.journal import Journal
from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.observe import counters, telemetry
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.testbed.tenancy import audit_log, dirty, interventions
from faultbed.testbed.tenancy.dirty import Work
from faultbed.testbed.tenancy.reservation import covered
from faultbed.traffic.engine.engine_client import FabricModel
from faultbed.traffic.engine.running_traffic import OnEvent

__all__ = ["Finished", "ResolvedRun", "execute", "refusal", "resolve", "touched"]

Progress = Callable[[str], None]


def execute(
    resolved: ResolvedRun,
    inventory: Inventory,
    *,
    out: Path,
    progress: Progress,
    mutate: Mutation | None = None,
    guard: Callable[[], None] = lambda: None,
    control: bool = False,
    mutate_routing: Mutation | None = None,
) -> Finished:
    """Run a resolved experiment, judge it, and write its run directory.

    Args:
        resolved: the experiment, from `resolve`.
        inventory: the lab; a soft one must be up.
        out: folder of run directories.
        progress: called with each progress line.
        guard: called before the lab is changed and while the workload progresses; raises if the lab is not ours.
        mutate: make every fault a no-op; for the tests that prove that such a run is never a PASS.
        control: arm every fault with zero intensity, to measure what the harness itself costs
            (`faultbed.harness.parts.control_claims`).
        mutate_routing: make the routing scheme a no-op, as `mutate` does with faults.

    Raises:
        LabError: the lab is not up, or another command has ended its faults since this process began. Later errors
            end in the verdict.
        UsageError: the noise floor that is stored for the lab cannot be read.
        DirtyLab: the lab is marked DIRTY.
        Forbidden: the lab's owner does not allow one of the faults, or not as many at one time.
    """
    if control:
        mutate, resolved = "noop", replace(resolved, plan=msgspec.structs.replace(resolved.plan, control=True))
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
        record = RunRecord(
            run_dir=run_dir,
            stops=Guard(resolved.experiment.stops),
            lease_s=_lease_s(resolved),
            mutate_routing=mutate_routing,
        )
        with Journal(run_dir.journal) as journal:
            on_flights = flight_dump.writer(run_dir.path, flight_dump.STEM, progress)
            _run_and_compare(resolved, lab, journal, record, progress, mutate, on_flights)
        if journal.failure is not None:
            record.errors.append(f"{journal.path}: {ends.describe(journal.failure)}; what was done is not all recorded")
        try:
            return conclude(resolved, lab, run_dir, record, floor)
        except Exception as error:  # a full disk or an internal error: report the lab's state nevertheless
            raise not_recorded(resolved, lab, run_dir, record, error) from error
        except KeyboardInterrupt as error:
            lab_sentence = f"the lab was compared before: {record.lab_state}; {run_dir.path} has no verdict"
            ends.interrupted(error, record.faults.injector, lab_sentence, is_dirty=record.lab_state == "DIRTY")
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
    """Return for how many seconds faults and routing scheme may outlive the process of the run."""
    lease_s = longest_lease_s(resolved.faults)
    return lease_s if resolved.experiment.fabric is None else max(lease_s, routing_scheme.MAX_SCHEME_LIFETIME_S)


def _run_and_compare(
    resolved: ResolvedRun,
    lab: Lab,
    journal: Journal,
    record: RunRecord,
    progress: Progress,
    mutate: Mutation | None,
    on_flights: OnEvent,
) -> None:
    """Run the experiment, and compare the lab with its state before, whatever happens in between.

    After an error the run is judged with what was measured until then, and is an ERROR. Ctrl-C is raised again at the
    end.
    """
    work: Work | None = None
    interrupt: BaseException | None = None
    try:
        _to_known_state(lab, journal, progress)
        work = dirty.begin(lab, f"run {journal.path.parent.name}", lease_s=record.lease_s, progress=progress)
        _compare_with_emulation(resolved, lab, journal, record, progress)
        if wants_twin(resolved.experiment.expectations, control=resolved.plan.is_control):
            with (
                sealed_at_end(resolved, lab, record, "twin"),
                _routed(resolved, lab, journal, record, progress, is_twin=True) as on_route,
            ):
                _run_twin(resolved, lab, journal, record, progress, on_flights, on_route)
            _to_known_state(lab, journal, progress)
        with (
            sealed_at_end(resolved, lab, record, "measured"),
            _routed(resolved, lab, journal, record, progress) as on_route,
        ):
            _with_faults(resolved, lab, journal, record, progress, mutate, on_flights, on_route)
    except _TwinWrong as error:
        journal.note("twin_failure", error=str(error))
    except Exception as error:  # noqa: BLE001 (whatever went wrong, the lab is compared)
        trace = "" if isinstance(error, FaultbedError) else "".join(traceback.format_exception(error))
        _record_error(record, journal, ends.describe(error), trace)
    except BaseException as error:  # noqa: BLE001 (raised again below)
        interrupt = error
    # Even if all faults were over when another command intervened, it may have changed what the run measured.
    intervention = interventions.since_begin(lab.state_dir, lab.reserved)
    if intervention and not any(intervention in error for error in record.errors):
        _record_error(record, journal, intervention)
    if work is not None:
        _compare_lab(lab, work, record, interrupt, progress)
    elif interrupt is not None:
        raise interrupt
    else:
        record.lab_state, record.lab_diff = "DIRTY", ("not compared: the lab's state before the run could not be read",)
    journal.note("lab", state=record.lab_state, diff=list(record.lab_diff))


def _record_error(record: RunRecord, journal: Journal, error: str, trace: str = "") -> None:
    record.errors.append(error)
    journal.note("error", error=error, trace=trace)


def _compare_lab(lab: Lab, work: Work, record: RunRecord, interrupt: BaseException | None, progress: Progress) -> None:
    """Compare the lab with its state before the run. Raise the interrupt, if there was one, with the result."""
    progress("comparing the lab with its state before")
    leftovers = routing_scheme.not_removed(record.routing)
    if interrupt is not None:
        ends.reraise(interrupt, lab, work, record.faults.injector, leftovers)
    outcome = ends.finish(lab, work, record.faults.injector, tuple(record.faults.receipts.values()), leftovers)
    record.lab_state, record.lab_diff = outcome.state, outcome.reasons
    if outcome.state == "DIRTY":
        progress(outcome.sentence)


@contextlib.contextmanager
def _routed(
    resolved: ResolvedRun, lab: Lab, journal: Journal, record: RunRecord, progress: Progress, *, is_twin: bool = False
) -> Iterator[Callable[[Change], None]]:
    """Run the block under the experiment's routing scheme. The receipt is kept even if the scheme cannot be applied.

    Yields what handles a change that a machine's kernel reported.
    """
    fabric, record.routing = resolved.experiment.fabric, None
    if fabric is None:
        yield lambda _change: None
        return
    progress(f"applying the routing scheme {fabric.routing}")
    demands = None
    if SCHEMES[fabric.routing].is_placed and fabric.demand == "schedule":
        demands = demands_of_workload(resolved.experiment.workload, FabricModel(kind=lab.kind, topology=lab.topology))
    scheme = routing_scheme.scheme_of(lab, fabric, journal, mutate=record.mutate_routing, demands=demands)
    if not is_twin:  # a comparison with a twin under another routing proves nothing
        scheme.doubts += [f"fault-free twin: {reason}" for reason in record.twin_not_routed]
    try:
        with scheme.applied(journal):
            decisions = scheme.decisions
            progress(f"{fabric.routing}: the kernels agree in {decisions.agreed} of {decisions.queried} decisions")
            yield scheme.on_change
            if is_twin:
                scheme.check_still_applied()
            else:
                paths = [
                    path
                    for paths_of_connection in record.measured.workload.paths.values()
                    for path in paths_of_connection
                ]
                faults = fault_times(record.faults.planned, record.faults.receipts)
                span = WorkloadTime(
                    begin_ns=record.measured.workload.began_ns,
                    t0_ns=record.measured.workload.t0_ns,
                    end_ns=record.measured.workload.end_ns,
                    faults=faults,
                )
                scheme.check_end(
                    record.telemetry.before,
                    record.telemetry.after,
                    seconds=record.telemetry.counted_s,
                    paths=paths,
                    workload=span,
                )
    finally:
        record.routing = scheme.receipt()
        if is_twin:
            record.twin_not_routed = tuple(scheme.not_applied())
        record.run_dir.write_evidence("routing", "twin" if is_twin else "measured", record.routing)


def _compare_with_emulation(
    resolved: ResolvedRun, lab: Lab, journal: Journal, record: RunRecord, progress: Progress
) -> None:
    """Determine the emulation's capacity if a soft lab's links have rates. If that fails, it stays unknown."""
    experiment = resolved.experiment
    offered_bps = emulation_limit.offered_load_bps(experiment.workload, lab.inventory_model, experiment.bystander)
    record.emulation = EmulationEvidence(offered_bps=offered_bps)
    if offered_bps is None:
        return
    to_snapshot = functools.partial(_to_known_state, lab, journal, progress)
    try:
        with journal.doing("emulation", offered_bps=offered_bps):
            capacity = emulation_limit.capacity_of(lab, offered_bps, to_snapshot, progress)
        record.emulation = EmulationEvidence(offered_bps=offered_bps, carried_bps=capacity.carried_bps)
    except emulation_limit.NotMeasured as error:
        progress(str(error))


def _guard_of(lab: Lab, check_reservation: Callable[[], None]) -> Callable[[], None]:
    """Return a guard that also raises once another command has ended the faults of the lab."""

    def guard() -> None:
        check_reservation()
        _refuse_after_intervention(lab)

    return guard


def _refuse_after_intervention(lab: Lab) -> None:
    interventions.refuse(lab.state_dir, lab.name, lab.reserved)


class _TwinWrong(LabError):
    """The fault-free twin ended with wrong data: a result of the workload, and no error of the harness."""


def _enter_parts(run: Pass, taps: contextlib.ExitStack, record: PassRecord) -> list[Active]:
    """Start every part that the experiment has, in the order of the registry. `taps` releases them."""
    entered = {part.name: taps.enter_context(part.around(run)) for part in PARTS}
    record.active |= {name: one for name, one in entered.items() if one is not None}
    return [*record.active.values()]


def _to_each(active: Sequence[Active], *others: Callable[[Change], None]) -> Callable[[Change], None]:
    """Return a callback that hands each change of a machine to every part, and to others."""

    def forward(change: Change) -> None:
        for handle in (*others, *(part.on_change for part in active)):
            handle(change)

    return forward


def _run_twin(
    resolved: ResolvedRun,
    lab: Lab,
    journal: Journal,
    record: RunRecord,
    progress: Progress,
    on_flights: OnEvent,
    on_route: Callable[[Change], None],
) -> None:
    """Run the same workload without faults.

    Raises:
        LabError: it failed or was restarted, so that there is nothing to compare with.
    """
    work = record.twin.workload
    progress("fault-free twin: the same workload from the same snapshot")
    # With the same parts as the run itself: otherwise their ratio would include the cost of these parts.
    with (
        journal.doing("twin", workload=resolved.plan.workload),
        workload.engines_started_ahead(resolved.experiment, lab),
        contextlib.ExitStack() as taps,
    ):
        run = Pass(phase="twin", experiment=resolved.experiment, lab=lab, progress=lambda _text: None)
        active = _enter_parts(run, taps, record.twin)
        taps.enter_context(telemetry.start(lab, on_change=_to_each(active, on_route)))
        running = workload.start(resolved.experiment, lab, on_flights)
        work.began_ns, work.t0_ns, load = running.began_ns, running.started_ns, MachineLoad.watch()
        work.result = result = running.wait(workload.patience_s(resolved.experiment, running))
        work.load, work.end_ns = load(), running.ended_ns
        for part in reversed(active):
            part.end()
    if result.outcome == "failed" and getattr(result, "wrong_elements", 0):
        raise _TwinWrong(f"the fault-free twin: {result.where}")
    if result.outcome == "failed":
        raise LabError(f"the fault-free twin failed, so there is nothing to compare with: {result.where}")
    if restarts := getattr(result, "restarts", ()):
        reason = restarts[0].reason
        raise LabError(f"the fault-free twin was restarted, so there is nothing fault-free to compare with: {reason}")


def _to_known_state(lab: Lab, journal: Journal, progress: Progress) -> None:
    lab.guard()
    if traits_of(lab.kind).has_snapshot:
        with journal.doing("reset"):
            backend_of(lab.kind).reset(lab.inventory_model, progress, lab=lab)


def _with_faults(
    resolved: ResolvedRun,
    lab: Lab,
    journal: Journal,
    record: RunRecord,
    progress: Progress,
    mutate: Mutation | None,
    on_flights: OnEvent,
    on_route: Callable[[Change], None],
) -> None:
    """Run the workload with its faults, and record everything that is measured beside it."""
    live, seen = Live(), record.measured.workload
    record.faults.injector = Injector(lab, journal, mutate=mutate)
    with record.faults.injector as injector, contextlib.ExitStack() as taps:
        taps.enter_context(workload.engines_started_ahead(resolved.experiment, lab))
        if resolved.faults:
            progress(f"preparing {len(resolved.faults)} faults on their targets")
        ready = prepare_all(injector, resolved.faults)
        run = Pass(phase="measured", experiment=resolved.experiment, lab=lab, progress=progress)
        active = _enter_parts(run, taps, record.measured)
        following = taps.enter_context(telemetry.start(lab, on_change=_to_each(active, live.on_change, on_route)))
        live.heard_ns, live.without_log = following.heard_ns, following.without_log
        # Counted from here, because the start of all these is not part of the run: a holder takes ten seconds on an
        # emulated host.
        counted_from_s = time.monotonic()
        record.telemetry.before = counters.read(lab)
        work = resolved.experiment.workload
        online = taps.enter_context(Online(kind_of(work).rank_names(work), lab.topology, progress))
        live.slow_ranks = online.count
        on_event = flight_dump.to_each(restart_lines(progress), online.on_event, live.on_event, on_flights)
        with journal.doing("workload", workload=resolved.plan.workload):
            running = workload.start(resolved.experiment, lab, on_event)
            with running:
                seen.began_ns, seen.t0_ns, load = running.began_ns, running.started_ns, MachineLoad.watch()
                progress("workload is running")
                with journal.doing("paths"), record.telemetry.reading():
                    seen.paths = workload.paths_of(lab, running)
                injector.use_of = lambda _: use_of(lab, [running])
                if ready:
                    live.is_over, live.standstills = lambda: running.ended_ns > 0, lambda: tuple(running.standstills)
                    live.reads = lambda: [*record.telemetry.reads, *(read for fault in ready for read in fault.reads)]
                    live.needs_baseline = needs_baseline(resolved.experiment)
                    live.begin(start_ns=seen.t0_ns, fault_ns=seen.t0_ns + resolved.plan.faults[0].at_ns)
                    with StopWatcher(record.stops, live, lab.guard) as watching:
                        drive_all(lab, ready, running, record, watching, progress)
                    end_early(watching, running, journal, record, progress)
                seen.result = running.wait(workload.patience_s(resolved.experiment, running))
                seen.load = load()
        seen.end_ns = running.ended_ns
        # Standstills before t0 do not count: while connections are made, an engine sometimes waits for its kernel.
        seen.standstills = tuple(standstill for standstill in running.standstills if standstill.end_ns > seen.t0_ns)
        record.telemetry.recorded = following.stop()
        for part in reversed(active):
            part.end()
        record.telemetry.after = counters.read(lab)
        record.telemetry.counted_s = time.monotonic() - counted_from_s
