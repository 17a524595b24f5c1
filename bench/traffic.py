"""Parts of the bench about traffic: message rate and many QPs against perftest, collectives against Open MPI, memory.

All but memory are ratios within one run. Memory is the growth of an engine's resident set during a collective, from
the end of the first minute, when all long-lived objects exist.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from bench.mpi import openmpi
from bench.rows import Row, mark, ratio
from bench.throughput import perftest
from bench.throughput.perftest import PATIENT
from bench.throughput.tcp_goodput import tcp_goodput
from faultbed.testbed.backends.soft import image
from faultbed.testbed.directories import cache_dir
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.matrix import pairs
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec

__all__ = ["measure_memory", "measure_mpi", "measure_rates", "measure_rings", "measure_spread"]

RATE_BYTES = 64
QPS = (1, 4, 16)
QPS_BYTES = 65536
LATENCY_GOAL = 1.3
RING_SIZES = (1 << 20, 1 << 22)
RING_S, RING_REPEATS, RING_GOAL = 8.0, 3, 0.85
SPREAD_SIZES, SPREAD_QPS, SPREAD_GOAL = (1 << 20, 4 << 20), 4, 0.95
SPREADS = (
    ("all-to-all", "full-mesh", "split"),
    ("all-reduce", "ring", "split"),
    ("all-reduce", "ring", "round-robin"),
)
"""An all-to-all has one message to each peer: it is cut in four either way."""
SPREAD_ITERATIONS, SPREAD_REPEATS = 15, 5
MEMORY_S = 600.0
SETTLED_S = 60.0
GROWTH_GOAL = 0.02


def measure_rates(lab: Lab, src: str, dst: str) -> Iterator[Row]:
    """Yield message rate and round trips at 64 B, and goodput of 1, 4 and 16 QPs, each over perftest's."""
    (rate,) = perftest.against_perftest(lab, src=src, dst=dst, sizes=(RATE_BYTES,))
    yield ratio(f"message rate / ib_write_bw, {RATE_BYTES} B, 1 QP", rate.ratios, 0.7)
    for qps in QPS:
        try:
            (row,) = perftest.against_perftest(lab, src=src, dst=dst, sizes=(QPS_BYTES,), qps=qps)
        except LabError as error:
            yield f"goodput / ib_write_bw, {QPS_BYTES} B, {qps} QP", "not measured", str(error)[-120:], "", ""
            continue
        failed = f" (perftest failed {row.perftest_failed} times besides)" if row.perftest_failed else ""
        yield ratio(f"goodput / ib_write_bw, {QPS_BYTES} B, {qps} QP{failed}", row.ratios, 0.95)
    trips = perftest.round_trips(lab, src=src, dst=dst)
    spread = f"{min(trips):.2f}..{max(trips):.2f}, n={len(trips)}"
    middle = statistics.median(trips)
    title = f"round trip of a write, P50 / 2 x ib_write_lat P50, {perftest.LATENCY_BYTES} B"
    yield title, f"{middle:.2f}", spread, f"<= {LATENCY_GOAL}", mark(reached=middle <= LATENCY_GOAL)


def measure_rings(lab: Lab) -> Iterator[Row]:
    """Yield the bus bandwidth of ring all-reduces over the goodput of flows around the same ring, in alternation.

    Raises:
        LabError: a flow or a collective failed, or a result was wrong.
    """
    hosts = lab.topology.hosts[:4]
    ends = tuple(f"{host.name}:{host.rnics[0].name}" for host in hosts)
    around = [
        flow_run.FlowSpec(src=src, dst=dst, duration_s=RING_S) for src, dst in pairs("permutation", ends, shift=1)
    ]
    for size in RING_SIZES:
        ratios = []
        for _ in range(RING_REPEATS):
            flows = flow_run.start_all(lab, around).wait(RING_S + 60)
            spec = CollectiveSpec(algorithm="ring", size_bytes=size, duration_s=RING_S, ranks=ends, warmup=1)
            with collective.start(lab, spec) as running:
                ring = running.wait(RING_S + 120)
            if "failed" in (flows.outcome, ring.outcome) or ring.wrong_elements:
                raise LabError(f"bench: {flows.where or ring.where or 'wrong elements in the ring'}")
            ratios.append(ring.busbw_gbytes_per_s * 8e9 / (flows.goodput_bps / len(ends)))
        title = f"busbw of ring all-reduce / goodput of flows around the ring, {size} B, {len(ends)} ranks"
        yield ratio(title, ratios, RING_GOAL)


def measure_spread(lab: Lab) -> Iterator[Row]:
    """Yield the time of a collective with one queue pair per peer over its time with several, by spread and size."""
    ends = tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4])
    with Engines.start(lab, [host.name for host in lab.topology.hosts[:4]]) as engines:
        for (kind, algorithm, spread), size in product(SPREADS, SPREAD_SIZES):
            one_qp = CollectiveSpec(
                collective=kind,
                algorithm=algorithm,
                size_bytes=size,
                iterations=SPREAD_ITERATIONS,
                warmup=2,
                ranks=ends,
                qp=PATIENT,
            )
            several_qps = replace(one_qp, qps_per_peer=SPREAD_QPS, spread=spread)
            ratios = []
            for _ in range(SPREAD_REPEATS):
                one_qp_ns, several_ns = (_time_ns(lab, spec, engines) for spec in (one_qp, several_qps))
                ratios.append(one_qp_ns / several_ns)
            title = (
                f"time of {kind} of {size} B (messages of {size // len(ends)} B, {len(ends)} ranks) "
                f"with 1 QP per peer / with {SPREAD_QPS}, {spread}"
            )
            yield ratio(title, ratios, SPREAD_GOAL)


