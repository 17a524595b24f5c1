"""One experiment on one lab: known state → workload → faults → recovery → verdict → lab provably restored.

The run directory is made before the lab is touched; the plan and every intent are on disk before what they say is
done. What goes wrong in the middle ends in a verdict (ERROR, with the sentence), not in a traceback; the lab's state is
looked at in any case.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from harness import judge
from harness.analysis import noise
from harness.analysis import observe as observe_module
from harness.confidence import level_for
from harness.experiment import replayed
from harness.experiment.replayed import Replay
from harness.experiment.stop import Guard, judged
from harness.experiment.workload_file import Flow
from harness.packets import evidence
from harness.record import code, rundir
from harness.record.measurements import RankSeries
from harness.record.rundir import RunDir
from harness.record.workload_series import series_of
from harness.run import background_probes, emulation_limit, ends, flight_dump, workload
from harness.run.collect_measurements import Found, measurements_of, windows
from harness.run.control import as_control
from harness.run.live_guard import Live, Watching
from harness.run.online import Online
from harness.run.prepare.bind_to_lab import needs_baseline, wants_twin
from harness.run.prepare.resolve import Decided, decide, refusal, touched
from harness.run.restart_lines import restart_lines
from harness.run.routing import routing_scheme
from harness.verdict import Check, Verdict, VerdictFile
from inject import fault_plan
from inject.evidence.receipt import Receipt as FaultReceipt
from inject.injector import Injector, Mutation, longest_lease_s
from inject.journal import Journal
from inject.prepared_fault import PreparedFault
from testbed.backends.soft import image, lifecycle, vm
from testbed.directories import lab_dir
from testbed.errors import DirtyLab, FaultbedError, LabError
from testbed.inventory.lab_inventory import Inventory
from testbed.inventory.subset import without_hosts
from testbed.lab import Lab, open_lab
from testbed.observe import counters, packet_capture, telemetry
from testbed.observe.machine_load import MachineLoad
from testbed.tenancy import audit_log, dirty, interventions
from testbed.tenancy.dirty import Work
from testbed.tenancy.reservation import covered
from traffic.engine.running_traffic import OnEvent, Running

__all__ = ["Decided", "Finished", "decide", "execute", "refusal", "touched"]

Progress = Callable[[str], None]
LEAD_S = 4.0
"""How long before a fault its target is looked at, its baseline counters are read and its holder is told the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that is over."""

    run_dir: RunDir
    verdict: VerdictFile
    report: Path


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
        progress: told what is being done.
        guard: asked before the lab is touched and while the workload comes forward; raises when the lab is not ours.
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
        what = {"kind": "run", "target": decided.experiment.name}
        audit_log.append(lab_dir(inventory.name), "forbidden", **what, detail=str(reason))
        raise reason
    if inventory.kind == "rack":  # a soft lab is one snapshot: it is reset, and compared, as a whole
        others = [host for host in inventory.topology.host_by_name if host not in decided.hosts]
        inventory = without_hosts(inventory, others)
    with open_lab(inventory) as lab:
        lab.guard = _guard_of(lab, guard)
        if lab.kind == "rack":  # a soft lab is one snapshot
            lab.ours = covered(lab.topology, touched(decided, lab.topology))
        _refuse_after_intervention(lab)
        dirty.refuse(lab.state_dir, lab.name)  # what a killed command left is found by `dirty.begin`, or reset
        floor = noise.load(lab.state_dir, decided.plan.workload)
        run_dir = rundir.create(
            out,
            experiment=decided.source,
            name=decided.experiment.name,
            seed=decided.plan.seed,
            lab=str(inventory.path),
            started=datetime.now(UTC),
            without=[one.host for one in decided.left_out],
            control=control,
        )
        code.digest()  # read now: somebody may edit it while the run goes on
        run_dir.write_plan(decided.plan)
        if isinstance(decided.experiment.workload, Replay):
            replayed.keep(decided.experiment.workload, decided.experiment.source, run_dir.path)
        lease_s = longest_lease_s(decided.faults)
        if decided.experiment.fabric is not None:
            lease_s = max(lease_s, routing_scheme.MAX_SCHEME_LIFETIME_S)
        found = Found(
            stops=Guard(decided.experiment.stops), lease_s=lease_s, is_control=control, mutate_routing=mutate_routing
        )
        with Journal(run_dir.journal) as journal:
            on_flights = flight_dump.writer(run_dir.path, flight_dump.STEM, progress)
            _guarded(decided, lab, journal, found, progress, mutate, on_flights)
        if journal.failure is not None:
            found.errors.append(f"{journal.path}: {ends.describe(journal.failure)}; what was done is not all recorded")
        try:
            return _conclude(decided, lab, run_dir, found, floor)
        except Exception as error:  # a full disk, or a defect of ours: the lab's state is told all the same
            raise _not_recorded(decided, lab, run_dir, found, error) from error
        except KeyboardInterrupt as error:
            said = f"the lab was compared before: {found.lab_state}; {run_dir.path} has no verdict"
            ends.interrupted(error, found.injector, said, is_dirty=found.lab_state == "DIRTY")
            raise


def _guarded(
    decided: Decided,
    lab: Lab,
    journal: Journal,
    found: Found,
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
        work = dirty.begin(lab, f"run {journal.path.parent.name}", lease_s=found.lease_s, progress=progress)
        _compare_with_emulation(decided, lab, journal, found, progress)
        if found.is_control or wants_twin(decided.experiment):
            with _routed(decided, lab, journal, found, progress, is_twin=True):
                found.twin, found.twin_load = _run_twin(decided, lab, journal, progress, on_flights)
            _to_known_state(lab, journal, progress)
        with _routed(decided, lab, journal, found, progress):
            _with_faults(decided, lab, journal, found, progress, mutate, on_flights)
    except Exception as error:  # noqa: BLE001 (whatever went wrong, the lab is compared)
        found.errors.append(ends.describe(error))
        trace = "" if isinstance(error, FaultbedError) else "".join(traceback.format_exception(error))
        journal.note("error", error=ends.describe(error), trace=trace)
    except BaseException as error:  # noqa: BLE001 (raised again below)
        interrupt = error
    if (said := interventions.since_begin(lab.state_dir, lab.ours)) and not any(said in one for one in found.errors):
        # Also where all faults were over by then: what the run has measured is not its own doing alone.
        found.errors.append(said)
        journal.note("error", error=said, trace="")
    if work is None:
        if interrupt is not None:
            raise interrupt
        found.lab_state, found.lab_diff = "DIRTY", ("not compared: the lab could not be looked at before the run",)
    else:
        progress("comparing the lab with what it was before")
        left = routing_scheme.not_removed(found.routing)
        if interrupt is not None:
            ends.reraise(interrupt, lab, work, found.injector, left)
        outcome = ends.finish(lab, work, found.injector, tuple(found.receipts.values()), left)
        found.lab_state, found.lab_diff = outcome.state, outcome.reasons
        if outcome.state == "DIRTY":
            progress(outcome.said)
    journal.note("lab", state=found.lab_state, diff=list(found.lab_diff))


@contextlib.contextmanager
def _routed(
    decided: Decided, lab: Lab, journal: Journal, found: Found, progress: Progress, *, is_twin: bool = False
) -> Iterator[None]:
    """Run the block under the experiment's routing scheme, and keep its receipt, also when it cannot be applied."""
    fabric, found.routing = decided.experiment.fabric, None
    if fabric is None:
        yield
        return
    progress(f"applying the routing scheme {fabric.routing}")
    scheme = routing_scheme.scheme_of(lab, fabric, journal, mutate=found.mutate_routing)
    try:
        with scheme.applied(journal):
            asked = scheme.decisions
            progress(f"{fabric.routing}: the kernels agree in {asked.agreed} of {asked.asked} decisions")
            yield
            if not is_twin:
                scheme.check_end(found.before, found.after, seconds=found.counted_s)
    finally:
        found.routing = scheme.receipt()


