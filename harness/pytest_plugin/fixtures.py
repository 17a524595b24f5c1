"""The fixtures `lab`, `traffic` and `inject`: what they do once a test takes one of them.

`harness.pytest_plugin.hooks` declares them and imports this module on first use, because it loads the whole product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.pytest_plugin import receipts
from harness.pytest_plugin.kernel_guard import KernelGuard
from harness.pytest_plugin.keys import FAILED, NOT_CLEARED, RUNNING
from harness.pytest_plugin.session_lab import keeper_of, or_give_up
from harness.pytest_plugin.skips import skip
from inject.fault_plan import FaultSpec, plan_beside
from inject.injector import Injector, Mutation, Prepared
from inject.journal import Journal
from inject.policy import safety
from testbed.errors import Unsupported
from testbed.lab import Lab
from testbed.observe import fingerprint
from traffic.engine.running_traffic import Running
from traffic.flows import flow_run as flow_module
from traffic.flows.flow_run import FlowSpec
from traffic.workloads import collective as collective_module
from traffic.workloads import job as job_module
from traffic.workloads.collective import CollectiveSpec
from traffic.workloads.job import JobSpec

__all__ = ["Inject", "Traffic", "faults_on", "lab_of_test", "workloads_on"]


def lab_of_test(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Yield the lab in its known state, and compare it with that state after the test."""
    config = request.config
    keeper = keeper_of(config)
    with or_give_up(config):
        keeper.refuse_dirty()
        before = keeper.into_known_state(always=config.getoption("--faultbed-reset-each"))
    kernels = KernelGuard(keeper.lab)
    keeper.is_compared = False
    yield keeper.lab
    with or_give_up(config):
        try:
            left = [*request.node.stash.get(NOT_CLEARED, ()), *fingerprint.settle(keeper.lab, before)]
        except Exception as error:
            keeper.mark([f"could not compare: {error or type(error).__name__}"], before)
            raise
    keeper.is_compared = True
    if request.node.stash.get(FAILED, False):
        keeper.distrust()
    if left:
        keeper.mark(left, before)
        request.node.user_properties.append(("lab_state", "DIRTY"))
        said = "the lab is not as the test found it:\n" + "\n".join(left)
        receipts.fail(request.node, pytest.fail.Exception(said, pytrace=False))
    if unhealthy := kernels.found():
        keeper.distrust()
        said = "a kernel of the lab reported a problem:\n" + "\n".join(unhealthy)
        receipts.fail(request.node, pytest.fail.Exception(said, pytrace=False))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The `traffic` fixture: starts workloads, and ends those that a test leaves running."""

    lab: Lab
    _running: list[Running[Any]]

    def flow(self, src: str, dst: str, **spec: Any) -> Running[Any]:
        """Start a flow (`traffic.flows.flow_run.FlowSpec`)."""
        return self._keep(flow_module.start(self.lab, FlowSpec(src=src, dst=dst, **spec)))

    def collective(self, **spec: Any) -> Running[Any]:
        """Start a collective (`traffic.workloads.collective.CollectiveSpec`)."""
        return self._keep(collective_module.start(self.lab, CollectiveSpec(**spec)))

    def job(self, **spec: Any) -> Running[Any]:
        """Start a training job (`traffic.workloads.job.JobSpec`)."""
        return self._keep(job_module.start(self.lab, JobSpec(**spec)))

    def _keep(self, running: Running[Any]) -> Running[Any]:
        self._running.append(running)
        return running


def workloads_on(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Yield the starter of workloads, and end those that the test leaves running."""
    running: list[Running[Any]] = []
    request.node.stash[RUNNING] = running
    yield Traffic(lab=lab, _running=running)
    for one in running:
        if not one.is_over:
            one.abort("the test is over")
            one.wait(30.0)


Inject = Callable[..., Prepared]
"""`inject(kind, target, for_s=…, prove=True, **params)` gives a prepared fault: `arm()`, `wait()`, `clear()`."""

_MOST_S = 60.0


def faults_on(lab: Lab, folder: Path, request: pytest.FixtureRequest, mutation: Mutation | None) -> Iterator[Inject]:
    """Yield the maker of faults, clear what the test does not clear, and fail the test where a fault is not proven.

    A fault lasts for `for_s`, and one without lasts until the test clears it, a minute at most. With `prove=False` its
    receipt need not prove it.
    Faults that are there together are planned together: one that would change what another one changes is refused. A
    fault that this lab cannot do, or that its owner does not allow, skips the test with that reason.
    """
    made: list[Prepared] = []
    prove_of: list[bool] = []
    with (
        Journal(folder / "journal.jsonl") as journal,
        Injector(lab, journal, mutate=mutation) as injector,
    ):

        def prepare(
            kind: str, target: str, *, for_s: float | None = None, prove: bool = True, seed: int = 1, **params: Any
        ) -> Prepared:
            length_s = _MOST_S if for_s is None else for_s
            spec = FaultSpec(kind=kind, target=target, for_s=length_s, params=params, seed=seed)
            active = injector.active()
            try:
                *before, planned = plan_beside(
                    spec, [each.planned for each in active], lab.topology, lab_kind=lab.kind, index=len(made)
                )
                prepared = injector.prepare(planned, until_cleared=for_s is None)
            except (Unsupported, safety.Forbidden) as reason:
                skip(request.config, f"{lab.name}: {reason}")
            made.append(prepared)
            prove_of.append(prove)
            # What the new one moves on purpose no longer speaks against those that are there.
            for each, anew in zip(active, before, strict=True):
                each.planned = anew
            return made[-1]

        yield prepare
        cleared = [prepared.clear() for prepared in made]
    if made:
        receipts.conclude(request.node, list(zip(cleared, prove_of, strict=True)))
