"""Attribute a run's symptoms to places and causes, from its measurements alone, blind to the injected faults. Pure.

Every finding has a *cause* from `findings.CAUSES`, a *place* (kind and name), whether that place is the network, a
confidence, and the lines of evidence for it. `attribute` removes the faults from the measurements first, so that its
findings can be scored against them (`faultbed.harness.attribution.confusion`).

How each cause is recognised:

    link-down      a carrier was lost at an end of a link; if all links of a node lost theirs, the node is named
    control-plane  TCP sessions of the switches were closed without a lost carrier: the switch common to all of them;
                   or only routes to one switch's prefixes changed
    mtu            a switch had packets that it could neither send nor fragment
    loss           gaps at receivers (out_of_seq_request), NAKs at senders (rcvd_seq_err), timers and duplicates,
                   compared with the signature of each link (`faultbed.harness.attribution.signatures`); or probes
                   that did not arrive (`faultbed.harness.attribution.probe_findings`)
    silent-host    the signature of a host that hangs: timers at its peers, no gap, no packet missing in a switch
    congestion     CE marks, located by the same signatures; or, in a run with probes, a link or switch that makes
                   round trips long (a queue, a delay, a limited rate: the same symptom)
    slow-rank      the detector of slow ranks (`faultbed.harness.analysis.ranks.slow_ranks`) named it, or one GPU alone
                   was throttled
    gpu-error      a GPU's driver wrote errors (XID events) to the kernel log
    lost-rank      a flight recorder ends before the others (`faultbed.harness.attribution.stalls`)
    hung-rank      the engine of one host did not run for at least 1 s, while the others did
    host-reboot    kernel counters of a host, which only rise between boots, are lower than before
    late-receives  RNICs of one host reported to their peers that no receive was posted (RNR)
    slow-storage   ranks on running hosts waited for data or checkpoints much longer than usual in this run
    low-memory     programs of one host waited for memory
    busy-host      programs of one host waited for a CPU much longer than on other hosts, and it has no other finding
    nothing        none of the above
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from faultbed.harness.attribution import host_causes, network_causes
from faultbed.harness.attribution.probe_findings import with_probes
from faultbed.harness.findings import NOTHING, Attribution
from faultbed.harness.record.evidence.fault_evidence import FaultsEvidence
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import counter_deltas
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.rtt import Trip

__all__ = ["attribute"]


def attribute(run: RunEvidence, flights: Sequence[Flight] = (), trips: Sequence[Trip] = ()) -> tuple[Attribution, ...]:
    """Return the findings, the most confident first; only `NOTHING` if there is none.

    `trips` are the run's probes, if it had any.
    """
    blind = replace(run, injected=FaultsEvidence())
    deltas = counter_deltas(blind.telemetry)
    rebooted = host_causes.rebooted(blind)
    # Counters of a rebooted host cover only its new boot and provisioning.
    deltas = {node: names for node, names in deltas.items() if node not in {finding.name for finding in rebooted}}
    down = network_causes.carriers(blind.lab.topology, deltas)
    control = [] if down else network_causes.control_plane(run.lab.topology, deltas) or network_causes.withdrawn(blind)
    hung = host_causes.hung_ranks(blind, down)
    findings = [*rebooted, *down, *control, *hung, *host_causes.lost_rank(blind, flights)]
    late = host_causes.late_receives(blind, deltas)
    findings += network_causes.packets(blind, deltas, [*findings, *late])
    findings += host_causes.slow(blind, deltas)
    findings += host_causes.gpu_errors(blind)
    findings += late
    findings += host_causes.storage(blind)
    findings += host_causes.low_memory(blind, deltas)
    findings += host_causes.busy(blind, deltas, {finding.name.partition(":")[0] for finding in findings})
    findings = with_probes(blind, findings, trips)
    return tuple(sorted(findings, key=lambda finding: -finding.confidence)) or (NOTHING,)