def _compare_with_emulation(decided: Decided, lab: Lab, journal: Journal, found: Found, progress: Progress) -> None:
    """Find out what the emulation carries, where a soft lab's links have rates. If that fails, it stays unknown."""
    if lab.kind != "soft" or not lab.inventory_model.shapes:
        return
    found.offered_bps = emulation_limit.sent_bps(decided.experiment.workload, lab.inventory_model)
    if found.offered_bps is None:
        return
    again = functools.partial(_to_known_state, lab, journal, progress)
    try:
        with journal.doing("emulation", offered_bps=found.offered_bps):
            found.carried_bps = emulation_limit.carried(lab, found.offered_bps, again, progress).carried_bps
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
    # Watched and probed as the run is: their ratio must not hold what that costs.
    with (
        journal.doing("twin", workload=decided.plan.workload),
        background_probes.probing(decided.experiment, lab),
        telemetry.start(lab),
    ):
        running = workload.start(decided.experiment, lab, on_flights)
        load = MachineLoad.watch()
        result = running.wait(workload.patience_s(decided.experiment, running))
        busy = load()
    if result.outcome == "failed":
        raise LabError(f"the fault-free twin failed, so there is nothing to compare with: {result.where}")
    return series_of(result), busy


def _to_known_state(lab: Lab, journal: Journal, progress: Progress) -> None:
    lab.guard()
    if lab.kind == "soft":
        with journal.doing("reset"):
            lifecycle.reset(lab.inventory_model, progress)
            lab.forget_connections()


