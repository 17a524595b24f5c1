"""The engine against perftest between the same two RNICs, in alternation.

Only the ratio means anything on a soft lab. perftest keeps its default settings (128 outstanding requests over all QPs,
one completion in 100, infinite retries), except for MTU and GID index, which are those of the engine. The engine's
retry budget is wide (3.8 s), so a busy machine does not count as a fault. perftest ends at the first completion with an
error, and with several QPs rxe sometimes returns one (REM_INV_REQ_ERR). Such a run is repeated, and the number of
repetitions is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from faultbed.testbed.errors import CommandFailed, LabError
from faultbed.testbed.remote.remote_node import Node
from faultbed.traffic.engine.engine_client import TrafficLab, endpoint
from faultbed.traffic.engine.gid import gid_index
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.engine.task_specs import PATIENT_TIMEOUT, QpParams
from faultbed.traffic.engine.traffic_metrics import percentile
from faultbed.traffic.flows import flow_run

__all__ = ["SIZES", "Row", "against_perftest", "ib_write_bw", "ib_write_lat", "round_trips"]

SIZES = (4096, 65536, 1 << 20)
PORT = 18515
PATIENT = QpParams(timeout=PATIENT_TIMEOUT)
"""QP parameters of both programs; perftest's default timeout is 67 ms."""
TRIES = 4
"""Attempts of one run of perftest."""
PERFTEST_DEPTH, LEAST_DEPTH = 128, 8
"""Outstanding requests: perftest's default over all QPs, and the fewest on one of several QPs."""
LATENCY_BYTES, LATENCY_ITERATIONS = 64, 500
LISTEN_TIMEOUT_S = 20.0
GRACE_S = 60.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One message size. `engine_bps` and `perftest_bps` have one value for each repetition, in order.

    `perftest_failed` counts runs of perftest that ended by an error and were repeated.
    """

    message_bytes: int
    qps: int
    engine_bps: tuple[float, ...]
    perftest_bps: tuple[float, ...]
    perftest_failed: int = 0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Engine over perftest, one ratio for each repetition: its two runs follow each other."""
        return tuple(a / b for a, b in zip(self.engine_bps, self.perftest_bps, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return percentile(self.ratios, 50)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {**asdict(self), "ratios": self.ratios, "ratio": self.ratio}


def against_perftest(
    lab: TrafficLab,
    *,
    src: str,
    dst: str,
    sizes: Sequence[int] = SIZES,
    qps: int = 1,
    seconds: float = 5.0,
    repeats: int = 3,
    progress: Progress = lambda _: None,
) -> tuple[Row, ...]:
    """Measure each size `repeats` times, engine and perftest in turn; every other repetition begins with perftest.

    Raises:
        LabError: a run of the engine or of perftest failed.
    """
    ends = endpoint(lab.topology, src), endpoint(lab.topology, dst)
    rows = []
    for size in sizes:
        spec = flow_run.FlowSpec(src=src, dst=dst, message_bytes=size, qps=qps, duration_s=seconds, qp=PATIENT)
        engine_bps: list[float] = []
        perftest_bps: list[float] = []
        failed = 0
        for turn in range(repeats):
            for is_engine in (True, False) if turn % 2 == 0 else (False, True):
                if is_engine:
                    engine_bps.append(_engine(lab, spec))
                else:
                    bps, tries = _with_retries(lambda: ib_write_bw(lab, *ends, size=size, qps=qps, seconds=seconds))  # noqa: B023
                    perftest_bps.append(bps)
                    failed += tries - 1
            progress(f"{size} B: engine {engine_bps[-1] / 1e9:.3f}, ib_write_bw {perftest_bps[-1] / 1e9:.3f} Gb/s")
        rows.append(
            Row(
                message_bytes=size,
                qps=qps,
                engine_bps=tuple(engine_bps),
                perftest_bps=tuple(perftest_bps),
                perftest_failed=failed,
            )
        )
    return tuple(rows)


def round_trips(lab: TrafficLab, *, src: str, dst: str, repeats: int = 3) -> tuple[float, ...]:
    """Return the median round trip of a small write over twice the one-way time of `ib_write_lat`, per repetition.

    Raises:
        LabError: a run of the engine or of perftest failed.
    """
    ends = endpoint(lab.topology, src), endpoint(lab.topology, dst)
    spec = flow_run.FlowSpec(
        src=src, dst=dst, message_bytes=LATENCY_BYTES, latency=True, depth=1, messages=LATENCY_ITERATIONS, qp=PATIENT
    )
    ratios = []
    for _ in range(repeats):
        result = flow_run.start(lab, spec).wait(GRACE_S)
        if result.outcome != "completed" or result.latency is None:
            raise LabError(f"bench: the probe ended as {result.outcome} ({result.where or result.qp_errors})")
        one_way_ns, _tries = _with_retries(lambda: ib_write_lat(lab, *ends, size=LATENCY_BYTES))
        ratios.append(result.latency.p50_ns / (2 * one_way_ns))
    return tuple(ratios)


def _with_retries(test: Callable[[], float]) -> tuple[float, int]:
    """Return the result of a perftest run, and the number of the attempt that succeeded."""
    for attempt in range(1, TRIES):
        try:
            return test(), attempt
        except CommandFailed:
            continue
    return test(), TRIES


def _engine(lab: TrafficLab, spec: flow_run.FlowSpec) -> float:
    result = flow_run.start(lab, spec).wait((spec.duration_s or 0.0) + GRACE_S)
    if result.outcome != "completed":
        raise LabError(f"bench: the flow ended as {result.outcome} ({result.where or result.qp_errors})")
    return result.goodput_bps


def ib_write_bw(lab: TrafficLab, src: Endpoint, dst: Endpoint, *, size: int, qps: int, seconds: float) -> float:
    """Return the average goodput of perftest's RDMA writes in bits/s. Its control connection uses the front end.

    Raises:
        LabError: it failed, or its output is not understood.
    """
    depth = str(max(LEAST_DEPTH, PERFTEST_DEPTH // qps))
    options = ["-q", str(qps), "-t", depth, "-D", f"{max(2, round(seconds))}", "--report_gbits"]
    output = _perftest(lab, src, dst, ["ib_write_bw", "-s", str(size), *options], limit_s=seconds + GRACE_S)
    # Columns: bytes, iterations, peak, average, rate.
    return _column(output, size, 3) * 1e9


def ib_write_lat(lab: TrafficLab, src: Endpoint, dst: Endpoint, *, size: int) -> float:
    """Return the median one-way time of perftest's RDMA write ping-pong in ns: half of a round trip.

    Raises:
        LabError: as `ib_write_bw`.
    """
    command = ["ib_write_lat", "-s", str(size), "-n", str(LATENCY_ITERATIONS)]
    output = _perftest(lab, src, dst, command, limit_s=GRACE_S)
    # Columns: bytes, iterations, t_min, t_max, t_typical (the median), all in us.
    return _column(output, size, 4) * 1e3


def _perftest(lab: TrafficLab, src: Endpoint, dst: Endpoint, command: list[str], *, limit_s: float) -> str:
    """Run both ends of a perftest program, and return the output of the active end."""
    sender, receiver = lab.node(src.host), lab.node(dst.host)

    def command_on(node: Node, place: Endpoint) -> list[str]:
        index = str(gid_index(node, place))
        # `timeout` on the node ends a server whose client never connects.
        limited = ["timeout", f"{limit_s:.0f}", *command]
        qp_timeout = ["-u", str(PATIENT.timeout)]
        return [*limited, "-d", place.rnic, "-x", index, "-m", "4096", *qp_timeout, "-p", str(PORT), "-F"]

    passive, active = command_on(receiver, dst), command_on(sender, src)
    with ThreadPoolExecutor(max_workers=1) as pool:
        listening = pool.submit(receiver.run, passive, timeout_s=limit_s + 5, check=False)
        _wait_for_listener(receiver, dst.host, command[0])
        output = sender.run([*active, lab.topology.host_by_name[dst.host].front_end_ip], timeout_s=limit_s + 5).stdout
        listening.result()
    return output


def _wait_for_listener(node: Node, host: str, program: str) -> None:
    deadline = time.monotonic() + LISTEN_TIMEOUT_S
    while time.monotonic() < deadline:
        listing = node.run(["ss", "-Hltn", f"sport = :{PORT}"], check=False).stdout
        if listing.strip():
            return
    raise CommandFailed(f"{host}: {program} does not listen on port {PORT} after {LISTEN_TIMEOUT_S:.0f} s")


def _column(output: str, size: int, column: int) -> float:
    """Return a column of the row for `size` in perftest's table."""
    for line in output.splitlines():
        fields = line.split()
        if len(fields) > column and fields[0] == str(size):
            return float(fields[column])
    raise LabError(f"no line for {size} bytes in the output of perftest: {json.dumps(output[-500:])}")
