"""What workloads of other programs use: RNICs with queue pairs, and links on which their packets are seen.

The path of a foreign queue pair is not known, because its UDP source port is not listed. So the links in question are
watched for two seconds instead, beside the listing. The machines' watchers do both: nothing is started for it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from faultbed.inject.evidence.exposure import default_gpu
from faultbed.inject.evidence.watched_links import WATCH_S as _WATCH_S
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.side_by_side import in_background, on_each, result_of
from faultbed.testbed.stopping import Deadline

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Link, Topology

__all__ = ["use_by_others"]

_ANSWER_S = 15.0
"""How long all machines together may take for one request. The whole takes at most four times as long."""


def use_by_others(lab: Lab, planned: PlannedFault) -> WorkloadUse | None:
    """Return what workloads use of the lab now, as far as it concerns a fault's target; None: no queue pair is ready.

    This takes two seconds if packets have to be watched, and less otherwise.
    """
    watching = in_background(lambda: _Watching(lab, _links_of(planned, lab.topology)), "watching links")
    listed = dict(zip(lab.topology.host_by_name, _listed_on_all(lab), strict=True))
    unread = tuple(host for host, rnics in listed.items() if rnics is None)
    known = {f"{host.name}:{rnic.name}" for host in lab.topology.hosts for rnic in host.rnics}
    rnics = tuple(sorted(known & {f"{host}:{rnic}" for host, names in listed.items() for rnic in names or ()}))
    is_idle = not rnics and not unread
    try:
        links = result_of(watching, Deadline(_ANSWER_S), "watching links")
        watched, why = links.end(after_s=0.0 if is_idle else _WATCH_S)
    except (LabError, UsageError) as error:
        watched, why = {}, f", and packets could not be watched: {error}"
    if is_idle:
        return None
    return WorkloadUse(
        at_ns=time.monotonic_ns(),
        rnics=rnics,
        gpus=tuple(sorted({default_gpu(rnic, lab.topology) for rnic in rnics})),
        watched=watched,
        unread=unread,
        unknown_paths=f"the paths of other programs' queue pairs are not known{why}",
    )


def _listed_on_all(lab: Lab) -> list[frozenset[str] | None]:
    """Return, for each host, its RNICs with a queue pair that can carry data; None: they could not be listed."""

    def listed(host: str) -> frozenset[str] | None:
        try:
            return frozenset(map(str, lab.request(host, {"do": "rnics_in_use"}, timeout_s=_ANSWER_S)["rnics"]))
        except (LabError, LookupError, TypeError):
            return None

    hosts = list(lab.topology.host_by_name)
    try:
        return on_each(hosts, listed, timeout_s=_ANSWER_S)
    except LabError:
        return [None] * len(hosts)


def _links_of(planned: PlannedFault, topology: Topology) -> dict[str, Link]:
    """Return the links that must be watched, by name: uplinks that the fault is on, or may be on, or of its switch."""
    targets = [option.target for option in planned.options]
    links = [target.link for target in targets if target.link is not None]
    links += [link for target in targets if target.kind == "switch" for link in topology.links_of(target.node)]
    return {link.name: link for link in links if link.is_uplink}


class _Watching:
    """Packets of queue pairs are noticed on some links, from when this is made until `end`."""

    def __init__(self, lab: Lab, links: Mapping[str, Link]) -> None:
        """Begin on every machine that carries an end of these links.

        Raises:
            UsageError: a switch does not forward in its kernel.
            LabError: a machine cannot watch.
        """
        self._lab, self._id = lab, secrets.token_hex(6)
        self._ports: dict[str, dict[str, tuple[str | None, str]]] = {}
        for name in links:
            _, port = packet_capture.port_named(lab.topology, name)
            of_machine = self._ports.setdefault(lab.carrier(port.node).name, {})
            of_machine[name] = (lab.netns(port.node), port.netdev)
        on_each(self._ports, self._begin, timeout_s=_ANSWER_S)
        self._began_s = time.monotonic()

    def _begin(self, machine: str) -> None:
        self._lab.request(machine, {"do": "tap", "id": self._id, "ports": self._ports[machine]}, timeout_s=_ANSWER_S)

    def end(self, *, after_s: float) -> tuple[dict[str, bool], str]:
        """Return whether packets were seen on each link; a link that is missing may have had some that were hidden.

        Args:
            after_s: how long links must have been watched.

        Returns:
            What was seen by link, and the reason why it is unknown of other links (empty: of none).

        Raises:
            LabError: a machine does not answer, or has lost what it has seen.
        """
        threading.Event().wait(max(0.0, self._began_s + after_s - time.monotonic()) if self._ports else 0.0)
        seen = {link: is_seen for of_machine in on_each(self._ports, self._end, timeout_s=_ANSWER_S)
                for link, is_seen in of_machine.items()}  # fmt: skip
        hidden = sorted(link for link, is_seen in seen.items() if is_seen is None)
        why = f", and packets on {', '.join(hidden)} may hide theirs in tunnels" if hidden else ""
        return {link: is_seen for link, is_seen in seen.items() if is_seen is not None}, why

    def _end(self, machine: str) -> Mapping[str, bool | None]:
        seen = self._lab.request(machine, {"do": "untap", "id": self._id}, timeout_s=_ANSWER_S)["seen"]
        if seen.keys() != self._ports[machine].keys():  # its watcher was started again meanwhile
            raise LabError(f"{machine}: its watcher ended while it watched links; run the command again")
        return {link: None if is_seen is None else bool(is_seen) for link, is_seen in seen.items()}