def _with_faults(
    decided: Decided,
    lab: Lab,
    journal: Journal,
    found: Found,
    progress: Progress,
    mutate: Mutation | None,
    on_flights: OnEvent,
) -> None:
    ports, live = decided.experiment.capture, Live()
    found.injector = Injector(lab, journal, mutate=mutate)
    with found.injector as injector, contextlib.ExitStack() as taps:
        if ports:
            progress(f"capturing at {', '.join(ports)}")
            capturing = taps.enter_context(packet_capture.start(lab, ports))
        if decided.faults:
            progress(f"preparing {len(decided.faults)} faults on their targets")
        ready = _prepare_all(injector, decided.faults)
        probing = taps.enter_context(background_probes.probing(decided.experiment, lab, progress))
        following = taps.enter_context(telemetry.start(lab, on_change=background_probes.both(live.on_change, probing)))
        live.heard_ns = following.heard_ns
        # What it costs to start all these is not what the run did: an emulated host waits ten seconds for a holder.
        counted_from_s = time.monotonic()
        found.before = counters.read(lab)
        work = decided.experiment.workload
        online = taps.enter_context(Online(() if isinstance(work, Flow) else work.ranks, lab.topology, progress))
        live.slow_ranks = online.count
        listeners = flight_dump.both(restart_lines(progress), online.on_event)
        on_event = flight_dump.both(listeners, flight_dump.both(live.on_event, on_flights))
        with journal.doing("workload", workload=decided.plan.workload):
            running = workload.start(decided.experiment, lab, on_event)
            with running:
                found.t0_ns, load = running.started_ns, MachineLoad.watch()
                progress("workload is running")
                with journal.doing("paths"), found.reading():
                    found.paths = workload.paths_of(lab, running)
                if ready:
                    live.is_over, live.standstills = lambda: running.ended_ns > 0, lambda: tuple(running.standstills)
                    live.reads = lambda: [*found.reads, *(read for each in ready for read in each.reads)]
                    live.needs_baseline = needs_baseline(decided.experiment)
                    live.begin(start_ns=found.t0_ns, fault_ns=found.t0_ns + decided.plan.faults[0].at_ns)
                    with Watching(found.stops, live, lab.guard) as watching:
                        _drive_all(decided, lab, ready, running, found, watching, progress)
                    _end_early(watching, running, journal, found, progress)
                found.result = running.wait(workload.patience_s(decided.experiment, running))
                found.load = load()
        found.end_ns = running.ended_ns
        # Not those of connecting: that waits for the kernel now and then.
        found.standstills = tuple(one for one in running.standstills if one.end_ns > found.t0_ns)
        found.recorded = following.stop()
        if probing is not None:
            probing.stop()
            found.probed = probing.collected()
        if ports:
            progress("fetching the captured packets")
            found.captured = capturing.stop()
        found.after = counters.read(lab)
        found.counted_s = time.monotonic() - counted_from_s