def _time_ns(lab: Lab, spec: CollectiveSpec, engines: Engines) -> float:
    with collective.start(lab, spec, engines=engines) as running:
        result = running.wait(RING_S + 120)
    if result.outcome != "completed" or result.wrong_elements:
        raise LabError(
            f"bench: {spec.collective} over {spec.qps_per_peer} QPs ended as {result.outcome} ({result.where}), "
            f"{result.wrong_elements} wrong elements"
        )
    return result.time_ns


def measure_mpi(lab: Lab, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the time of Open MPI over the engine's, by transport, after a row about TCP over RoCE on the same links.

    A transport that does not run here has a row with the reason.
    """
    folder = cache_dir() / "open-mpi"
    folder.mkdir(parents=True, exist_ok=True)
    hosts = [host.name for host in lab.topology.hosts[:4]]
    yield _tcp_over_roce(lab, progress)
    progress("fetching Open MPI and unpacking it on the hosts")
    openmpi.install(lab, hosts, openmpi.fetch(folder, mirror=image.MIRROR, suite=image.SUITE))
    for transport in openmpi.TRANSPORTS:
        progress(f"Open MPI over {transport}, then the engine")
        try:
            rows = openmpi.against_open_mpi(lab, hosts, transport=transport, progress=progress)
        except LabError as error:
            yield f"Open MPI over {transport}", "did not run", str(error)[:160], "", ""
            continue
        for row in rows:
            title = (
                f"time of Open MPI ({transport}) / the engine, {row.collective} ({row.algorithm}) of {row.size_bytes} B"
            )
            yield title, f"{row.ratio:.2f}", row.times, ">= 1", mark(reached=row.ratio >= 1)


def _tcp_over_roce(lab: Lab, progress: Callable[[str], None]) -> Row:
    """Return a row about the goodput of TCP around a ring of the hosts, over that of RoCE around the same ring.

    The links alone can make a collective over TCP at most this much faster than one over RoCE.
    """
    progress("TCP and RoCE around the same ring, in alternation")
    ends = tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4])
    around = pairs("permutation", ends, shift=1)
    specs = [
        flow_run.FlowSpec(src=src, dst=dst, message_bytes=1 << 20, duration_s=RING_S, qp=PATIENT) for src, dst in around
    ]
    ratios = []
    for _ in range(RING_REPEATS):
        roce = flow_run.start_all(lab, specs).wait(RING_S + 60)
        if roce.outcome == "failed":
            raise LabError(f"bench: flows around the ring failed: {roce.where}")
        ratios.append(tcp_goodput(lab, around, seconds=RING_S) / roce.goodput_bps)
    spread = f"{min(ratios):.2f}..{max(ratios):.2f}, n={len(ratios)}"
    title = f"goodput of TCP / of RoCE writes around a ring of {len(ends)} hosts"
    return title, f"{statistics.median(ratios):.2f}", spread, "", ""


def measure_memory(lab: Lab, *, seconds: float = MEMORY_S) -> Iterator[Row]:
    """Yield the growth of the engines' resident sets during an all-reduce of `seconds`.

    Raises:
        LabError: the collective failed, its result was wrong, or an engine is gone.
    """
    hosts = [host.name for host in lab.topology.hosts[:4]]
    spec = CollectiveSpec(
        size_bytes=1 << 18,
        duration_s=seconds,
        ranks=tuple(f"{host}:{lab.topology.host_by_name[host].rnics[0].name}" for host in hosts),
        qp=QpParams(timeout=18),
    )
    sizes_by_host: dict[str, list[int]] = {host: [] for host in hosts}
    with (
        Engines.start(lab, hosts) as engines,
        collective.start(lab, spec, lambda _event: lab.heartbeat(), engines=engines) as running,
    ):
        began = time.monotonic()
        while not running.is_over:
            threading.Event().wait(10.0)
            if time.monotonic() - began >= min(SETTLED_S, seconds / 4) and not running.is_over:
                for host in hosts:
                    sizes_by_host[host].append(_resident_bytes(lab, host, engines.pids[host]))
        result = running.wait(120.0)
    if result.outcome != "completed" or result.wrong_elements:
        raise LabError(f"bench: the collective ended as {result.outcome} ({result.where})")
    for host, sizes in sizes_by_host.items():
        growth = max(sizes) / sizes[0] - 1
        spread = f"{sizes[0] / 2**20:.1f} -> {sizes[-1] / 2**20:.1f} MiB, {result.iterations_completed} iterations"
        goal = f"<= {GROWTH_GOAL:.0%}"
        yield (
            f"resident memory of {host}'s engine over {seconds:.0f} s",
            f"{growth:+.1%}",
            spread,
            goal,
            mark(reached=growth <= GROWTH_GOAL),
        )


def _resident_bytes(lab: Lab, host: str, pid: int | None) -> int:
    for line in lab.node(host).run(["cat", f"/proc/{pid}/status"]).stdout.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LabError(f"{host}: the engine (process {pid}) has no resident memory to read")
