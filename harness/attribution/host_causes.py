"""Causes that lie on hosts: reboots, stopped engines, GPUs, storage, memory and CPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from faultbed.harness.analysis.ranks.slow_ranks import slow_ranks
from faultbed.harness.attribution.stalls import culprit
from faultbed.harness.findings import Attribution
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import Deltas
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.node.gpu.xid import SYNTHETIC, event
from faultbed.testbed.observe import counters
from faultbed.testbed.observe.counters import MLX5
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.engine.run_results import Standstill

__all__ = [
    "busy",
    "gpu_errors",
    "gpu_events",
    "hung_ranks",
    "late_receives",
    "lost_rank",
    "low_memory",
    "rebooted",
    "slow",
    "storage",
]

_LONG_WAIT_RATIO = 5
"""A wait for storage is long if it exceeds this multiple of the median wait."""
_STORAGE_CONFIDENCE_MOST_RANKS, _STORAGE_CONFIDENCE_FEWER_RANKS = 0.75, 0.6
"""Confidence that storage is the cause if at least half of the ranks waited long, and if fewer did."""
_HANG_NS = 1_000_000_000
"""Minimum standstill of a hung rank. Other work on the machine can cause shorter ones."""
_HUNG_CONFIDENCE = 0.9


class _CpuWait(NamedTuple):
    """A host is busy if its programs waited for a CPU `ratio` times as long as on the other hosts, or longer.

    The excess must also be more than `share_of_run`; waits of several programs at once add up.
    """

    ratio: float
    share_of_run: float


_BUSY_HOST = (_CpuWait(ratio=1.5, share_of_run=0.3), _CpuWait(ratio=1.3, share_of_run=0.6))
"""Either condition is enough. The second one is for runs in which all hosts wait, for example with probes.

Measured on an emulated host: the process that holds a fault causes a ratio of 1.3 and a share of 0.2 by itself.
"""
_BUSY_CONFIDENCE = 0.45
_STALLED_US = 200_000
"""A host is short of memory if its programs waited this much longer for memory than those of the median host."""
_LOW_MEMORY_CONFIDENCE = 0.8
_RNR_NAKS_SENT = "send_rnr_err"
_LEAST_RNR_NAKS = 3
"""Number of RNR NAKs from which a host's receives count as late."""
_LATE_RECEIVES_CONFIDENCE = 0.85
_CLOCK_LIMITS = {"power_capped_us": "its power limit", "thermal_slowdown_us": "heat", "power_brake_us": "a power brake"}
"""Counters of a GPU's clocks (faultbed.testbed.node.gpu.nvml) and their meaning. Not yet run on hardware."""


def rebooted(run: RunEvidence) -> list[Attribution]:
    """Return hosts whose kernel counters restarted."""
    findings = []
    for host, fell in counters.restarted(run.telemetry.counters_before, run.telemetry.counters_after).items():
        if host in run.lab.topology.host_by_name:
            was, now = run.telemetry.counters_before[host], run.telemetry.counters_after[host]
            shown = ", ".join(f"{name} from {was[name]} to {now[name]}" for name in fell[:3] if name != counters.BOOT)
            evidence = (f"{host}: {f'counters restarted, as after a boot: {shown}' if shown else 'another boot id'}",)
            findings.append(
                Attribution(cause="host-reboot", place="rank", name=host, confidence=0.95, evidence=evidence)
            )
    return findings


def slow(run: RunEvidence, deltas: Deltas) -> list[Attribution]:
    """Return ranks that compute slower than the others, and a GPU that was throttled if it was the only one."""
    throttled = {
        (node, name.partition(".")[0]): count
        for node, names in deltas.items()
        for name, count in names.items()
        if name.endswith(".nr_throttled") and count
    }
    by_host = {}
    for rank in slow_ranks(run).slow:
        gpus = [gpu for node, gpu in throttled if node == rank.host]
        words = (
            f"rank {rank.rank} on {rank.host} computes about {100 * rank.slowdown:.0f} % slower than the others "
            f"since iteration {rank.since}"
        )
        throttling = (f"{rank.host}: {gpu} was throttled {throttled[rank.host, gpu]} times" for gpu in gpus)
        evidence = (words, *throttling, *_clock_limits(rank.host, deltas))
        name = f"{rank.host}:{gpus[0]}" if gpus else _only_gpu(run.lab.topology, rank.host)
        by_host[rank.host] = Attribution(
            cause="slow-rank", place="gpu", name=name, confidence=0.95 if gpus else 0.75, evidence=evidence
        )
    if len(throttled) == 1:
        ((node, gpu), count), *_ = throttled.items()
        throttle_words = f"{node}: {gpu} was throttled {count} times, no other"
        by_host.setdefault(
            node,
            Attribution(
                cause="slow-rank", place="gpu", name=f"{node}:{gpu}", confidence=0.8, evidence=(throttle_words,)
            ),
        )
    return list(by_host.values())


