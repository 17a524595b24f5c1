"""Part `faults` of the bench: how precise single lost packets, times from command to effect, and edges of flaps are.

The workload is one flow between racks, whose queue pairs survive all faults. All times include delays of this machine
and of emulated VMs, so look at their spread. Every lost packet must be exactly one gap.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rows import Row, mark
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy.overlap import NOT_OWN
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import counters
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

__all__ = ["DROPS", "ends", "measure"]

DROPS, ONSETS, FLAPS = 100, 10, 10
"""Number of single packets to drop, of faults to time, and of flaps to time."""
_DROPS_AT_ONCE = 10
"""Number of single packets that are selected at the same time."""
_FIRST_PSN_OFFSET, _PSN_DISTANCE = 2000, 300
"""Distance in PSNs from the current packet to the first selected one, and between selected ones."""
_PERIOD_S, _DUTY = 1.0, 0.3
_HIT_TIMEOUT_S = 120.0
"""Longest wait until a selected packet has passed the hop."""
SHARE, PACKETS = 0.01, 100_000
_SHARE_S = 240.0


def measure(lab: Lab, progress: Callable[[str], None], *, drops: int = DROPS) -> Iterator[Row]:
    """Yield one row for each measurement: name, median, spread, goal, and whether the goal is reached.

    `progress` receives a line now and then, because the measurements take minutes.

    Raises:
        LabError: a fault did not fire, or the flow beside the faults ended.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.jsonl") as journal,
        _background_flow(lab),
    ):
        yield _exactness(lab, journal, drops, progress)
        yield _share(lab, journal, progress)
        yield from _onsets(lab, journal)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.jsonl") as journal:
        yield _period(lab, journal)


def ends(topology: Topology) -> tuple[str, str]:
    """Return the first RNICs of the first and the last host, which are in different racks if the lab has several."""
    first, last = topology.hosts[0], topology.hosts[-1]
    return f"{first.name}:{first.rnics[0].name}", f"{last.name}:{last.rnics[0].name}"


@contextlib.contextmanager
def _background_flow(lab: Lab) -> Iterator[None]:
    """Run the flow that the faults hit, while the block runs."""
    src, dst = ends(lab.topology)
    spec = FlowSpec(
        src=src,
        dst=dst,
        message_bytes=16384,
        depth=4,
        duration_s=3600.0,
        op_deadline_s=90.0,
        stall_deadline_s=120.0,
        qp=QpParams(timeout=18, retry_cnt=6),
    )
    running = flow_run.start(lab, spec)
    try:
        yield
        if running.is_over:
            raise LabError(f"the flow beside the faults has ended: {running.failure}")
    finally:
        running.stop()
        running.wait(60.0)


def _fault(
    lab: Lab, index: int, params: Mapping[str, Any], *, kind: str = "packet.drop", for_s: float = 120.0
) -> PlannedFault:
    target = ends(lab.topology)[1] if kind == "packet.drop" else lab.topology.uplinks[0].name
    spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
    return plan(spec, lab.topology, lab_kind=lab.kind, index=index)


def _exactness(lab: Lab, journal: Journal, drops: int, progress: Callable[[str], None]) -> Row:
    """Drop `drops` single packets by PSN, several in flight at once: each must be one hit, one gap and one proof."""
    host, _, rnic = ends(lab.topology)[1].partition(":")
    hits = gaps = proved = 0
    with Injector(lab, journal) as injector:
        for begin in range(0, drops, _DROPS_AT_ONCE):
            batch = range(begin, min(begin + _DROPS_AT_ONCE, drops))
            faults = [
                _fault(
                    lab, number, {"psn": f"+{_FIRST_PSN_OFFSET + _PSN_DISTANCE * place}", "qp": "any", "opcode": "data"}
                )
                for place, number in enumerate(batch)
            ]
            ready = [injector.prepare(fault) for fault in faults]
            before = _gaps(lab, host, rnic)
            for prepared in ready:
                prepared.arm()
            receipts = [_clear_after_hit(prepared) for prepared in ready]
            gaps += _gaps(lab, host, rnic) - before
            hits += sum(receipt.fired.count for receipt in receipts)
            # Faults that are armed together move the same counter of gaps, so none has evidence of its own. Any other
            # reason for doubt counts.
            proved += sum(all(why.startswith(NOT_OWN) for why in receipt.unproven) for receipt in receipts)
            progress(f"{begin + len(batch)} of {drops} single packets: {hits} hits, {gaps} gaps, {proved} proved")
    reached = hits == gaps == proved == drops
    counts = f"{hits} hits, {gaps} gaps, {proved} proved"
    return f"{drops} single packets lost by QP and PSN", counts, "", f"{drops} of each", mark(reached=reached)


