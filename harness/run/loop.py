"""One experiment on one lab: known state → workload → faults → recovery → verdict → lab provably restored.

The run directory is made before the lab is touched; the plan and every intent are on disk before what they say is
done. What goes wrong in the middle ends in a verdict (ERROR, with the sentence), not in a traceback; the lab's state is
looked at in any case.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from harness.analysis import noise
from harness.experiment.stop import Guard
from harness.record import code, rundir
from harness.record.measurements import RankSeries
from harness.record.rundir import RunDir
from harness.record.workload_series import series_of
from harness.run import beside_workload, emulation_limit, ends, flight_dump, workload
from harness.run.collect_measurements import RunData
from harness.run.conclude import Finished, conclude, not_recorded
from harness.run.faults.drive_faults import drive_all, end_early, prepare_all
from harness.run.faults.live_guard import Live, Watching
from harness.run.online import Online
from harness.run.prepare.bind_to_lab import needs_baseline, wants_twin
from harness.run.prepare.resolve import Decided, decide, refusal, touched
from harness.run.restart_lines import restart_lines
from harness.run.routing import routing_scheme
from harness.run.workload_kinds import kind_of
from inject.injector import Injector, Mutation, longest_lease_s
from inject.journal import Journal
from testbed.backends.lab_backend import backend_of
from testbed.directories import lab_dir
from testbed.errors import FaultbedError, LabError
from testbed.inventory.lab_inventory import Inventory
from testbed.inventory.subset import without_hosts
from testbed.lab import Lab, open_lab
from testbed.model.lab_kind import traits_of
from testbed.observe import counters, telemetry
from testbed.observe.machine_load import MachineLoad
from testbed.tenancy import audit_log, dirty, interventions
from testbed.tenancy.dirty import Work
from testbed.tenancy.reservation import covered
from traffic.engine.running_traffic import OnEvent

__all__ = ["Decided", "Finished", "decide", "execute", "refusal", "touched"]

Progress = Callable[[str], None]


def execute(
    decided: Decided,
    inventory: Inventory,
    *,
    out: Path,
    progress: Progress,
    mutate: Mutation | None = None,
    guard: Callable[[], None] = lambda: None,
    control: bool = False,
    mutate_routing: Mutation | None = None,
) -> Finished:
    """Do what was decided, judge it, write it all down.

    Args:
        decided: from `decide`.
        inventory: the lab; a soft one must be up.
        out: folder of run directories.
        progress: called with each progress line.
        guard: called before the lab is changed and while the workload progresses; raises if the lab is not ours.
        mutate: make every fault a no-op; for the tests that prove that such a run is never a PASS.
        control: arm every fault with zero intensity, to measure what the harness itself costs (`harness.run.control`).
        mutate_routing: make the routing scheme a no-op, as `mutate` does with faults.

    Raises:
        LabError: the lab is not up, or another command has ended its faults since this process began. Anything later
            ends in the verdict.
        UsageError: the noise floor that is kept for the lab cannot be read.
        DirtyLab: it is marked DIRTY.
        Forbidden: the lab's owner does not allow one of the faults, or not as many at one time.
    """
    mutate = "noop" if control else mutate
    if reason := refusal(decided, inventory):
        subject = {"kind": "run", "target": decided.experiment.name}
        audit_log.append(lab_dir(inventory.name), "forbidden", **subject, detail=str(reason))
        raise reason
    if not traits_of(inventory.kind).has_snapshot:  # a soft lab is one snapshot: it is reset, and compared, as a whole
        other_hosts = [host for host in inventory.topology.host_by_name if host not in decided.hosts]
        inventory = without_hosts(inventory, other_hosts)
    with open_lab(inventory) as lab:
        lab.guard = _guard_of(lab, guard)
        if not traits_of(lab.kind).has_snapshot:  # a soft lab is one snapshot
            lab.ours = covered(lab.topology, touched(decided, lab.topology))
        _refuse_after_intervention(lab)
        dirty.refuse(lab.state_dir, lab.name)  # what a killed command left is found by `dirty.begin`, or reset
        conditions = noise.conditions_of(
            decided.plan, lab=lab.name, accelerator=lab.accelerator, cpus=os.cpu_count() or 0
        )
        floor = noise.load(lab.state_dir, conditions, say=progress)
        run_dir = _make_run_dir(decided, inventory, out, control=control)
        data = RunData(
            stops=Guard(decided.experiment.stops),
            lease_s=_lease_s(decided),
            is_control=control,
            mutate_routing=mutate_routing,
        )
        with Journal(run_dir.journal) as journal:
            on_flights = flight_dump.writer(run_dir.path, flight_dump.STEM, progress)
            _guarded(decided, lab, journal, data, progress, mutate, on_flights)
        if journal.failure is not None:
            data.errors.append(f"{journal.path}: {ends.describe(journal.failure)}; what was done is not all recorded")
        try:
            return conclude(decided, lab, run_dir, data, floor)
        except Exception as error:  # a full disk or an internal error: report the lab's state nevertheless
            raise not_recorded(decided, lab, run_dir, data, error) from error
        except KeyboardInterrupt as error:
            lab_sentence = f"the lab was compared before: {data.lab_state}; {run_dir.path} has no verdict"
            ends.interrupted(error, data.injector, lab_sentence, is_dirty=data.lab_state == "DIRTY")
            raise


def _make_run_dir(decided: Decided, inventory: Inventory, out: Path, *, control: bool) -> RunDir:
    """Make the run directory, with the plan and a copy of the trace that the workload replays."""
    run_dir = rundir.create(
        out,
        experiment=decided.source,
        name=decided.experiment.name,
        seed=decided.plan.seed,
        lab=str(inventory.path),
        started=datetime.now(UTC),
        without=[exclusion.host for exclusion in decided.left_out],
        control=control,
    )
    code.digest()  # read now: the source may be edited while the run goes on
    run_dir.write_plan(decided.plan)
    work = decided.experiment.workload
    kind_of(work).keep_inputs(work, decided.experiment.source, run_dir.path)
    return run_dir


def _lease_s(decided: Decided) -> float:
    """Return how long faults and routing scheme may outlive the process of the run."""
    lease_s = longest_lease_s(decided.faults)
    return lease_s if decided.experiment.fabric is None else max(lease_s, routing_scheme.MAX_SCHEME_LIFETIME_S)


def _guarded(
    decided: Decided,
    lab: Lab,
    journal: Journal,
    data: RunData,
    progress: Progress,
    mutate: Mutation | None,
    on_flights: OnEvent,
) -> None:
    """Run it, and compare the lab afterwards, whatever happens in between.

    An error becomes an error of the run, which is judged with what there is. Ctrl-C is raised again at the end.
    """
    work: Work | None = None
    interrupt: BaseException | None = None
    try:
        _to_known_state(lab, journal, progress)
        work = dirty.begin(lab, f"run {journal.path.parent.name}", lease_s=data.lease_s, progress=progress)
        _compare_with_emulation(decided, lab, journal, data, progress)
        if data.is_control or wants_twin(decided.experiment):
            with _routed(decided, lab, journal, data, progress, is_twin=True):
                data.twin, data.twin_load = _run_twin(decided, lab, journal, progress, on_flights)
            _to_known_state(lab, journal, progress)
        with _routed(decided, lab, journal, data, progress):
            _with_faults(decided, lab, journal, data, progress, mutate, on_flights)
    except Exception as error:  # noqa: BLE001 (whatever went wrong, the lab is compared)
        data.errors.append(ends.describe(error))
        trace = "" if isinstance(error, FaultbedError) else "".join(traceback.format_exception(error))
        journal.note("error", error=ends.describe(error), trace=trace)
    except BaseException as error:  # noqa: BLE001 (raised again below)
        interrupt = error
    if (intervention := interventions.since_begin(lab.state_dir, lab.ours)) and not any(
        intervention in error for error in data.errors
    ):
        # Also where all faults were over by then: what the run has measured is not its own doing alone.
        data.errors.append(intervention)
        journal.note("error", error=intervention, trace="")
    if work is None:
        if interrupt is not None:
            raise interrupt
        data.lab_state, data.lab_diff = "DIRTY", ("not compared: the lab's state before the run could not be read",)
    else:
        progress("comparing the lab with its state before")
        left = routing_scheme.not_removed(data.routing)
        if interrupt is not None:
            ends.reraise(interrupt, lab, work, data.injector, left)
        outcome = ends.finish(lab, work, data.injector, tuple(data.receipts.values()), left)
        data.lab_state, data.lab_diff = outcome.state, outcome.reasons
        if outcome.state == "DIRTY":
            progress(outcome.said)
    journal.note("lab", state=data.lab_state, diff=list(data.lab_diff))


@contextlib.contextmanager
def _routed(
    decided: Decided, lab: Lab, journal: Journal, data: RunData, progress: Progress, *, is_twin: bool = False
) -> Iterator[None]:
    """Run the block under the experiment's routing scheme, and keep its receipt, also when it cannot be applied."""
    fabric, data.routing = decided.experiment.fabric, None
    if fabric is None:
        yield
        return
    progress(f"applying the routing scheme {fabric.routing}")
    scheme = routing_scheme.scheme_of(lab, fabric, journal, mutate=data.mutate_routing)
    if not is_twin:  # a comparison with a twin that was routed otherwise proves nothing
        scheme.doubts += [f"fault-free twin: {reason}" for reason in data.twin_not_routed]
    try:
        with scheme.applied(journal):
            decisions = scheme.decisions
            progress(f"{fabric.routing}: the kernels agree in {decisions.agreed} of {decisions.asked} decisions")
            yield
            if is_twin:
                scheme.check_still_applied()
            else:
                paths = [path for paths_of_connection in data.paths.values() for path in paths_of_connection]
                scheme.check_end(data.before, data.after, seconds=data.counted_s, paths=paths)
    finally:
        data.routing = scheme.receipt()
        if is_twin:
            data.twin_not_routed = tuple(scheme.not_applied())