def _prepare_all(injector: Injector, faults: Sequence[fault_plan.PlannedFault]) -> list[PreparedFault]:
    """Start the holders side by side: an interpreter's start under emulation takes seconds."""
    ready: dict[str, PreparedFault] = {}
    failures: list[BaseException] = []

    def one(planned: fault_plan.PlannedFault) -> None:
        try:
            ready[planned.id] = injector.prepare(planned, later=True)
        except Exception as error:  # noqa: BLE001 (raised again below, where the run can see it)
            failures.append(error)

    _all_threads([threading.Thread(target=one, args=(planned,)) for planned in faults])
    if failures:
        raise failures[0]
    return [ready[planned.id] for planned in faults]


def _end_early(watching: Watching, running: Running[Any], journal: Journal, found: Found, progress: Progress) -> None:
    """All faults are cleared: where they had to be, the workload has nothing left to show."""
    if not watching.stopped.is_set():
        return
    stops = found.stops
    if stops.held is not None:
        condition = stops.held.condition
        said = f"stopped: {condition.metric.name} was {stops.held.value:g}, bound {condition.bound:g}"
    elif stops.missing is not None:
        said = f"stopped: no more data of {stops.missing.condition.metric.name}, which a stop condition needs"
    elif stops.refused is not None:
        said = f"no fault was armed: {stops.refused}"
    else:
        said = f"stopped: {watching.error}"
        found.errors.append(str(watching.error))
    journal.note("stop", said=said)
    progress(said)
    running.stop()


def _drive_all(
    decided: Decided,
    lab: Lab,
    ready: Sequence[PreparedFault],
    running: Running[Any],
    found: Found,
    watching: Watching,
    progress: Progress,
) -> None:
    """Each fault on a thread of its own, so that faults may overlap; their errors are the run's."""

    def one(index: int, prepared: PreparedFault) -> None:
        planned = decided.plan.faults[index]
        try:
            with contextlib.suppress(FaultbedError):
                # A fault that cannot be armed has a receipt that says so: the judge's business, not an error of ours.
                at_ns = found.t0_ns + planned.at_ns
                _drive(lab, prepared, at_ns, planned.duration_ns, running, watching.stopped, progress)
        except Exception as error:  # noqa: BLE001 (the fault must not stay until the workload ends)
            found.errors.append(f"{planned.id}: {ends.describe(error)}")
        found.receipts[planned.id] = prepared.clear(keep_holder=True)
        found.reads += prepared.reads
        progress(f"{planned.kind} on {planned.target}: {_brief(found.receipts[planned.id])}")

    _all_threads([threading.Thread(target=one, args=item) for item in enumerate(ready)])


def _drive(
    lab: Lab,
    prepared: PreparedFault,
    at_ns: int,
    duration_ns: int,
    running: Running[Any],
    stopped: threading.Event,
    progress: Progress,
) -> None:
    planned = prepared.planned

    def cancel_reason() -> str | None:
        if running.is_over:
            early_s = (at_ns - running.ended_ns) / 1e9
            if early_s < 0:
                return f"it was due {-early_s:.1f} s before the workload ended, and could not be armed by then"
            return f"the workload ended {early_s:.1f} s before the fault was due"
        return "the run was stopped" if stopped.is_set() else None

    _wait_until(at_ns - int(LEAD_S * 1e9), running, stopped)
    if not (reason := cancel_reason()):
        prepared.baseline()
        lab.guard()
        reason = cancel_reason()
    if reason:
        prepared.cancel(reason)
        progress(f"{planned.kind} on {planned.target.text}: not armed, {reason}")
        return
    prepared.arm(at_ns=max(at_ns, time.monotonic_ns()), cancel_reason=cancel_reason)
    progress(f"{planned.kind} on {planned.target.text}: armed")
    _wait_until(max(at_ns, time.monotonic_ns()) + duration_ns, running, stopped)


def _wait_until(time_ns: int, running: Running[Any], stopped: threading.Event) -> None:
    """Until a controller time; returns early when all has to stop, or the workload has ended: nothing left to hurt."""
    while (left_ns := time_ns - time.monotonic_ns()) > 0:
        if running.is_over or stopped.wait(min(left_ns / 1e9, 0.2)):
            return


