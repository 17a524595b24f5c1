"""Write the receipts of a test's faults to JUnit properties, and fail the test if one is not proven."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from _pytest.outcomes import Failed

from faultbed.harness.proof import why_unproven
from faultbed.harness.pytest_plugin.keys import AT_END, FAILED, NOT_CLEARED, NOT_STARTED, PROOF_NOT_REQUIRED, RUNNING
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.verdict import ExitCode, LabState
from faultbed.inject.evidence.exposure import why_not_exposed
from faultbed.inject.evidence.firing_times import Span
from faultbed.inject.evidence.receipt import not_cleared

if TYPE_CHECKING:
    import pytest

    from faultbed.testbed.model.topology import Topology

__all__ = [
    "Unproven",
    "WorkloadFailed",
    "conclude",
    "fail",
    "fail_unknown_kernels",
    "set_exit_code",
    "without_pass",
]

EXIT_CODE = "faultbed_exit_code"
"""JUnit property: the exit code that the command line would have."""


class Unproven(Failed):
    """A fault of a test is not proven, or not cleared. `lab_state` is the state of the lab afterwards."""

    def __init__(self, reasons: Sequence[str], lab_state: LabState) -> None:
        super().__init__("\n".join(reasons), pytrace=False)
        self.lab_state = lab_state


class WorkloadFailed(Failed):
    """A workload of a test failed, or had wrong data, and the test did not wait for it."""

    lab_state: LabState = "CLEAN"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems), pytrace=False)


def fail(item: pytest.Item, error: Failed) -> None:
    """Fail a test at its end. After Ctrl-C no test can fail any more, so the summary reports the error.

    Raises:
        Failed: the session was not interrupted.
    """
    late_errors = item.config.stash.get(AT_END, None)
    if late_errors is None:
        raise error
    late_errors.append(f"{item.nodeid}: {error.msg}")


def conclude(
    item: pytest.Item, faults: Sequence[FaultRun], topology: Topology, *, waived: Collection[str] = ()
) -> None:
    """Write the receipts of a test to its JUnit properties, and fail it if one proves nothing.

    If the test has failed already, only a fault that is not cleared fails it again.

    Args:
        item: the test. If it has started traffic, or has tried to, its faults must have acted while that ran, and on
            what that used.
        faults: the faults of the test that are over.
        topology: the lab.
        waived: ids of the receipts on which nothing rests (`prove=False`).

    Raises:
        Unproven: a fault is not proven, or not cleared.
    """
    workloads, not_started = _workloads(item), item.stash.get(NOT_STARTED, [])
    no_workload = (f"no workload ran: {not_started[0]}",) if not_started and not workloads else ()
    problems: list[str] = []
    ended = [(fault.plan, fault.receipt) for fault in faults if fault.receipt is not None]
    for spec, receipt in ended:
        is_judged = bool(workloads) or spec.exposed != "workload"
        exposed = why_not_exposed(receipt, spec, topology) if is_judged else ()
        reasons = (*why_unproven(receipt, workloads=workloads), *exposed, *no_workload)
        content = {**receipt.to_json(), "unproven": list(reasons)}
        item.user_properties.append((f"receipt.{receipt.id}", json.dumps(content, default=str)))
        if receipt.id in waived:
            item.user_properties.append((f"prove.{receipt.id}", "False: nothing rests on this receipt"))
            item.config.stash.setdefault(PROOF_NOT_REQUIRED, []).append(
                f"{item.nodeid} ({receipt.kind} on {receipt.target})"
            )
        elif reasons:
            problems.append(f"{receipt.kind} on {receipt.target} is not proven: {'; '.join(reasons)}")
    uncleared = not_cleared([receipt for _, receipt in ended])
    item.stash[NOT_CLEARED] = uncleared
    otherwise = ExitCode.FAIL if item.stash.get(FAILED, False) else ExitCode.PASS
    set_exit_code(item, ExitCode.DIRTY if uncleared else ExitCode.INCONCLUSIVE if problems else otherwise)
    if uncleared or (problems and not item.stash.get(FAILED, False)):
        fail(item, Unproven([*problems, *uncleared], "DIRTY" if uncleared else "CLEAN"))


def set_exit_code(item: pytest.Item, code: ExitCode) -> None:
    """Write the exit code of a test to its JUnit properties, in place of an earlier one."""
    others = [(name, value) for name, value in item.user_properties if name != EXIT_CODE]
    item.user_properties[:] = [*others, (EXIT_CODE, int(code))]


def without_pass(properties: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return the JUnit properties of a failed test, with FAIL in place of PASS as its exit code."""
    passed = (EXIT_CODE, int(ExitCode.PASS))
    return [(EXIT_CODE, int(ExitCode.FAIL)) if item == passed else item for item in properties]


def fail_unknown_kernels(item: pytest.Item, reasons: Sequence[str]) -> None:
    """Fail a test as INCONCLUSIVE, because a kernel may have reported a problem in a log that could not be read.

    A test that has failed already keeps its result.

    Raises:
        Failed: always, unless the test has failed or the session was interrupted.
    """
    if item.stash.get(FAILED, False):
        return
    if not dict(item.user_properties).get(EXIT_CODE):
        set_exit_code(item, ExitCode.INCONCLUSIVE)
    message = "INCONCLUSIVE: it is unknown whether a kernel reported a problem:\n" + "\n".join(reasons)
    fail(item, Failed(f"{message}\nlet the login user read /dev/kmsg, or bring the machine back", pytrace=False))


def _workloads(item: pytest.Item) -> list[Span]:
    """Return when the workloads of a test ran. One that has ended may still be closing its engines, for seconds."""
    now_ns = time.monotonic_ns()
    return [(running.started_ns, running.ended_ns or now_ns) for running in item.stash.get(RUNNING, [])]
