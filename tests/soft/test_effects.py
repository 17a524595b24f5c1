"""Size of a fault's effect, measured independently: delay, rate and share equal the fault's parameters."""

import contextlib
import time

import pytest
from waiting import wait_s

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.observe import counters
from faultbed.traffic.engine.task_specs import QpParams

pytestmark = [pytest.mark.soft, pytest.mark.slow]

DELAY_MS, RATE_MBIT = 60.0, 4.0
MEASURED_S = 20.0
PATIENT = QpParams(timeout=18, retry_cnt=6)


def ends(lab):
    one, two = lab.topology.hosts[:2]
    return f"{one.name}:{one.rnics[0].name}", f"{two.name}:{two.rnics[0].name}"


@pytest.fixture
def fault_on(lab, tmp_path):
    """Keep a fault active during a measurement. Its receipt must be proven, except for its planned time."""

    @contextlib.contextmanager
    def keep(kind, target, **params):
        spec = FaultSpec(kind=kind, target=target, for_s=200.0, params=params)
        with Journal(tmp_path / "journal") as journal, Injector(lab, journal) as injector:
            prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft"))
            prepared.arm()
            yield
            receipt = prepared.clear()
        assert not receipt.doubts
        assert receipt.cleared.ok

    return keep


def median_ns(traffic, src, dst):
    """Return the median time of small messages, one at a time."""
    sent = traffic.flow(
        src, dst, message_bytes=512, depth=1, messages=200, latency=True, op_deadline_s=60.0, qp=PATIENT
    )
    result = sent.wait(120.0)
    assert result.outcome == "completed"
    return result.latency.p50_ns


def test_delay_lengthens_the_median_round_trip_by_its_length(lab, traffic, fault_on):
    """The difference is within 10 % of the delay. Only requests pass the detour, not ACKs."""
    src, dst = ends(lab)
    before = median_ns(traffic, src, dst)
    with fault_on("packet.delay", dst, delay=DELAY_MS):
        during = median_ns(traffic, src, dst)
    assert (during - before) / 1e6 == pytest.approx(DELAY_MS, rel=0.10)


def test_link_rate_limits_the_ports_bytes_to_the_rate(lab, traffic, fault_on):
    """The rate is within 5 %, by the port's own count of bytes, during a flow that could send more."""
    src, dst = ends(lab)
    host, _, rnic = dst.partition(":")
    link = next(link for link in lab.topology.links_of(host) if link.rnic == rnic)
    node, key = link.a.node, f"{link.a.node}/{link.a.netdev}.tx_bytes"
    sent = traffic.flow(src, dst, message_bytes=16384, depth=4, duration_s=300.0, op_deadline_s=60.0, qp=PATIENT)
    unlimited = rate_of(lab, node, key, 5.0)
    assert unlimited > 1.5 * RATE_MBIT, "the flow does not fill the rate: nothing would be shown"
    with fault_on("link.rate", f"{node}:{host}:{rnic}", rate=RATE_MBIT):
        wait_s(3.0)  # wait until the queue is full and tbf's initial burst is over
        limited = rate_of(lab, node, key, MEASURED_S)
    assert not sent.is_over
    assert limited == pytest.approx(RATE_MBIT, rel=0.05)


def rate_of(lab, node, key, seconds):
    """Return the rate of a byte counter in Mbit/s. The time of a reading is the middle of its duration."""
    before, began_s = read_at(lab, node)
    wait_s(seconds)
    after, ended_s = read_at(lab, node)
    return counters.flat_deltas(before, after)[key] * 8 / 1e6 / (ended_s - began_s)


def read_at(lab, node):
    asked_s = time.monotonic()
    values = counters.read(lab, [node])
    return values, (asked_s + time.monotonic()) / 2
