"""Bodies of the fixtures `lab`, `traffic` and `inject`.

`faultbed.harness.pytest_plugin.hooks` declares them and imports this module at first use, because it loads the whole
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from faultbed.harness.live.use_by_workloads import use_of
from faultbed.harness.pytest_plugin import receipts
from faultbed.harness.pytest_plugin.kernel_guard import KernelGuard
from faultbed.harness.pytest_plugin.keys import FAILED, FAULTS, NOT_CLEARED, NOT_STARTED, OPENED_LAB, RUNNING
from faultbed.harness.pytest_plugin.session_lab import closing_after_error, open_session_lab
from faultbed.harness.pytest_plugin.skips import skip
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.verdict import ExitCode
from faultbed.inject.fault_plan import plan_beside
from faultbed.inject.injector import Injector, Mutation
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import Exposed, FaultSpec
from faultbed.inject.param_units import why_no_quantity
from faultbed.inject.policy import safety
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import LabError, Unsupported, UsageError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import fingerprint
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.flows import flow_run as flow_module
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.workloads import collective as collective_module
from faultbed.traffic.workloads import job as job_module
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.job import JobSpec

__all__ = ["Inject", "Traffic", "faults_on", "lab_of_test", "workloads_on"]


def lab_of_test(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Yield the lab in its baseline state, and compare it with that state after the test.

    A difference marks the lab DIRTY and fails the test. A kernel problem that a node reports fails the test as well. If
    a kernel's log cannot be read, the test is INCONCLUSIVE, which fails it.
    """
    config = request.config
    session_lab = open_session_lab(config)
    with closing_after_error(config):
        session_lab.reset_or_reject_dirty()
        before = session_lab.reset_if_needed(force=config.getoption("--faultbed-reset-each"))
    kernels = KernelGuard(session_lab.lab)
    session_lab.end_state_verified = False
    request.node.stash[OPENED_LAB] = True
    yield session_lab.lab
    with closing_after_error(config):
        try:
            differences = [*request.node.stash.get(NOT_CLEARED, ()), *fingerprint.settle(session_lab.lab, before)]
        except Exception as error:
            session_lab.mark_dirty([f"could not compare: {error or type(error).__name__}"], before)
            _record_dirty(request.node)
            raise
    session_lab.end_state_verified = True
    if request.node.stash.get(FAILED, False):
        session_lab.invalidate_baseline()
    if differences:
        session_lab.mark_dirty(differences, before)
        _record_dirty(request.node)
        message = "the lab is not in the state that it had before the test:\n" + "\n".join(differences)
        receipts.fail(request.node, pytest.fail.Exception(message, pytrace=False))
    report = kernels.report()
    if report.unhealthy:
        session_lab.invalidate_baseline()
        receipts.set_exit_code(request.node, ExitCode.ERROR)
        message = "a kernel of the lab reported a problem:\n" + "\n".join(report.unhealthy)
        receipts.fail(request.node, pytest.fail.Exception(message, pytrace=False))
    if report.unknown:
        receipts.fail_unknown_kernels(request.node, report.unknown)


def _record_dirty(item: pytest.Item) -> None:
    """Write to a test's JUnit properties that it left the lab DIRTY, or in an unknown state."""
    item.user_properties.append(("lab_state", "DIRTY"))
    receipts.set_exit_code(item, ExitCode.DIRTY)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Workload starter that the `traffic` fixture passes to a test."""

    lab: Lab
    _item: pytest.Item

    def flow(self, src: str, dst: str, **spec: Any) -> Running[Any]:
        """Start a flow (`faultbed.traffic.flows.flow_spec.FlowSpec`)."""
        return self._keep(
            f"flow {src} to {dst}", lambda: flow_module.start(self.lab, FlowSpec(src=src, dst=dst, **spec))
        )

    def collective(self, **spec: Any) -> Running[Any]:
        """Start a collective (`faultbed.traffic.workloads.collective.CollectiveSpec`)."""
        return self._keep("collective", lambda: collective_module.start(self.lab, CollectiveSpec(**spec)))

    def job(self, **spec: Any) -> Running[Any]:
        """Start a training job (`faultbed.traffic.workloads.job.JobSpec`)."""
        return self._keep("job", lambda: job_module.start(self.lab, JobSpec(**spec)))

    def _keep(self, what: str, start: Callable[[], Running[Any]]) -> Running[Any]:
        try:
            running = start()
        except BaseException as error:
            self._item.stash[NOT_STARTED].append(f"{what}: {error or type(error).__name__}")
            raise
        self._item.stash[RUNNING].append(running)
        for fault in self._item.stash.get(FAULTS, ()):
            if fault.is_on:
                fault.note_use()
        return running


def workloads_on(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Yield the workload starter; afterwards abort workloads that still run.

    A workload that failed or had wrong data fails the test, unless the test waited for it: `wait` returns the result or
    raises the error, and the test's own assertions judge them.
    """
    item = request.node
    running: list[Running[Any]] = []
    item.stash[RUNNING], item.stash[NOT_STARTED] = running, []
    yield Traffic(lab=lab, _item=item)
    try:
        # Whichever fixture a test has named last ends first: a fault must not outlive the workload for that reason.
        for fault in item.stash.get(FAULTS, ()):
            fault.clear()
    finally:
        problems = [problem for workload in running for problem in _unseen_problems(workload)]
    if problems and not item.stash.get(FAILED, False):
        receipts.set_exit_code(item, ExitCode.FAIL)
        receipts.fail(item, receipts.WorkloadFailed(problems))


