"""Bodies of the fixtures `lab`, `traffic` and `inject`.

`faultbed.harness.pytest_plugin.hooks` declares them and imports this module at first use, because it loads the whole
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faultbed.harness.pytest_plugin import receipts
from faultbed.harness.pytest_plugin.kernel_guard import KernelGuard
from faultbed.harness.pytest_plugin.keys import FAILED, NOT_CLEARED, OPENED_LAB, RUNNING
from faultbed.harness.pytest_plugin.session_lab import closing_after_error, open_session_lab
from faultbed.harness.pytest_plugin.skips import skip
from faultbed.harness.verdict import ExitCode
from faultbed.inject.fault_plan import FaultSpec, plan_beside
from faultbed.inject.injector import Injector, Mutation
from faultbed.inject.journal import Journal
from faultbed.inject.policy import safety
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import Unsupported
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
    _running: list[Running[Any]]

    def flow(self, src: str, dst: str, **spec: Any) -> Running[Any]:
        """Start a flow (`faultbed.traffic.flows.flow_spec.FlowSpec`)."""
        return self._keep(flow_module.start(self.lab, FlowSpec(src=src, dst=dst, **spec)))

    def collective(self, **spec: Any) -> Running[Any]:
        """Start a collective (`faultbed.traffic.workloads.collective.CollectiveSpec`)."""
        return self._keep(collective_module.start(self.lab, CollectiveSpec(**spec)))

    def job(self, **spec: Any) -> Running[Any]:
        """Start a training job (`faultbed.traffic.workloads.job.JobSpec`)."""
        return self._keep(job_module.start(self.lab, JobSpec(**spec)))

    def _keep(self, running: Running[Any]) -> Running[Any]:
        self._running.append(running)
        return running


def workloads_on(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Yield the workload starter, and abort workloads that still run after the test."""
    running: list[Running[Any]] = []
    request.node.stash[RUNNING] = running
    yield Traffic(lab=lab, _running=running)
    for workload in running:
        if not workload.is_over:
            workload.abort("the test is over")
            workload.wait(30.0)


Inject = Callable[..., PreparedFault]
"""`inject(kind, target, for_s=…, prove=True, **params)` returns a prepared fault: `arm()`, `wait()`, `clear()`."""

_MAX_FAULT_S = 60.0


def faults_on(lab: Lab, folder: Path, request: pytest.FixtureRequest, mutation: Mutation | None) -> Iterator[Inject]:
    """Yield a function that prepares faults; afterwards clear them, and fail the test if one is not proven.

    A fault lasts for `for_s` seconds. Without `for_s` it lasts until the test clears it, a minute at most. With
    `prove=False` its receipt need not prove it. Faults that overlap are planned together: a fault that would change a
    resource of an active fault is rejected. The test is skipped if the lab does not support a fault, or if its owner
    does not allow the fault.
    """
    faults: list[PreparedFault] = []
    must_prove: list[bool] = []
    with (
        Journal(folder / "journal.jsonl") as journal,
        Injector(lab, journal, mutate=mutation) as injector,
    ):

        def prepare(
            kind: str, target: str, *, for_s: float | None = None, prove: bool = True, seed: int = 1, **params: Any
        ) -> PreparedFault:
            length_s = _MAX_FAULT_S if for_s is None else for_s
            spec = FaultSpec(kind=kind, target=target, for_s=length_s, params=params, seed=seed)
            active = injector.active()
            try:
                *before, planned = plan_beside(
                    spec, [fault.planned for fault in active], lab.topology, lab_kind=lab.kind, index=len(faults)
                )
                prepared = injector.prepare(planned, until_cleared=for_s is None)
            except (Unsupported, safety.Forbidden) as reason:
                skip(request.config, f"{lab.name}: {reason}")
            faults.append(prepared)
            must_prove.append(prove)
            # A counter that the new fault changes is no longer a bystander of the active faults.
            for fault, replanned in zip(active, before, strict=True):
                fault.planned = replanned
            return prepared

        yield prepare
        cleared = [prepared.clear() for prepared in faults]
    if faults:
        receipts.conclude(request.node, list(zip(cleared, must_prove, strict=True)))
