"""What became of the planned faults: `evidence/measured/faults.json`. Times are the controller's, in nanoseconds."""

from __future__ import annotations

from collections import Counter

import msgspec

from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.model.selectors import is_chosen_later

__all__ = ["FaultRun", "FaultsEvidence"]


class FaultRun(msgspec.Struct, frozen=True, kw_only=True):
    """A planned fault and its outcome.

    Attributes:
        plan: the fault as planned.
        receipt: None: the run ended before the fault was armed.
        passed: lower and upper bound of the packets that passed the hop of a packet fault while it acted; None: the
            fault has no hop, or nothing counted them.
    """

    plan: FaultSpec
    receipt: Receipt | None
    passed: tuple[int, int] | None = None

    @property
    def target(self) -> str:
        """The name of the target; the selector of the plan if its target should have been chosen and was not."""
        is_open = self.receipt is not None and is_chosen_later(self.plan.target)
        return self.receipt.target if self.receipt is not None and is_open else self.plan.target

    @property
    def target_text(self) -> str:
        """The target for people: with the plan's selector, if it was chosen by what the workload used."""
        return self.target if self.target == self.plan.target else f"{self.target} ({self.plan.target})"


class FaultsEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The planned faults, each with its outcome."""

    faults: tuple[FaultRun, ...] = ()

    def refuse_contradictions(self) -> None:
        """Raise ValueError, with the field, if records contradict each other or a value is impossible."""
        twice = [name for name, count in Counter(fault.plan.id for fault in self.faults).items() if count > 1]
        if twice:
            raise ValueError(f"faults: {twice[0]} appears twice")