def _compare_with_emulation(decided: Decided, lab: Lab, journal: Journal, data: RunData, progress: Progress) -> None:
    """Find out what the emulation carries, where a soft lab's links have rates. If that fails, it stays unknown."""
    experiment = decided.experiment
    data.offered_bps = emulation_limit.sent_bps(experiment.workload, lab.inventory_model, experiment.bystander)
    if data.offered_bps is None:
        return
    again = functools.partial(_to_known_state, lab, journal, progress)
    try:
        with journal.doing("emulation", offered_bps=data.offered_bps):
            data.carried_bps = emulation_limit.carried(lab, data.offered_bps, again, progress).carried_bps
    except emulation_limit.NotMeasured as error:
        progress(str(error))


def _guard_of(lab: Lab, ours: Callable[[], None]) -> Callable[[], None]:
    """Return a guard that raises as well once another command has ended the faults of the lab."""

    def guard() -> None:
        ours()
        _refuse_after_intervention(lab)

    return guard


def _refuse_after_intervention(lab: Lab) -> None:
    interventions.refuse(lab.state_dir, lab.name, lab.ours)


def _run_twin(
    decided: Decided, lab: Lab, journal: Journal, progress: Progress, on_flights: OnEvent
) -> tuple[tuple[RankSeries, ...], MachineLoad]:
    """Run the same workload from the same snapshot, without faults; return it and how busy the controller was."""
    progress("fault-free twin: the same workload from the same snapshot")
    # Watched, captured, probed and with the bystander, as the run is: their ratio must not hold what that costs.
    with (
        journal.doing("twin", workload=decided.plan.workload),
        beside_workload.capturing(decided.experiment, lab),
        beside_workload.probing(decided.experiment, lab),
        beside_workload.bystander(decided.experiment, lab),
        telemetry.start(lab),
    ):
        running = workload.start(decided.experiment, lab, on_flights)
        load = MachineLoad.watch()
        result = running.wait(workload.patience_s(decided.experiment, running))
        busy = load()
    if result.outcome == "failed":
        raise LabError(f"the fault-free twin failed, so there is nothing to compare with: {result.where}")
    if restarts := getattr(result, "restarts", ()):
        reason = restarts[0].reason
        raise LabError(f"the fault-free twin was restarted, so there is nothing fault-free to compare with: {reason}")
    return series_of(result), busy