def _share(lab: Lab, journal: Journal, progress: Callable[[str], None]) -> Row:
    """Return a row that compares the share of packets hit with the packets that the seed selects."""
    with Injector(lab, journal) as injector:
        prepared = injector.prepare(_fault(lab, 0, {"share": SHARE, "opcode": "data"}, for_s=_SHARE_S))
        prepared.arm()
        deadline = time.monotonic() + _SHARE_S
        while (passed := prepared.observe().passed or 0) < PACKETS and time.monotonic() < deadline:
            progress(f"{passed:,} of {PACKETS:,} packets have passed the hop")
            threading.Event().wait(5.0)
        receipt = prepared.clear()
    hit, passed = receipt.fired.count, receipt.fired.passed or 0
    if not passed:
        raise LabError(f"a fault did not fire: {'; '.join(receipt.doubts)}")
    selection = prepared.planned.mechanism.selection
    planned = selection.selected_among(passed) if selection else 0
    counts = f"{hit:,} of {passed:,} ({hit / passed:.3%}; {planned:,} planned)"
    # The fault is cleared early, once enough packets have passed. `doubts`, unlike `unproven`, ignores that.
    reached = not receipt.doubts and passed >= PACKETS and abs(hit - planned) <= 1
    goal = f"the planned ones, of {PACKETS:,} or more"
    return f"{SHARE:.0%} of packets lost, chosen by the seed", counts, "", goal, mark(reached=reached)


def _gaps(lab: Lab, host: str, rnic: str) -> int:
    return counters.read(lab, [host])[host][f"{rnic}.out_of_seq_request"]


def _clear_after_hit(prepared: PreparedFault) -> Receipt:
    """Clear a fault once it has hit a packet, or after `_HIT_TIMEOUT_S`."""
    deadline = time.monotonic() + _HIT_TIMEOUT_S
    while not prepared.observe().count and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    return prepared.clear()


def _onsets(lab: Lab, journal: Journal) -> Iterator[Row]:
    """Yield the times from arming call to first lost packet, and from clearing call to the rule's removal."""
    onset_ms, clear_ms = [], []
    with Injector(lab, journal) as injector:
        for number in range(ONSETS):
            prepared = injector.prepare(_fault(lab, number, {"share": 0.5, "opcode": "data"}))
            prepared.baseline()
            armed_ns = time.monotonic_ns()
            prepared.arm()
            threading.Event().wait(1.0)
            cleared_ns = time.monotonic_ns()
            receipt = prepared.clear()
            if receipt.fired.first_ns is None or receipt.cleared.at_ns is None:
                raise LabError(f"a fault did not fire: {'; '.join(receipt.doubts)}")
            onset_ms.append((receipt.fired.first_ns - armed_ns) / 1e6)
            clear_ms.append((receipt.cleared.at_ns - cleared_ns) / 1e6)
    yield _row("command to the first packet lost", onset_ms, 100)
    yield _row("removal command to the readback that the rule is gone", clear_ms, 100)


def _period(lab: Lab, journal: Journal) -> Row:
    """Return a row about how late or early the flaps of one fault are. Planned times count from the first flap."""
    fault = _fault(lab, 0, {"period": _PERIOD_S, "duty": _DUTY}, kind="link.flap", for_s=FLAPS * _PERIOD_S)
    with Injector(lab, journal) as injector:
        prepared = injector.prepare(fault)
        prepared.arm()
        threading.Event().wait(fault.spec.for_s)
        receipt = prepared.clear()
    downs = [at_ns for at_ns, is_on in receipt.edges if is_on]
    if len(downs) != FLAPS or not receipt.proved:
        raise LabError(f"{len(downs)} of {FLAPS} flaps: {'; '.join(receipt.doubts)}")
    late_ms = [abs(at_ns - downs[0] - number * _PERIOD_S * 1e9) / 1e6 for number, at_ns in enumerate(downs)]
    return _row(f"{FLAPS} flaps of {_PERIOD_S:g} s: deviation from the planned time", late_ms[1:], 10, worst=True)


def _row(title: str, values_ms: Sequence[float], limit_ms: float, *, worst: bool = False) -> Row:
    """Return a row whose goal is that the median value, or with `worst` every value, is at most `limit_ms`."""
    ordered = sorted(values_ms)
    middle = statistics.median(ordered)
    judged = ordered[-1] if worst else middle
    spread = f"{ordered[0]:.1f}..{ordered[-1]:.1f} ms, n={len(ordered)}"
    goal = f"{'each' if worst else 'median'} <= {limit_ms:g} ms"
    return title, f"{middle:.1f} ms", spread, goal, mark(reached=judged <= limit_ms)
