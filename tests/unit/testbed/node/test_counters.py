"""Counters: decoding of the kernel's values, increments between two readings, and resets."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.node import counts
from faultbed.testbed.node.gpu import xid
from faultbed.testbed.node.netlink import attribute
from faultbed.testbed.observe import counters

UP = 1


def link_counters(*, flags):
    """Return the counters of a link with 7 packets received, 824 bytes sent and 3 carrier losses (RTM_NEWLINK)."""
    stats = struct.pack("=8Q", 7, 0, 0, 824, 0, 0, 0, 0)
    numbers = {4: 4200, 33: 1, 48: 3}
    return dict(
        counts.link_counts("be0", flags, {kind: struct.pack("=I", n) for kind, n in numbers.items()} | {23: stats})
    )


def test_link_counters_report_state_and_traffic():
    """A link that is down has no `carrier` counter, because the kernel does not define its value."""
    up = link_counters(flags=UP)
    assert (up["be0.up"], up["be0.carrier"], up["be0.mtu"], up["be0.carrier_down_count"]) == (1, 1, 4200, 3)
    assert (up["be0.rx_packets"], up["be0.tx_bytes"]) == (7, 824)
    down = link_counters(flags=0)
    assert down["be0.up"] == 0
    assert "be0.carrier" not in down


def test_protocol_counters_are_only_those_that_faults_move():
    """/proc/net/snmp has a line of names and a line of values for each protocol. No fault moves a counter of ICMP."""
    text = (
        "Ip: Forwarding FragFails\nIp: 1 5\nIcmp: InMsgs\nIcmp: 9\nTcp: RtoAlgorithm MaxConn ActiveOpens\nTcp: 1 -1 3\n"
    )
    assert dict(counts.protocol_counts(text)) == {"ip.FragFails": 5, "tcp.ActiveOpens": 3}


def test_cpu_and_gpu_counters_are_decoded():
    """/proc/schedstat gives the time that tasks waited for a CPU, cpu.stat of a cgroup the counters of its soft GPU."""
    assert dict(counts.cpu_waits("version 17\ncpu0 0 0 0 0 0 0 5000 42000 3\n")) == {"cpu0.wait_us": 42}
    assert dict(counts.gpu_counts("gpu0", "nr_periods 9\nnr_throttled 4\n")) == {
        "gpu0.nr_periods": 9,
        "gpu0.nr_throttled": 4,
    }


def test_place_reads_counters_of_this_machine():
    """A value lies between two readings of sysfs, before and after it. The second sample has only changed counters."""
    place = counts.Place(None)
    try:
        path = Path("/sys/class/net/lo/statistics/rx_bytes")
        before, result, after = int(path.read_text()), place.read()["lo.rx_bytes"], int(path.read_text())
        assert before <= result <= after
        place.sample()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x" * 100, ("127.0.0.1", 9))
        assert place.sample()["lo.rx_bytes"] >= result + 100
    finally:
        place.close()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_counter_delta_is_never_negative(before, after):
    """A counter that is lower than before was reset, so that its increment is its present value."""
    assert counters.delta(before, after) == (after - before if after >= before else after)


def test_flat_deltas_leave_out_states():
    """A state such as the carrier is not a counter, and has no increment."""
    before = {"host1": {"be0.carrier": 1, "rxe0.send_err": 2}}
    after = {"host1": {"be0.carrier": 0, "rxe0.send_err": 5}}
    assert counters.flat_deltas(before, after) == {"host1/rxe0.send_err": 3}


@pytest.mark.parametrize("before", [{}, {"host1": {}}, {"host1": {"rxe1.out_of_seq_request": 1}}])
def test_flat_deltas_of_counters_without_an_earlier_reading_are_left_out(before):
    """If a missing reading counted as zero, the increment since the boot would prove any fault."""
    assert counters.flat_deltas(before, {"host1": {"rxe0.out_of_seq_request": 40}}) == {}


def test_growth_adds_resets_and_new_queues_over_several_readings():
    """netem is added and removed between the first and the last reading: its drops are in those between alone."""
    readings = [
        {"rtsw1": {"ctsw1.tx_packets": 5}},
        {"rtsw1": {"ctsw1.tx_packets": 9, "ctsw1.queue_drops": 30}},
        {"rtsw1": {"ctsw1.tx_packets": 12, "ctsw1.queue_drops": 70}},
        {"rtsw1": {"ctsw1.tx_packets": 2}},
    ]
    assert counters.growth(readings) == {"rtsw1/ctsw1.tx_packets": 9, "rtsw1/ctsw1.queue_drops": 70}


def test_growth_of_a_counter_or_a_node_that_was_not_read_before_is_unknown():
    later = {"host1": {"rxe0.out_of_seq_request": 40}, "host2": {"be0.queue_drops": 8}}
    assert counters.growth([{"host1": {}}, later]) == {}


SINCE_BOOT = {"ip.InDelivers": 900, "tcp.ActiveOpens": 30, "rxe0.sent_pkts": 500, "rxe0.rcvd_pkts": 400}
IDLE = {"rxe0.send_err": 0, "rxe1.send_err": 0, "be0.tx_bytes": 7}


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ({}, "rxe0.send_err", ""),
        (
            {"kernel.boot": 2},
            "rxe0.send_err",
            "host1, which has booted since (its kernel has another boot id)",
        ),
        ({"ip.InDelivers": 9, "tcp.ActiveOpens": 1}, "rxe1.send_err", "booted since (ip.InDelivers from 900 to 9,"),
        ({"ip.InDelivers": 9}, "rxe0.send_err", ""),
        (
            {"rxe0.sent_pkts": 1, "rxe0.rcvd_pkts": 1},
            "rxe0.send_err",
            "to rxe0, which was reset since (rxe0.",
        ),
        ({"rxe0.sent_pkts": 1, "rxe0.rcvd_pkts": 1}, "rxe1.send_err", ""),
        ({"rxe0.sent_pkts": 1}, "rxe0.send_err", ""),
        ({"be0.tx_bytes": 6}, "be0.tx_bytes", "was reset, from 7 to 6"),
    ],
)
def test_why_reset_reports_a_boot_or_a_reset_of_the_counters_device(change, key, reason):
    """A counter that is zero in both readings may have moved in between if it was reset meanwhile."""
    before = {**SINCE_BOOT, **IDLE, "kernel.boot": 1}
    actual = counters.why_reset({"host1": before}, {"host1": {**before, **change}}, f"host1/{key}")
    assert reason in actual
    assert bool(actual) is bool(reason)


def test_boot_counter_differs_after_a_boot_and_in_another_namespace(monkeypatch):
    def boot_number():
        place = counts.Place(None)
        try:
            return place.read()[counters.BOOT]
        finally:
            place.close()

    first = boot_number()
    assert first == boot_number()
    monkeypatch.setattr(counts, "_boot_id", lambda: "another")
    assert boot_number() not in (first, 0)
    monkeypatch.setattr(counts.netns, "identity", lambda _: 4_026_531_840)
    assert boot_number() != first
    before, after = {"host1": {counters.BOOT: 7}}, {"host1": {counters.BOOT: 3}}
    assert counters.deltas(before, after) == {"host1": {counters.BOOT: 1}}
    assert counters.restarted(before, after) == {"host1": (counters.BOOT,)}


def test_xid_event_is_decoded_into_address_and_number():
    """A record of /dev/kmsg has a header before the driver's line. Any other line gives None."""
    line = "3,1021,5140900,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
    assert xid.event(line) == ("0000:1b:00", 79)
    assert xid.event("6,1,2,-;NVRM: loading NVIDIA UNIX Open Kernel Module") is None


def test_counter_deltas_count_resets_from_zero_and_skip_removed_devices():
    """One RNIC was reset, one removed; a state such as the carrier may fall."""
    before = {"host1": {"rxe0.send_err": 900, "rxe1.send_err": 4, "be0.carrier": 1}, "host2": {"rxe0.send_err": 1}}
    after = {"host1": {"rxe0.send_err": 7, "rxe2.send_err": 3, "be0.carrier": 0}}
    assert counters.deltas(before, after) == {"host1": {"rxe0.send_err": 7, "be0.carrier": -1}}


@given(st.lists(st.tuples(st.integers(4, 9), st.binary(max_size=40))), st.binary(min_size=36, max_size=40))
def test_queue_stats_are_found_after_any_other_attributes(before, stats):
    head = struct.pack("=BxxxiIII", 0, 2, 0x8001 << 16, 0xFFFFFFFF, 2)
    others = b"".join(attribute(kind, value) for kind, value in before)
    at = counts.queue_stats_at(head + others + attribute(3, stats) + attribute(7, b"after"))
    assert at == len(head) + len(others)
    assert counts.queue_stats_at(head + others) == 0