def _to_known_state(lab: Lab, journal: Journal, progress: Progress) -> None:
    lab.guard()
    if traits_of(lab.kind).has_snapshot:
        with journal.doing("reset"):
            backend_of(lab.kind).reset(lab.inventory_model, progress, lab=lab)


def _with_faults(
    decided: Decided,
    lab: Lab,
    journal: Journal,
    data: RunData,
    progress: Progress,
    mutate: Mutation | None,
    on_flights: OnEvent,
) -> None:
    live = Live()
    data.injector = Injector(lab, journal, mutate=mutate)
    with data.injector as injector, contextlib.ExitStack() as taps:
        capturing = taps.enter_context(beside_workload.capturing(decided.experiment, lab, progress))
        if decided.faults:
            progress(f"preparing {len(decided.faults)} faults on their targets")
        ready = prepare_all(injector, decided.faults)
        probing = taps.enter_context(beside_workload.probing(decided.experiment, lab, progress))
        beside = taps.enter_context(beside_workload.bystander(decided.experiment, lab, progress))
        following = taps.enter_context(
            telemetry.start(lab, on_change=beside_workload.forward_changes(live.on_change, probing))
        )
        live.heard_ns = following.heard_ns
        # What it costs to start all these is not what the run did: an emulated host waits ten seconds for a holder.
        counted_from_s = time.monotonic()
        data.before = counters.read(lab)
        work = decided.experiment.workload
        online = taps.enter_context(Online(kind_of(work).rank_names(work), lab.topology, progress))
        live.slow_ranks = online.count
        on_event = flight_dump.to_each(restart_lines(progress), online.on_event, live.on_event, on_flights)
        with journal.doing("workload", workload=decided.plan.workload):
            running = workload.start(decided.experiment, lab, on_event)
            with running:
                data.began_ns, data.t0_ns, load = running.began_ns, running.started_ns, MachineLoad.watch()
                progress("workload is running")
                with journal.doing("paths"), data.reading():
                    data.paths = workload.paths_of(lab, running)
                if ready:
                    live.is_over, live.standstills = lambda: running.ended_ns > 0, lambda: tuple(running.standstills)
                    live.reads = lambda: [*data.reads, *(read for fault in ready for read in fault.reads)]
                    live.needs_baseline = needs_baseline(decided.experiment)
                    live.begin(start_ns=data.t0_ns, fault_ns=data.t0_ns + decided.plan.faults[0].at_ns)
                    with Watching(data.stops, live, lab.guard) as watching:
                        drive_all(lab, ready, running, data, watching, progress)
                    end_early(watching, running, journal, data, progress)
                data.result = running.wait(workload.patience_s(decided.experiment, running))
                data.load = load()
        data.end_ns = running.ended_ns
        # Not those of connecting: that waits for the kernel now and then.
        data.standstills = tuple(standstill for standstill in running.standstills if standstill.end_ns > data.t0_ns)
        data.recorded = following.stop()
        if beside is not None:
            data.bystander = beside_workload.stop_bystander(beside)
        if probing is not None:
            probing.stop()
            data.probed = probing.collected()
        if capturing is not None:
            progress("fetching the captured packets")
            data.captured = capturing.stop()
        data.after = counters.read(lab)
        data.counted_s = time.monotonic() - counted_from_s