def _all_threads(threads: Sequence[threading.Thread]) -> None:
    """Run threads to their end. Joined in small steps, so that Ctrl-C reaches the main thread."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)


def _brief(receipt: FaultReceipt) -> str:
    cleared = "cleared and verified" if receipt.cleared.ok else f"NOT cleared: {receipt.cleared.error}"
    if not receipt.proved:
        return f"{cleared}, but not proved: {'; '.join(receipt.unproven)}"
    return f"fired {receipt.fired.count} times, seen in {receipt.fired.witness}, {cleared}"


def _conclude(decided: Decided, lab: Lab, run_dir: RunDir, found: Found, floor: noise.NoiseFloor | None) -> Finished:
    if lab.kind == "soft":
        found.errors += lifecycle.panics(lab.inventory_model)
    if found.captured is not None:
        found.packets = evidence.keep(found.captured, run_dir.path, windows(found))
        run_dir.write_packets(found.packets)
    if flights := getattr(found.result, "flights", ()):  # flows have none
        run_dir.write_flights(flights)
    measured = measurements_of(decided.plan, decided.faults, lab, found)
    run_dir.write_measurements(measured)
    run_dir.write_telemetry(found.recorded, t0_ns=found.t0_ns)
    if found.probed is not None:
        run_dir.write_probes(found.probed, t0_ns=found.t0_ns)
    run_dir.write_environment(
        rundir.describe_environment(
            qemu=vm.qemu_version() if lab.kind == "soft" else None,
            accelerator=lab.accelerator,
            guest_kernel=_guest_kernel(lab),
            left_out=decided.left_out,
            routing=decided.experiment.fabric.routing if decided.experiment.fabric else None,
        )
    )
    if floor is not None:
        run_dir.write_noise_floor(noise.encode(floor))
    level = level_for(judge.noisy_checks(decided.experiment.expectations))
    observed = observe_module.observe(measured, level=level)
    verdict = judge.judge(
        plan=decided.plan,
        expectations=decided.experiment.expectations,
        run=measured,
        observed=observed,
        floor=floor,
        flights=flights,
        trips=found.probed.trips if found.probed else (),
    )
    verdict = judged(verdict, found.stops, t0_ns=found.t0_ns)
    if found.is_control:
        verdict = as_control(verdict, observed.metrics.get("jct_ratio"))
    verdict = msgspec.structs.replace(verdict, left_out=decided.left_out)
    run_dir.write_verdict(verdict)
    # matplotlib takes a second to import, and most commands draw nothing.
    from harness.report import run_page as report  # noqa: PLC0415

    return Finished(run_dir=run_dir, verdict=verdict, report=report.render(run_dir.path))


def _not_recorded(decided: Decided, lab: Lab, run_dir: RunDir, found: Found, error: Exception) -> FaultbedError:
    """Return the error of a run that was done and could not be written down, with all that is known of it."""
    faults = found.injector.end_sentence if found.injector is not None else ""
    lab_said = f"the lab is {found.lab_state}" + "".join(f": {line}" for line in found.lab_diff[:1])
    told = "; ".join(filter(None, (*found.errors, f"the run could not be written down: {ends.describe(error)}")))
    check = Check(name="error", verdict=Verdict.ERROR, observed=None, bound=None, unit="", rule="no error", detail=told)
    verdict = VerdictFile(
        experiment=decided.plan.experiment, seed=decided.plan.seed, lab=lab.name, verdict=Verdict.ERROR,
        checks=(check,), faults=(), lab_state=found.lab_state,
    )  # fmt: skip
    with contextlib.suppress(OSError):
        run_dir.write_verdict(verdict)
    ends.show_unforeseen(error)
    kind = DirtyLab if found.lab_state == "DIRTY" else LabError
    return kind("; ".join(filter(None, (f"{run_dir.path}: {told}", faults, lab_said))))


def _guest_kernel(lab: Lab) -> str | None:
    built = image.find() if lab.kind == "soft" else None
    return built.kernel_version if built else None
