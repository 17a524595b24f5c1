"""Independent counters of a fault, read before it, and after it until witnesses have moved and states are restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from faultbed.inject.evidence import link_quality
from faultbed.inject.evidence.reboots import COUNTER, Boots
from faultbed.testbed.errors import CommandFailed, FaultError, Unreachable
from faultbed.testbed.observe import counters

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.lab import Lab

__all__ = ["Witnesses", "rebooting_hosts"]

SETTLE_S = 15.0
"""How long to wait for a witness: it may need a BGP session to come back first, on a starved machine."""


class Witnesses:
    """The counters of one fault. `before` is the reading that later ones are compared with; None: not read yet."""

    def __init__(self, lab: Lab, planned: PlannedFault) -> None:
        self.before: counters.Snapshot | None = None
        self._lab = lab
        self._rates: link_quality.Rates = {}
        self._boots = Boots(lab, rebooting_hosts(planned))

    def baseline(self, planned: PlannedFault) -> None:
        """Read the counters that later readings are compared with, and the error rates of the fault's links.

        Raises:
            Unreachable: a machine does not answer.
            CommandFailed: a machine's counters could not be read.
            FaultError: a link's errors are not counted, so that nothing would show whether it is as before.
        """
        if planned.mechanism.quality:
            self._rates, _ = self._measure_quality(planned, time.sleep)
            if missing := link_quality.unknown(planned.mechanism.quality, self._rates):
                raise FaultError(
                    f"{planned.kind} on {planned.target.text}: {', '.join(missing)} could not be read, so that nothing "
                    "would show whether the link is as good afterwards; use a driver that counts it, or another target"
                )
        self.before = self._read(planned)

    def states(self, keys: Iterable[str]) -> dict[str, int | None]:
        """Read states (`node/name`) independently of the holder; None: there is no such state."""
        names = tuple(keys)
        if not names:
            return {}
        now = counters.read(self._lab, sorted({key.split("/", 1)[0] for key in names}))
        return {key: counters.value_at(now, key) for key in names}

    def settle(
        self, planned: PlannedFault, *, needs_witness: bool, pause: Callable[[float], None]
    ) -> tuple[counters.Snapshot, dict[str, int | None], str | None]:
        """Wait until witnesses have moved and states are restored, for at most `SETTLE_S`.

        Args:
            planned: the fault; only its own witnesses and states are waited for.
            needs_witness: whether to wait for the witnesses: a fault without hits moves none.
            pause: waits for a number of seconds.

        Returns:
            The counters, the states, and a sentence about states that are not restored, if there are any. If the
            counters cannot be read, both are empty and the sentence is that error.
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
                    for witness in planned.mechanism.must_move
                )
            )
            restored = {key: counters.value_at(after, key) for key, _ in planned.mechanism.restored}
            wrong = [
                f"{key} is {restored[key]}, must be {value}"
                for key, value in planned.mechanism.restored
                if restored[key] != value
            ]
            if (moved and not wrong) or time.monotonic() > deadline:
                if not wrong and planned.mechanism.quality:
                    wrong, rates = self._settle_quality(planned, pause)
                    restored |= {f"{key} a second": round(rate) for key, rate in rates.items()}
                return after, restored, "; ".join(wrong) or None
            pause(0.1)

    def _settle_quality(
        self, planned: PlannedFault, pause: Callable[[float], None]
    ) -> tuple[list[str], link_quality.Rates]:
        """Wait until the fault's links have as few errors as before, for at most `SETTLE_S`: links train for seconds.

        Returns:
            What is worse, in sentences, and the last rates.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            rates, error = self._measure_quality(planned, pause)
            wrong = [error] if error else list(link_quality.worse(planned.mechanism.quality, self._rates, rates))
            if not wrong or time.monotonic() > deadline:
                return wrong, rates

    def _measure_quality(
        self, planned: PlannedFault, pause: Callable[[float], None]
    ) -> tuple[link_quality.Rates, str | None]:
        """Return the rates of errors over one window, and why they could not be read."""
        nodes = sorted({port.partition("/")[0] for port in planned.mechanism.quality})
        try:
            first, began = counters.read(self._lab, nodes), time.monotonic()
            pause(link_quality.WINDOW_S)
            last = counters.read(self._lab, nodes)
        except (Unreachable, CommandFailed) as error:
            return {}, str(error)
        return link_quality.rates(planned.mechanism.quality, first, last, time.monotonic() - began), None

    def _read(self, planned: PlannedFault) -> counters.Snapshot:
        """Read the counters of `planned.reads`, and the boot counters of the hosts that the fault reboots."""
        readings = counters.read(self._lab, planned.reads)
        for host, boots in self._boots.read().items():
            readings[host] |= boots
        return readings


def rebooting_hosts(planned: PlannedFault) -> tuple[str, ...]:
    """Return the hosts that a fault reboots: those whose boot counter is one of its witnesses."""
    keys = {key for witness in planned.mechanism.must_move for key in witness.any_of}
    return tuple(sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{COUNTER}")))
