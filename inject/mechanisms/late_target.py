"""Choose the target of a fault by what the workload uses just before the fault is armed (`used-uplink[0]`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from faultbed.testbed.errors import FaultError, UsageError
from faultbed.testbed.model.selectors import choose
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets import columns

if TYPE_CHECKING:
    from faultbed.inject.fault_plan import PlannedFault
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Topology

__all__ = ["LinksInUse", "chosen", "crossed", "unknown", "used_of", "used_on"]

_LOOK_S = 2.0
"""How long RoCEv2 packets are looked for on the candidates: a collective with compute phases pauses for a second."""

LinksInUse = Callable[["PlannedFault"], Collection[str]]
"""Returns the names of those targets of a fault's candidates that queue pairs cross now.

Raises a FaultError if the path of no queue pair is known.
"""


def unknown(planned: PlannedFault) -> Collection[str]:
    """Refuse to choose a target, because no workload is known.

    Raises:
        FaultError: always.
    """
    raise FaultError(
        f"{planned.kind} on {planned.target.text}: no path of a queue pair is known, so nothing shows which uplinks "
        "are used; start the workload before the fault, or name an uplink"
    )


def crossed(topology: Topology, names: Iterable[str], paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return those of the named ports whose link some path provably crosses, in the order of `names`."""
    known = [path for path in paths if path]
    links = {name: topology.resolve(name).link for name in names}
    return tuple(
        name for name, link in links.items() if link is not None and any(topology.crosses(path, link) for path in known)
    )


def used_of(planned: PlannedFault, topology: Topology, paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return those targets of a fault's candidates that some path crosses.

    Raises:
        FaultError: every path is unknown (empty), or there is none.
    """
    known = [path for path in paths if path]
    if not known:
        unknown(planned)
    return crossed(topology, [option.target.text for option in planned.candidates], known)


def used_on(lab: Lab, planned: PlannedFault) -> tuple[str, ...]:
    """Return those targets of a fault's candidates on which packets of queue pairs are seen now, for two seconds.

    For a fault beside a workload of another command, whose queue pairs are not known here.

    Raises:
        FaultError: the switches forward in an ASIC, where packets cannot be seen.
        LabError: a switch's machine could not capture.
    """
    ports: dict[str, str] = {}
    try:
        for option in planned.candidates:
            ports[packet_capture.port_named(lab.topology, option.target.text)[0]] = option.target.text
    except UsageError:
        unknown(planned)
    with packet_capture.start(lab, list(ports)) as capturing:
        threading.Event().wait(_LOOK_S)
        frames = capturing.stop().frames
    seen = {frames.interfaces[int(port)] for port in columns.decode(frames).port}
    return tuple(name for port, name in ports.items() if port in seen)


def chosen(planned: PlannedFault, used: Collection[str], *, where: str) -> PlannedFault:
    """Return the fault on the target that its selector and its seed choose among those in use.

    Args:
        planned: a fault with candidates.
        used: names of the targets in use; others than those of the candidates are ignored.
        where: how error messages name the fault.

    Raises:
        FaultError: no candidate is in use, or fewer than the index of the selector requires.
    """
    options = {option.target.text: option for option in planned.candidates if option.target.text in used}
    try:
        return options[choose(planned.target.text, options, seed=planned.spec.seed)]
    except UsageError as error:
        raise FaultError(f"{where}: {error}") from None
