"""Place the flows of a lab for a while, beside whatever other commands send: `faultbed te run`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.live.routing.routing_scheme import ActiveScheme
from faultbed.harness.run import ends
from faultbed.harness.verdict import FlowPlacements, LabState
from faultbed.inject.journal import Journal
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import telemetry
from faultbed.testbed.routing.placement_of_flows import Key
from faultbed.testbed.stopping import Deadline
from faultbed.testbed.tenancy import dirty

__all__ = ["JOURNAL", "PlacedFor", "place_flows_for"]

JOURNAL = "te.jsonl"
"""File in a lab's state folder with each placement, and each change of a switch's rules."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFor:
    """What a controller did. `doubts`: reasons to believe that the switches did not have its rules all the time."""

    placements: FlowPlacements | None
    doubts: tuple[str, ...]
    lab_state: LabState


def place_flows_for(
    lab: Lab, fabric: Fabric, demands: Mapping[Key, float], seconds: float, progress: Callable[[str], None]
) -> PlacedFor:
    """Apply the scheme of `fabric` for some seconds, and compare the lab with its state before.

    Raises:
        FaultError: a switch refuses the scheme, for example because another controller holds it.
        LabError: a machine does not answer. The lab has been compared.
        DirtyLab: such an error, and the lab is not in its state before.
        Interrupted: Ctrl-C; the message says in which state the lab is.
    """
    work = dirty.begin(lab, "te run", lease_s=routing_scheme.MAX_SCHEME_LIFETIME_S, progress=progress)
    scheme: ActiveScheme | None = None
    try:
        with Journal(lab.state_dir / JOURNAL) as journal:
            scheme = routing_scheme.scheme_of(lab, fabric, journal, demands=demands)
            with scheme.applied(journal):
                _follow(lab, scheme, seconds, progress)
                scheme.check_still_applied()
        receipt = scheme.receipt()
        outcome = ends.finish(lab, work, None, left=routing_scheme.not_removed(receipt))
    except BaseException as error:  # noqa: BLE001 (raised again, with the state of the lab)
        ends.reraise(error, lab, work, None, left=routing_scheme.not_removed(scheme.receipt()) if scheme else ())
    if outcome.state == "DIRTY":
        progress(outcome.sentence)
    return PlacedFor(placements=receipt.placements, doubts=tuple(scheme.not_applied()), lab_state=outcome.state)


def _follow(lab: Lab, scheme: ActiveScheme, seconds: float, progress: Callable[[str], None]) -> None:
    """Report each placement until the time is over."""
    shown, deadline = 0, Deadline(seconds)
    with telemetry.start(lab, lab.topology.switch_by_name, on_change=scheme.on_change):
        while True:
            is_last, record = deadline.is_over, scheme.receipt().placements
            for placement in record.placements[shown:] if record is not None else ():
                lost = f", without {', '.join(placement.failed)}" if placement.failed else ""
                took_s = (placement.done_ns - placement.at_ns) / 1e9
                placed = f"{placement.keys} keys placed{lost}, {placement.moved} moved"
                progress(f"{placement.cause}: {placed}, {took_s:.1f} s")
                shown += 1
            if is_last:
                return
            Deadline(min(_LOOK_S, deadline.left_s)).wait(threading.Event())
