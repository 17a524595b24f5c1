"""Counters of RDMA devices over netlink: all of them at first, then only those that changed."""

import base64
import itertools
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.node import rdma
from faultbed.testbed.node.netlink import attribute

RECORDED = zlib.decompress(
    base64.b64decode(
        "eJyFkMtuwjAQRaewoVKBIlV9iA0LhFh00Z9g38cHjCJ7kBAhCWOHpjs+sN/TdWcSu0Q0ar2yfI7vXHsAF6DrEnrAFT3pfgD9+nTW"
        "ez7O4OU4gldwlHkstt7J+RW8wWdzDSJnc7Bt/tVgWAq/FW7LIt2YxBMy7UtyPnirlncnXl56zNfoaH8S1YtrLt4kzuOMkZgBuh3p"
        "/K9T5+i0P5zEbNHSWgyy0anOejN5/kCqDJEl26SpF74JHsWb/nh1qV8utDLvxTX5rkjJE2NIF1G9BZz+fhjf2dFf+bXwdJPJA/L3"
        "TOqf87F2srsENcQ192+6OJM5BP4Q+DfN5HI8"
    )
)
"""What Linux 6.12 answered of an rxe device (soft lab)."""

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20)
VALUES = st.integers(0, 2**64 - 1)


def answer(counters, *, device=0):
    """Encode as stat_get_doit_default_counter does: nested entries with padded values."""
    entries = b"".join(
        attribute(81 | 0x8000, attribute(82, name.encode() + b"\0") + attribute(83, struct.pack("=Q", value)))
        for name, value in counters.items()
    )
    head = attribute(1, struct.pack("=I", device)) + attribute(2, b"rxe0\0") + attribute(3, struct.pack("=I", 1))
    return head + attribute(80 | 0x8000, entries)


class Kernel:
    """Kernel stand-in with two devices; None as an answer means the device is gone."""

    def __init__(self, *devices):
        self.devices = dict(enumerate(devices))

    def dump(self, _kind, _body):
        for index in self.devices:
            yield 0, attribute(1, struct.pack("=I", index)) + attribute(2, f"rxe{index}".encode() + b"\0")

    def request(self, _kind, body):
        index = struct.unpack_from("=I", body, 4)[0]
        if self.devices[index] is None:
            raise OSError(19, "No such device")
        return answer(self.devices[index], device=index)

    def close(self):
        pass


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel({"sent_pkts": 5, "rcvd_pkts": 7}, {"sent_pkts": 1, "rcvd_pkts": 2})
    monkeypatch.setattr(rdma, "Netlink", lambda _family: made)
    return made


def test_rdma_counters_of_a_real_kernels_answer_are_decoded():
    actual = {name: struct.unpack_from("=Q", RECORDED, at)[0] for name, at in rdma.places(RECORDED)}

    assert actual["sent_pkts"] == 460
    assert {"rcvd_pkts", "duplicate_request", "out_of_seq_request", "rcvd_rnr_err", "completer_retry_err"} <= set(
        actual
    )
    assert len(actual) == 15


@given(st.dictionaries(NAMES, VALUES, max_size=30))
def test_rdma_counters_are_at_their_offsets(counters):
    body = answer(counters)
    actual = {name: struct.unpack_from("=Q", body, at)[0] for name, at in rdma.places(body)}
    assert actual == counters


def test_rdma_counters_report_everything_first_and_then_changes(kernel):
    there = rdma.Rdma()
    there.refresh()
    everything = {"rxe0.sent_pkts": 5, "rxe0.rcvd_pkts": 7, "rxe1.sent_pkts": 1, "rxe1.rcvd_pkts": 2}
    assert dict(there.counts()) == everything
    assert dict(there.moved()) == everything
    assert dict(there.moved()) == {}
    kernel.devices[1]["sent_pkts"] = 3
    assert dict(there.moved()) == {"rxe1.sent_pkts": 3}
    assert dict(there.counts())["rxe1.sent_pkts"] == 3