def _clock_limits(host: str, deltas: Deltas) -> Iterator[str]:
    """Yield what limited the clocks of a host's GPUs, by NVML.

    This is evidence, not a finding: under load, every GPU is limited a little.
    """
    for name, held_us in deltas.get(host, {}).items():
        gpu, _, reason = name.partition(".")
        if reason in _CLOCK_LIMITS and held_us > 0:
            yield f"{host}: {gpu} was held back by {_CLOCK_LIMITS[reason]} for {held_us / 1e6:.1f} s"


def gpu_errors(run: RunEvidence) -> list[Attribution]:
    """Return the errors that GPU drivers wrote to the kernel log, by GPU."""
    return [
        Attribution(
            cause="gpu-error",
            place="gpu",
            name=name,
            confidence=0.9,
            evidence=(f"{name}: " + ", ".join(f"XID {xid}, {count} times" for xid, count in sorted(counts.items())),),
        )
        for name, counts in gpu_events(run).items()
    ]


def gpu_events(run: RunEvidence, *, with_synthetic: bool = True) -> dict[str, Counter[int]]:
    """Return the XID events of a run by GPU, counted by number; without synthetic ones, only those of drivers."""
    events: dict[str, Counter[int]] = {}
    for record in run.telemetry.kernel:
        text = record.text or ""
        if (gpu_event := event(text)) is not None and (with_synthetic or SYNTHETIC not in text):
            events.setdefault(_gpu_at(run.lab.topology, record.node, gpu_event[0]), Counter())[gpu_event[1]] += 1
    return events


def _gpu_at(topology: Topology, host: str, address: str) -> str:
    """Return the GPU of a host with this PCIe address (domain, bus and device), or else the host."""
    for gpu in topology.host_by_name[host].gpus if host in topology.host_by_name else ():
        if gpu.name == address or (gpu.pcie or "").lower().startswith(address.lower()):
            return f"{host}:{gpu.name}"
    return host


def hung_ranks(run: RunEvidence, down: Sequence[Attribution]) -> list[Attribution]:
    """Return hosts whose engine stood still while the others ran.

    Time in which several engines stood still at once does not count: the machine that runs their VMs causes it. A host
    whose link was down is left out: its engine waits in the kernel for the RNIC.
    """
    cut_off = {link.b.node for link in run.lab.topology.links if any(down_link.name == link.name for down_link in down)}
    findings = []
    for host in dict.fromkeys(standstill.host for standstill in run.workload.standstills):
        if host in cut_off:
            continue
        others = [standstill for standstill in run.workload.standstills if standstill.host != host]
        own = [standstill for standstill in run.workload.standstills if standstill.host == host]
        longest_ns = max(
            _length_ns(standstill) - sum(_overlap_ns(standstill, other) for other in others) for standstill in own
        )
        if longest_ns < _HANG_NS:
            continue
        words = f"the traffic engine on {host} did not run for {longest_ns / 1e9:.1f} s, while the others did"
        findings.append(
            Attribution(cause="hung-rank", place="rank", name=host, confidence=_HUNG_CONFIDENCE, evidence=(words,))
        )
    return findings


def _length_ns(standstill: Standstill) -> int:
    return standstill.end_ns - standstill.start_ns


def _overlap_ns(standstill: Standstill, other: Standstill) -> int:
    return max(0, min(standstill.end_ns, other.end_ns) - max(standstill.start_ns, other.start_ns))


def storage(run: RunEvidence) -> list[Attribution]:
    """Return a finding about the job's storage if ranks waited for it much longer than usual while their hosts ran."""
    host = (run.workload.planned.get("storage") or {}).get("host")
    lengths_ns = [step.end_ns - step.start_ns for rank in run.workload.series for step in rank.iterations]
    if not host or not lengths_ns:
        return []
    iteration_ns = float(np.median(lengths_ns))
    evidence: list[str] = []
    waited: set[int] = set()
    for storage_use, waits in _storage_waits(run).items():
        usual_ns = float(np.median([wait_ns for _, wait_ns in waits])) if waits else 0.0
        least_ns = max(_LONG_WAIT_RATIO * usual_ns, iteration_ns / 2)
        long = {rank: wait_ns for rank, wait_ns in waits if wait_ns > least_ns}
        waited |= long.keys()
        if long:
            ranks, longest_ns = "1 rank" if len(long) == 1 else f"{len(long)} ranks", max(long.values())
            evidence.append(
                f"{ranks} waited up to {longest_ns / 1e9:.2f} s for {storage_use}, usually {usual_ns / 1e9:.2f} s"
            )
    if not waited:
        return []
    # Slow storage may also show on few ranks: a waiting rank keeps the others from requesting data.
    most_waited = len(waited) >= len(run.workload.series) / 2
    confidence = _STORAGE_CONFIDENCE_MOST_RANKS if most_waited else _STORAGE_CONFIDENCE_FEWER_RANKS
    return [
        Attribution(cause="slow-storage", place="storage", name=host, confidence=confidence, evidence=tuple(evidence))
    ]


