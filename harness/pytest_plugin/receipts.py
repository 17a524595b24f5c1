"""What the receipts of a test's faults come to: JUnit properties, and a failed test where a fault is not proven."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from _pytest.outcomes import Failed

from harness.proof import recorded, why_unproven
from harness.pytest_plugin.keys import AT_END, FAILED, NOT_CLEARED, NOT_REQUIRED, RUNNING
from harness.verdict import ExitCode, LabState
from inject.evidence.firing_times import Span
from inject.evidence.receipt import Receipt, not_cleared

if TYPE_CHECKING:
    import pytest

__all__ = ["Unproven", "conclude", "fail"]

EXIT_CODE = "faultbed_exit_code"
"""JUnit property: the exit code that the command line would have."""


class Unproven(Failed):
    """A test has a fault that is not proven, or not cleared. `lab_state` is that of the lab afterwards."""

    def __init__(self, reasons: Sequence[str], lab_state: LabState) -> None:
        super().__init__("\n".join(reasons), pytrace=False)
        self.lab_state = lab_state


def fail(item: pytest.Item, error: Failed) -> None:
    """Fail a test at its end; where Ctrl-C has ended the session no test takes an error: the summary reports it then.

    Raises:
        Failed: the error, as long as the session goes on.
    """
    found = item.config.stash.get(AT_END, None)
    if found is None:
        raise error
    found.append(f"{item.nodeid}: {error.msg}")


def conclude(item: pytest.Item, receipts: Sequence[tuple[Receipt, bool]]) -> None:
    """Write the receipts of a test to its JUnit properties, and fail it where one proves nothing.

    A test that has failed already is only failed again by a fault that is not cleared.

    Args:
        item: the test; what it has started of traffic is when its faults are to fire.
        receipts: each with whether it must prove its fault (`prove` of the `inject` fixture).

    Raises:
        Unproven: a fault is not proven, or not cleared.
    """
    workloads = _workloads(item)
    problems: list[str] = []
    for receipt, prove in receipts:
        reasons = why_unproven(recorded(receipt), receipt.unproven, workloads=workloads, overlap=True)
        content = {**receipt.to_json(), "unproven": list(reasons)}
        item.user_properties.append((f"receipt.{receipt.id}", json.dumps(content, default=str)))
        if not prove:
            item.user_properties.append((f"prove.{receipt.id}", "False: nothing rests on this receipt"))
            item.config.stash.setdefault(NOT_REQUIRED, []).append(f"{item.nodeid} ({receipt.kind} on {receipt.target})")
        elif reasons:
            problems.append(f"{receipt.kind} on {receipt.target} is not proven: {'; '.join(reasons)}")
    left = not_cleared([receipt for receipt, _ in receipts])
    item.stash[NOT_CLEARED] = left
    code = ExitCode.DIRTY if left else ExitCode.INCONCLUSIVE if problems else ExitCode.PASS
    item.user_properties.append((EXIT_CODE, int(code)))
    if left or (problems and not item.stash.get(FAILED, False)):
        fail(item, Unproven([*problems, *(reason for reason in left)], "DIRTY" if left else "CLEAN"))


def _workloads(item: pytest.Item) -> list[Span]:
    now_ns = time.monotonic_ns()
    return [(one.started_ns, one.ended_ns if one.is_over else now_ns) for one in item.stash.get(RUNNING, [])]
