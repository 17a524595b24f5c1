"""Whose fault was it: a place and a cause from what a run measured, blind to what was injected. Pure.

Every finding has a *cause* out of `findings.CAUSES`, a *place* (kind and name), whether that is the network, a
confidence, and the lines of evidence that it rests on. `attribute` removes the faults from the measurements before it
looks at them, so that it can be judged against them (`harness.attribution.confusion`).

How each is told:

    link-down      a carrier went at an end of a link; at all links of one node, it is the node
    control-plane  TCP sessions of the switches were closed without a carrier going: the switch common to all of them;
                   or routes of one switch's prefixes went elsewhere, and nothing else did
    mtu            a switch had packets that it could neither send nor fragment
    loss           gaps at receivers (out_of_seq_request), NAKs at senders (rcvd_seq_err), timers and duplicates,
                   against the signature that each link would leave (`harness.attribution.signatures`); or probes
                   that did not arrive (`harness.attribution.probe_findings`)
    silent-host    the same, of a host that hangs: timers at its peers, no gap anywhere, no packet missing in a switch
    congestion     CE marks, placed by the same signatures; or, of a run with probes, a link or switch that makes
                   round trips long (a queue, a delay, a limited rate: the same)
    slow-rank      the detector of slow ranks (`harness.analysis.ranks.slow_ranks`), or the one GPU that counted
    throttling gpu-error      a GPU's driver told the kernel's log of errors (XID events)
    lost-rank      a flight recorder ends before the others' (`harness.attribution.stalls`)
    hung-rank      the engine of one host did not run for a while in which those of the others did
    host-reboot    what a host's kernel counts from its boot on, and never takes back, stands lower than before
    late-receives  RNICs of one host told their peers that no receive was posted (RNR)
    slow-storage   ranks that did run waited for data or checkpoints much longer than they do in this run
    low-memory     programs of one host waited for memory
    busy-host      programs of one host waited for a CPU much longer than on the others, and nothing else is found there
    nothing        none of the above
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.attribution import host_causes, network_causes
from harness.attribution.probe_findings import with_probes
from harness.findings import NOTHING, Finding
from harness.record.measurements import Measurements, counter_deltas
from traffic.engine.flight_recorder import Flight
from traffic.probes.rtt import Trip

__all__ = ["attribute"]


def attribute(run: Measurements, flights: Sequence[Flight] = (), trips: Sequence[Trip] = ()) -> tuple[Finding, ...]:
    """Findings, the surest first; `NOTHING` alone when there is none.

    `trips` are its probes, of a run that had some.
    """
    blind = msgspec.structs.replace(run, faults=())
    deltas = counter_deltas(blind)
    rebooted = host_causes.rebooted(blind)
    # What such a host counts now is of its boot and of its provisioning, and of nothing before.
    deltas = {node: names for node, names in deltas.items() if node not in {one.name for one in rebooted}}
    down = network_causes.carriers(blind.topology, deltas)
    control = [] if down else network_causes.control_plane(blind.topology, deltas) or network_causes.withdrawn(blind)
    hung = host_causes.stood_still(blind, down)
    found = [*rebooted, *down, *control, *hung, *host_causes.lost_rank(blind, flights)]
    late = host_causes.late_receives(blind, deltas)
    found += network_causes.packets(blind, deltas, [*found, *late])
    found += host_causes.slow(blind, deltas)
    found += host_causes.gpu_errors(blind)
    found += late
    found += host_causes.storage(blind)
    found += host_causes.low_memory(blind, deltas)
    found += host_causes.busy(blind, deltas, {one.name.partition(":")[0] for one in found})
    found = with_probes(blind, found, trips)
    return tuple(sorted(found, key=lambda one: -one.confidence)) or (NOTHING,)