def _storage_waits(run: RunEvidence) -> dict[str, list[tuple[int, int]]]:
    """Return every wait for storage as (rank, ns), grouped by what the rank waited for."""
    waits: dict[str, list[tuple[int, int]]] = {"the data of an iteration": [], "a checkpoint": []}
    for rank in run.workload.series:
        for step in rank.iterations:
            if step.ingest_ns:
                waited_ns = _awake_ns(run, rank.rank, step.start_ns, step.start_ns + step.ingest_ns)
                waits["the data of an iteration"].append((rank.rank, waited_ns))
            if step.checkpoint_ns:
                waited_ns = _awake_ns(run, rank.rank, step.end_ns - step.checkpoint_ns, step.end_ns)
                waits["a checkpoint"].append((rank.rank, waited_ns))
    return waits


def _awake_ns(run: RunEvidence, rank: int, start_ns: int, end_ns: int) -> int:
    """Return the part of a wait during which the engine of the waiting rank's host was running."""
    host = next((placed.host for placed in run.workload.ranks if placed.rank == rank), None)
    wait = Standstill(host="", start_ns=start_ns, end_ns=end_ns)
    return _length_ns(wait) - sum(
        _overlap_ns(wait, standstill) for standstill in run.workload.standstills if standstill.host == host
    )


def busy(run: RunEvidence, deltas: Deltas, explained: set[str]) -> list[Attribution]:
    """Return a host whose programs wait for its CPUs, unless it is in `explained`: hosts with another finding.

    The confidence is low, because a rank with more work looks the same.
    """
    waits = {
        host: sum(
            ns for name, ns in deltas.get(host, {}).items() if name.startswith("cpu") and name.endswith(".wait_us")
        )
        for host in dict.fromkeys(rank.host for rank in run.workload.ranks)
    }
    if len(waits) < 3:  # noqa: PLR2004 - with two hosts, neither is known to be the normal one
        return []
    worst = max(waits, key=lambda host: waits[host])
    usual_us = float(np.median([us for host, us in waits.items() if host != worst]))
    beyond_us, run_us = waits[worst] - usual_us, (run.workload.end_ns - run.workload.t0_ns) / 1e3
    if worst in explained or not any(
        waits[worst] >= busy_host.ratio * usual_us and beyond_us > busy_host.share_of_run * run_us
        for busy_host in _BUSY_HOST
    ):
        return []
    words = f"{worst}: programs waited {waits[worst] / 1e6:.1f} s for a CPU, on the other hosts {usual_us / 1e6:.1f} s"
    return [Attribution(cause="busy-host", place="rank", name=worst, confidence=_BUSY_CONFIDENCE, evidence=(words,))]


def late_receives(run: RunEvidence, deltas: Deltas) -> list[Attribution]:
    """Return hosts whose RNICs had no receive posted for arriving messages, which a correct program avoids."""
    names = (_RNR_NAKS_SENT, MLX5[_RNR_NAKS_SENT])
    sent = {
        host.name: sum(deltas.get(host.name, {}).get(f"{rnic.name}.{name}", 0) for rnic in host.rnics for name in names)
        for host in run.lab.topology.hosts
    }
    return [
        Attribution(
            cause="late-receives",
            place="rank",
            name=host,
            confidence=_LATE_RECEIVES_CONFIDENCE,
            evidence=(f"{host}: sent {count:,} RNR NAKs, because no receive was posted",),
        )
        for host, count in sent.items()
        if count >= _LEAST_RNR_NAKS
    ]


def low_memory(run: RunEvidence, deltas: Deltas) -> list[Attribution]:
    """Return hosts whose programs waited for memory (pressure stall information), which is rare on a healthy host."""
    stalled = {
        host: deltas.get(host, {}).get("memory.stalled_us", 0)
        for host in dict.fromkeys(rank.host for rank in run.workload.ranks)
    }
    usual_us = float(np.median(list(stalled.values()))) if stalled else 0.0
    return [
        Attribution(
            cause="low-memory",
            place="rank",
            name=host,
            confidence=_LOW_MEMORY_CONFIDENCE,
            evidence=(f"{host}: programs waited {us / 1e6:.2f} s for memory, on most hosts {usual_us / 1e6:.2f} s",),
        )
        for host, us in stalled.items()
        if us - usual_us > _STALLED_US
    ]


def _only_gpu(topology: Topology, host: str) -> str:
    gpus = topology.host_by_name[host].gpus if host in topology.host_by_name else ()
    return f"{host}:{gpus[0].name}" if len(gpus) == 1 else host


def lost_rank(run: RunEvidence, flights: Sequence[Flight]) -> list[Attribution]:
    """Return the rank whose flight recorder ends before the others."""
    root = culprit(flights, run)
    if root is None:
        return []
    host = next((rank.host for rank in run.workload.ranks if rank.rank == root.rank), f"rank {root.rank}")
    return [
        Attribution(cause="lost-rank", place="rank", name=host, confidence=root.confidence, evidence=tuple(root.words))
    ]
