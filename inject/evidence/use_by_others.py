"""What workloads of other programs use: RNICs with queue pairs, and links on which their packets are seen.

The path of a foreign queue pair is not known, because its UDP source port is not listed. So the links in question are
watched for two seconds instead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from faultbed.inject.evidence.exposure import default_gpu
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.testbed.errors import FaultbedError, LabError, UsageError
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets import columns
from faultbed.testbed.side_by_side import on_each

if TYPE_CHECKING:
    from faultbed.inject.fault_plan import PlannedFault
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Link, Topology

__all__ = ["use_by_others"]

_WATCH_S = 2.0
"""How long links are watched for RoCEv2 packets: a collective with compute phases pauses for a second."""
_LIST_S = 15.0
_CONNECTED = ("RTR", "RTS")
_CARRYING = ("RC", "UC", "UD", "XRC_INI", "XRC_TGT", "DRIVER")
"""All types but GSI, SMI and raw ones, which every port has for management (iproute2, rdma/res.c)."""


def use_by_others(lab: Lab, planned: PlannedFault) -> WorkloadUse | None:
    """Return what workloads use of the lab now, as far as it concerns a fault's target; None: no queue pair is ready.

    This takes two seconds if packets have to be watched, and less otherwise.
    """
    listed = dict(zip(lab.topology.host_by_name, _listed_on_all(lab), strict=True))
    unread = tuple(host for host, rnics in listed.items() if rnics is None)
    known = {f"{host.name}:{rnic.name}" for host in lab.topology.hosts for rnic in host.rnics}
    rnics = tuple(sorted(known & {f"{host}:{rnic}" for host, names in listed.items() for rnic in names or ()}))
    if not rnics and not unread:
        return None
    watched, why = _watched(lab, _links_of(planned, lab.topology))
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
            done = lab.node(host).run(["rdma", "-j", "resource", "show", "qp"], timeout_s=_LIST_S)
            return _with_queue_pairs(json.loads(done.stdout or "[]"))
        except (FaultbedError, ValueError, LookupError, TypeError, AttributeError):
            return None

    hosts = list(lab.topology.host_by_name)
    try:
        return on_each(hosts, listed, timeout_s=2 * _LIST_S)
    except LabError:
        return [None] * len(hosts)


def _with_queue_pairs(entries: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(
        str(entry["ifname"])
        for entry in entries
        if entry["type"] in _CARRYING and entry.get("state") in _CONNECTED and not _is_of_a_driver(entry)
    )


def _is_of_a_driver(entry: Mapping[str, Any]) -> bool:
    """Return whether it is a datagram queue pair of the kernel: every mlx5 port has one that is always ready."""
    return entry["type"] == "UD" and "pid" not in entry


def _links_of(planned: PlannedFault, topology: Topology) -> dict[str, Link]:
    """Return the links that must be watched, by name: uplinks that the fault is on, or may be on, or of its switch."""
    targets = [option.target for option in planned.options]
    links = [target.link for target in targets if target.link is not None]
    links += [link for target in targets if target.kind == "switch" for link in topology.links_of(target.node)]
    return {link.name: link for link in links if link.is_uplink}


def _watched(lab: Lab, links: Mapping[str, Link]) -> tuple[dict[str, bool], str]:
    """Return whether packets of queue pairs are seen on each link now; without an answer, the reason."""
    if not links:
        return {}, ""
    try:
        names = {packet_capture.port_named(lab.topology, name)[0]: name for name in links}
        with packet_capture.start(lab, list(names)) as capturing:
            threading.Event().wait(_WATCH_S)
            captured = capturing.stop()
        frames = captured.frames
        seen = {frames.interfaces[int(port)] for port in columns.decode(frames).port}
    except (LabError, UsageError) as error:
        return {}, f", and packets could not be watched: {error}"
    # Without a packet, a capture that lost some shows nothing.
    lossy = {proof.name for proof in captured.proofs if not proof.is_whole}
    return {name: port in seen for port, name in names.items() if port in seen or port not in lossy}, ""
