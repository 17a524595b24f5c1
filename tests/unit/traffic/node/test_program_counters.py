"""What a host knows of a program without its help: bytes at the RNIC, and queue pairs in the kernel's list."""

from __future__ import annotations

import struct

import pytest

from faultbed.testbed.node.netlink import attribute
from faultbed.traffic.node.programs import foreign_qps
from faultbed.traffic.node.programs.foreign_qps import QueuePairs
from faultbed.traffic.node.programs.rnic_bytes import RnicBytes


@pytest.fixture
def soft(tmp_path):
    """Return the files of a soft RNIC, and a function that sets its counters."""
    port = tmp_path / "infiniband/rxe0/ports/1/hw_counters"
    statistics = tmp_path / "net/be0/statistics"
    port.mkdir(parents=True)
    statistics.mkdir(parents=True)
    (tmp_path / "infiniband/rxe0/parent").write_text("be0\n")

    def put(packets, size):
        (port / "rcvd_pkts").write_text(f"{packets}\n")
        (statistics / "rx_bytes").write_text(f"{size}\n")

    put(0, 0)
    return tmp_path, put


def counter_of(folder):
    return RnicBytes("rxe0", infiniband=str(folder / "infiniband"), netdevs=str(folder / "net"))


def test_soft_rnic_counts_bytes_only_while_rdma_packets_arrive(soft):
    folder, put = soft
    counter = counter_of(folder)
    assert counter.arrived() == 0
    put(10, 5000)
    assert counter.arrived() == 5000
    put(10, 5060)  # ARP
    assert counter.arrived() == 0
    put(11, 6000)
    assert counter.arrived() == 940


def test_counter_that_was_reset_or_is_gone_counts_nothing(soft):
    folder, put = soft
    counter = counter_of(folder)
    put(10, 5000)
    counter.arrived()
    put(1, 100)
    assert counter.arrived() == 0
    (folder / "net/be0/statistics/rx_bytes").unlink()
    assert counter.arrived() == 0
    put(2, 900)
    assert counter.arrived() == 0, "what it was before is unknown"
    put(3, 1000)
    assert counter.arrived() == 100


def test_hardware_rnic_counts_words(tmp_path):
    counters = tmp_path / "infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("100")
    counter = RnicBytes("mlx5_0", infiniband=str(tmp_path / "infiniband"))
    counter.arrived()
    (counters / "port_rcv_data").write_text("350")
    assert counter.arrived() == 1000


def number(kind, value, size=4):
    return attribute(kind, value.to_bytes(size, "little"))


def entry(*, pid, lqpn=17, rqpn=18, transport=2, state=3):
    return attribute(
        20,
        number(21, lqpn) + number(22, rqpn) + number(23, 7) + number(24, 9) + number(26, transport, 1)
        + number(27, state, 1) + number(28, pid),
    )  # fmt: skip


class FakeNetlink:
    entries = b""
    error = None

    def __init__(self, family):
        assert family == 20

    def dump(self, kind, body):
        if self.error is not None:
            raise self.error
        if kind == (5 << 10) | 1:
            return [(0, number(1, 3) + attribute(2, b"rxe0\0")), (0, number(1, 4) + attribute(2, b"rxe1\0"))]
        assert struct.unpack_from("=HHI", body) == (8, 1, 3)
        return [(0, attribute(19, self.entries))]

    def close(self):
        pass


@pytest.fixture
def listed(monkeypatch):
    def of(entries, pids=(100,), error=None):
        monkeypatch.setattr(FakeNetlink, "entries", entries)
        monkeypatch.setattr(FakeNetlink, "error", error)
        monkeypatch.setattr(foreign_qps, "Netlink", FakeNetlink)
        return QueuePairs("rxe0").of(pids)

    return of


def test_connected_queue_pairs_of_the_processes_are_listed(listed):
    entries = (
        entry(pid=100) + entry(pid=100, lqpn=19, rqpn=0, state=1) + entry(pid=7, lqpn=20)
        + entry(pid=100, lqpn=21, rqpn=0, transport=4) + entry(pid=100, lqpn=22, transport=1)
    )  # fmt: skip
    assert listed(entries) == [[17, 18, 9, 7, "rc", 3], [21, 0, 9, 7, "ud", 3]]


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_truncated_list_does_not_raise(listed, cut):
    assert isinstance(listed(entry(pid=100)[:cut]), list)


def test_kernel_that_does_not_answer_makes_the_list_unknown(listed):
    assert listed(b"", error=TimeoutError()) is None
    assert listed(b"", error=OSError(95, "not supported")) is None
