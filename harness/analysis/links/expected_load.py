"""Expected load of each link between switches in a run, from schedule, placement and ECMP decisions. Pure.

Every operation of a collective moves data between two ranks according to its schedule, over their queue pairs
(`faultbed.traffic.node.ranks.segments`). The path of a queue pair is the decision of the switches' kernels for its
addresses and UDP ports (`Connection.path`). Every packet has headers, and every message or 64 packets get an ACK
(rxe_resp.c, RXE_MAX_PKT_PER_ACK). A larger measured load means retransmissions, control traffic, or another path.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.links.link_load import Direction, LinkLoad
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Connection
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.engine_client import FabricModel
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.schedules import OUT_OF_ORDER
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.ranks import writes_of

__all__ = ["ExpectedLoad", "carried", "expected_loads", "with_expected", "worst_difference"]

HEADER_BYTES = 14 + 20 + 8 + 12 + 4
"""Headers of a data packet: Ethernet, IPv4, UDP, BTH, ICRC (InfiniBand annex A17). Port counters exclude the FCS."""
WRITE_BYTES = 16 + 4
"""RETH and immediate data of a message."""
ACK_BYTES = HEADER_BYTES + 4
PACKETS_PER_ACK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """Expected bytes of links between switches, by (sending switch, receiving switch).

    If `bytes_by_direction` is empty, `why` is the reason.
    """

    bytes_by_direction: Mapping[tuple[str, str], float]
    why: str = ""


def expected_loads(run: RunEvidence, beside: Collection[str] = ()) -> ExpectedLoad:
    """Return the expected load of a collective whose operations were all counted."""
    if why := _unpredictable(run, beside):
        return _unknown(why)
    operations = timeline.finished_iterations(run.workload.series)
    if not operations:
        return _unknown("no operation was finished")
    operations += int(run.workload.planned.get("warmup") or 0)
    try:
        writes_by_pair = _writes_by_pair(run)
    except (UsageError, KeyError, TypeError, ValueError) as error:
        return _unknown(f"the schedule cannot be rebuilt from the run's measurements: {error}")
    connections: dict[tuple[str, str], list[Connection]] = {}
    for connection in run.workload.connections:
        connections.setdefault((connection.src, connection.dst), []).append(connection)
    mtu = QpParams.of({k: v for k, v in (run.workload.planned.get("qp") or {}).items() if k in QpParams.__slots__}).mtu
    bytes_by_direction: Counter[tuple[str, str]] = Counter()
    for (src, dst), writes_by_qp in writes_by_pair.items():
        if src.partition(":")[0] == dst.partition(":")[0]:
            continue
        of_pair = connections.get((src, dst), [])
        is_complete = len(of_pair) == len(writes_by_qp)
        if not is_complete or not all(connection.path and connection.ack_path for connection in of_pair):
            return _unknown(f"the path of some of the {len(writes_by_qp)} queue pairs from {src} to {dst} is unknown")
        for connection, writes in zip(of_pair, writes_by_qp, strict=True):
            carried = [_on_the_wire(size, mtu) for size in writes]
            _add(bytes_by_direction, connection.path, operations * sum(data for data, _ in carried), run.lab.topology)
            _add(bytes_by_direction, connection.ack_path, operations * sum(ack for _, ack in carried), run.lab.topology)
    return ExpectedLoad(bytes_by_direction=dict(bytes_by_direction))


def with_expected(loads: Sequence[LinkLoad], expected: ExpectedLoad) -> tuple[LinkLoad, ...]:
    """Return the loads with the expected bytes of each direction between switches."""
    if not expected.bytes_by_direction:
        return tuple(loads)

    def beside(direction: Direction) -> Direction:
        return replace(direction, expected_bytes=expected.bytes_by_direction.get((direction.src, direction.dst), 0.0))

    return tuple(
        replace(load, up=beside(load.up), down=beside(load.down)) if load.is_uplink else load for load in loads
    )


def carried(loads: Sequence[LinkLoad]) -> dict[tuple[str, str], int]:
    """Return the measured bytes of links between switches, by (sending switch, receiving switch)."""
    directions = [direction for load in loads if load.is_uplink for direction in (load.up, load.down)]
    return {
        (direction.src, direction.dst): direction.size_bytes
        for direction in directions
        if direction.size_bytes is not None
    }


def worst_difference(expected: ExpectedLoad, measured: Mapping[tuple[str, str], int]) -> tuple[float, str] | None:
    """Return the largest difference from the expected bytes, as a share of the largest load, and its place."""
    fullest = max(expected.bytes_by_direction.values(), default=0.0)
    if not fullest or not measured:
        return None
    shares = {
        direction: abs(size - expected.bytes_by_direction.get(direction, 0.0)) / fullest
        for direction, size in sorted(measured.items())
    }
    worst = max(shares, key=lambda direction: shares[direction])
    return shares[worst], f"{worst[0]} to {worst[1]}"


def _unknown(why: str) -> ExpectedLoad:
    return ExpectedLoad(bytes_by_direction={}, why=why)


def _unpredictable(run: RunEvidence, beside: Collection[str]) -> str:
    """Return why the bytes of links cannot be predicted for a run; empty if they can."""
    if "collective" not in run.workload.planned:
        return "only a collective's bytes follow from its schedule"
    if (spread := run.workload.planned.get("spread")) in OUT_OF_ORDER and int(
        run.workload.planned.get("qps_per_peer") or 1
    ) > 1:
        return f"{spread} chooses the queue pair of each segment while the job runs"
    for name in beside:
        return f"the bytes of {name} are on the links too"
    if run.workload.rebuilds or run.workload.qp_errors:
        return "queue pairs failed or were rebuilt, and may have taken other paths afterwards"
    return ""


def _writes_by_pair(run: RunEvidence) -> dict[tuple[str, str], tuple[tuple[int, ...], ...]]:
    """Return the sizes of the writes that one operation sends from one RNIC to another, on each queue pair."""
    workload = run.workload.planned
    spec = CollectiveSpec(
        collective=workload["collective"],
        algorithm=workload["algorithm"],
        dtype=workload.get("dtype") or "fp32",
        ranks=tuple(dict.fromkeys(f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks)),
        ranks_per_rnic=int(workload.get("ranks_per_rnic") or 1),
        size_bytes=int(workload["size_bytes"]),
        root=int(workload.get("root") or 0),
        skew=float(workload.get("skew") or 0.0),
        in_place=bool(workload.get("in_place")),
        qps_per_peer=int(workload.get("qps_per_peer") or 1),
        spread=workload.get("spread") or "split",
        iterations=1,
    )
    ranks, _, programs = collective.fit(FabricModel(kind=run.lab.kind, topology=run.lab.topology), spec)
    by_rnics: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {}
    for (src, dst), writes in writes_of(spec, programs).items():  # in the order of the connections
        ends = ranks[src].name, ranks[dst].name
        by_rnics[ends] = (*by_rnics.get(ends, ()), *writes)
    return by_rnics


def _on_the_wire(size: int, mtu: int) -> tuple[int, int]:
    """Return the bytes of a message's packets and of their ACKs."""
    packets = max(1, math.ceil(size / mtu))
    return size + packets * HEADER_BYTES + WRITE_BYTES, math.ceil(packets / PACKETS_PER_ACK) * ACK_BYTES


def _add(bytes_by_direction: Counter[tuple[str, str]], path: Sequence[str], size: int, topology: Topology) -> None:
    for near, far in itertools.pairwise(path):
        if near in topology.switch_by_name and far in topology.switch_by_name:
            bytes_by_direction[near, far] += size