def test_rdma_counters_new_name_moves_offsets_and_not_values(kernel):
    there = rdma.Rdma()
    there.refresh()
    dict(there.moved())
    kernel.devices[0] = {"duplicate_request": 9, "sent_pkts": 5, "rcvd_pkts": 8}
    assert dict(there.moved()) == {"rxe0.duplicate_request": 9, "rxe0.sent_pkts": 5, "rxe0.rcvd_pkts": 8}


def test_rdma_counters_of_a_removed_device_return_after_a_rescan(kernel):
    there = rdma.Rdma()
    there.refresh()
    before, kernel.devices[0] = kernel.devices[0], None
    assert {name.split(".")[0] for name, _ in itertools.chain(there.counts(), there.moved())} == {"rxe1"}
    kernel.devices[0] = before
    there.refresh()
    assert dict(there.moved())["rxe0.rcvd_pkts"] == 7


def test_rdma_counters_of_a_kernel_without_rdma_are_empty(monkeypatch):
    def refuse(_family):
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(rdma, "Netlink", refuse)
    there = rdma.Rdma()
    there.refresh()
    assert list(there.counts()) == list(there.moved()) == []
    there.close()


def test_rdma_counters_of_a_kernel_that_does_not_answer_are_unknown_and_not_gone(kernel):
    """Counters that are gone prove that a device was removed; on a starved machine they were only not read."""
    there = rdma.Rdma()
    there.refresh()
    dict(there.moved())
    answer_of, dump = kernel.request, kernel.dump

    def too_late(*_):
        raise TimeoutError("timed out")

    kernel.request = too_late
    with pytest.raises(TimeoutError):
        dict(there.counts())
    assert dict(there.moved()) == {}
    kernel.request, kernel.dump = answer_of, too_late
    assert dict(there.moved()) == {}, "nothing has moved meanwhile"
    with pytest.raises(TimeoutError):
        there.refresh()
    kernel.dump = dump
    there.refresh()
    assert dict(there.counts())["rxe0.rcvd_pkts"] == 7


RC, UD = 2, 4
INIT, RTR, RTS, ERR = 1, 2, 3, 6


def listed(*qps):
    """Encode queue pairs (number, type, state) as nldev's res_get_common_dumpit and fill_res_qp_entry do."""
    entries = b"".join(
        attribute(20 | 0x8000, attribute(21, struct.pack("=I", number)) + attribute(26, bytes([kind]))
                  + attribute(27, bytes([state])) + attribute(28, struct.pack("=I", 4711)))
        for number, kind, state in qps
    )  # fmt: skip
    return attribute(1, struct.pack("=I", 0)) + attribute(19 | 0x8000, entries)


def test_rdma_counts_connections_that_are_in_error_or_gone(kernel, monkeypatch):
    """A queue pair that goes to the error state is no longer connected, whether or not its program destroys it."""
    reader, bodies = rdma.Rdma(), []
    plain = kernel.dump
    monkeypatch.setattr(
        kernel,
        "dump",
        lambda kind, body: [(0, part) for part in bodies] if kind == (5 << 10) | 10 else plain(kind, body),
    )
    reader.refresh()
    del reader._names[1]

    def ended(*qps):
        bodies[:] = [listed(*qps[:1]), listed(*qps[1:])]  # a long list comes in several messages
        return dict(reader.ended())["rxe0.qps_ended"]

    assert ended((17, RC, RTS), (18, RC, RTR), (19, RC, INIT), (1, UD, RTS)) == 0
    assert ended((17, RC, ERR), (18, RC, RTS), (19, RC, RTS)) == 1
    assert ended((18, RC, RTS), (19, RC, RTS), (20, RC, RTS)) == 1, "its program has destroyed it and made another one"
    reader.refresh()
    del reader._names[1]
    assert ended((20, RC, RTS)) == 3
    monkeypatch.setattr(kernel, "dump", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    assert dict(reader.ended()) == {}
