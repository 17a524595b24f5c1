"""Independent counters beside a fault: before it, and after it until its witnesses have moved and states are back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from inject.evidence.reboots import COUNTER, Boots
from testbed.errors import CommandFailed, Unreachable
from testbed.observe import counters

if TYPE_CHECKING:
    from inject.fault_plan import PlannedFault
    from testbed.lab import Lab

__all__ = ["Witnesses", "booting"]

SETTLE_S = 15.0
"""A witness may need a BGP session to come back first, on a starved machine."""


class Witnesses:
    """Counters of one fault. `before` is what everything after is compared with."""

    def __init__(self, lab: Lab, planned: PlannedFault) -> None:
        self.before: counters.Snapshot | None = None
        self._lab = lab
        self._boots = Boots(lab, booting(planned))

    def baseline(self, planned: PlannedFault) -> None:
        """Read what everything after is compared with."""
        self.before = self._read(planned)

    def states(self, keys: Iterable[str]) -> dict[str, int | None]:
        """States as they are now, by another way than through the holder."""
        wanted = tuple(keys)
        if not wanted:
            return {}
        now = counters.read(self._lab, sorted({key.split("/", 1)[0] for key in wanted}))
        return {key: counters.value_at(now, key) for key in wanted}

    def settle(
        self, planned: PlannedFault, *, needs_witness: bool, pause: Callable[[float], None]
    ) -> tuple[counters.Snapshot, dict[str, int | None], str | None]:
        """Counters after the fault: wait until witnesses have moved and states are as before, or the deadline.

        Gives back the counters, the states, and what is wrong with these, if anything.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                after = self._read(planned)
            except (Unreachable, CommandFailed) as error:
                return {}, {}, str(error)
            deltas = counters.flat_deltas(self.before or {}, after)
            moved = (
                self.before is None
                or not needs_witness
                or all(
                    any(deltas.get(key, 0) >= witness.at_least for key in witness.any_of)
                    for witness in planned.must_move
                )
            )
            restored = {key: counters.value_at(after, key) for key, _ in planned.restored}
            wrong = [
                f"{key} is {restored[key]}, was to be {value}"
                for key, value in planned.restored
                if restored[key] != value
            ]
            if (moved and not wrong) or time.monotonic() > deadline:
                return after, restored, "; ".join(wrong) or None
            pause(0.1)

    def _read(self, planned: PlannedFault) -> counters.Snapshot:
        """Counters of the machines that decide, and how often those have booted that are to."""
        found = counters.read(self._lab, planned.reads)
        for host, boots in self._boots.read().items():
            found[host] |= boots
        return found


def booting(planned: PlannedFault) -> tuple[str, ...]:
    """Hosts of which the plan wants to know how often they have booted."""
    keys = {key for witness in planned.must_move for key in witness.any_of}
    return tuple(sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{COUNTER}")))