def _unseen_problems(workload: Running[Any]) -> Iterator[str]:
    """End a workload, and yield what was wrong with it if the test has not waited for it."""
    was_over, failure = workload.is_over, workload.failure
    if was_over and workload.was_awaited:
        return
    if not was_over:
        workload.abort("the test is over")
    try:
        result = workload.wait(30.0)
    except LabError as error:
        yield str(error)
        return
    what = f"{workload.plan.what}, for which the test did not wait,"
    if was_over and (failure is not None or result.outcome == "failed"):
        yield f"{what} failed: {failure or result.where}"
    # A workload that the end of the test has aborted counts as failed, but its data up to then must be right.
    if wrong := getattr(result, "wrong_elements", 0):
        yield f"{what} had {wrong} wrong elements"
    if wrong := sum(flow.wrong_bytes or 0 for flow in getattr(result, "flows", ())):
        yield f"{what} had {wrong} wrong bytes"


Inject = Callable[..., PreparedFault]
"""`inject(kind, target, for_s=…, prove=True, exposed="workload", **params)` returns a prepared fault. It has `arm()`,
`wait()` and `clear()`."""

_MAX_FAULT_S = 60.0


def faults_on(lab: Lab, folder: Path, request: pytest.FixtureRequest, mutation: Mutation | None) -> Iterator[Inject]:
    """Yield a function that prepares faults; afterwards clear them, and fail the test if one is not proven.

    A fault lasts for `for_s` seconds. Without `for_s` it lasts until the test clears it, a minute at most. With
    `prove=False` its receipt need not prove it. Faults that overlap are planned together: a fault that would change a
    resource of an active fault is rejected. If the test starts workloads, each fault must have acted while one of them
    ran, by the rule of `faultbed run`: from its first effect to its planned end. It must also have acted on something
    that they used at that time, or, with `exposed="none"`, on nothing that they used. The test is skipped if the lab
    does not support a fault, or if its owner does not allow the fault.
    """
    faults: list[PreparedFault] = []
    request.node.stash[FAULTS] = faults
    waived: list[PreparedFault] = []
    with (
        Journal(folder / "journal.jsonl") as journal,
        Injector(lab, journal, mutate=mutation) as injector,
    ):
        injector.use_of = lambda _: use_of(lab, request.node.stash.get(RUNNING, []))

        def prepare(
            kind: str,
            target: str,
            *,
            for_s: float | None = None,
            prove: bool = True,
            exposed: Exposed = "workload",
            seed: int = 1,
            **params: Any,
        ) -> PreparedFault:
            if exposed not in get_args(Exposed):
                raise UsageError(f"inject: exposed: {exposed!r} is none of {', '.join(get_args(Exposed))}; write one")
            for name, value in params.items():
                if wrong := why_no_quantity(kind, name, value):
                    raise UsageError(f"inject: {name}: {wrong}")
            length_s = _MAX_FAULT_S if for_s is None else for_s
            spec = FaultSpec(kind=kind, target=target, for_s=length_s, params=params, seed=seed, exposed=exposed)
            active = injector.active()
            try:
                *before, planned = plan_beside(
                    spec, [fault.planned for fault in active], lab.topology, lab_kind=lab.kind, index=len(faults)
                )
                prepared = injector.prepare(planned, until_cleared=for_s is None)
            except (Unsupported, safety.Forbidden) as reason:
                skip(request.config, f"{lab.name}: {reason}")
            faults.append(prepared)
            waived.extend([] if prove else [prepared])
            # A counter that the new fault changes is no longer a bystander of the active faults.
            for fault, replanned in zip(active, before, strict=True):
                fault.planned = replanned
            return prepared

        yield prepare
        cleared = [prepared.clear() for prepared in faults]
    if faults:
        runs = [
            FaultRun(plan=prepared.planned.spec, receipt=receipt)
            for prepared, receipt in zip(faults, cleared, strict=True)
        ]
        ids = {receipt.id for prepared, receipt in zip(faults, cleared, strict=True) if prepared in waived}
        receipts.conclude(request.node, runs, lab.topology, waived=ids)
