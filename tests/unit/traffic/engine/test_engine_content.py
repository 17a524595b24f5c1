"""Content of flows, byte by byte, on an in-memory fabric that corrupts, loses, reorders and duplicates."""

from __future__ import annotations

import ctypes
import random
import sys

import pytest
from engine_flows import flow_on, run_checked
from hypothesis import given
from hypothesis import strategies as st
from memory_fabric import CLOCK, VERBS, Fabric

from faultbed.traffic.flows import flow_run
from faultbed.traffic.node.flows.content import Content, Verifier, nearest

MS = 1_000_000


@pytest.mark.parametrize("verb", flow_run.CHECKED["rc"])
@pytest.mark.parametrize("size", [1, 7, 8, 512, 70_001])
def test_checked_flow_verifies_every_byte(verb, size, monkeypatch):
    """This holds with few slots and a slow receiver: a slot is never reused before its content is checked."""
    fabric = Fabric(random.Random(7), delay_ns=200_000, rnr_retry=0)
    flow_on(monkeypatch, fabric, verb=verb, check=True, message_bytes=size, messages=301, qps=3, depth=3)
    done = run_checked(fabric, verb)["tx" if verb == "read" else "rx"]
    assert (done["checked_bytes"], done["wrong_bytes"]) == (301 * size, 0)


@pytest.mark.parametrize("verb", ["write-imm", "read"])
def test_checked_flow_counts_changed_bytes(verb, monkeypatch):
    class Spoiling(Fabric):
        count = 0

        def spoilt(self, opcode, remote, data, *rest):
            carries = opcode == VERBS[verb] and bool(data)
            self.count += carries
            if carries and self.count == 20 and verb == "write-imm":
                data = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
            if carries and self.count == 20 and verb == "read":
                remote += 1
            return opcode, remote, data, *rest

    fabric = Spoiling(random.Random(7), delay_ns=200_000, rnr_retry=0)
    flow_on(monkeypatch, fabric, verb=verb, check=True, messages=40, depth=4)
    done = run_checked(fabric, verb)["tx" if verb == "read" else "rx"]
    assert done["wrong_bytes"] == 1 if verb == "write-imm" else done["wrong_bytes"] > 400


def test_verifier_after_rebuild_accepts_repeats_and_rejects_other_slots():
    content = Content(64)
    verifier = Verifier(content, 3)
    for number in range(5):
        verifier.verify(content.of(3, number))
    verifier.is_rebuilt = True
    verifier.verify(content.of(3, 3))  # it is repeated, because its acknowledgement was lost
    verifier.verify(content.of(3, 4))
    verifier.is_rebuilt = True
    verifier.verify(content.of(3, 7))  # messages 5 and 6 were never checked
    assert (verifier.checked, verifier.wrong) == (8 * 64, 0)
    verifier.verify(content.of(3, 7))
    assert verifier.wrong > 50, "one that comes twice, unasked"
    before = verifier.wrong
    verifier.verify(content.of(4, 9))
    assert verifier.wrong > before + 50, "one of another queue pair"


UNRELIABLE = [(transport, verb) for transport in ("uc", "ud") for verb in flow_run.CHECKED[transport]]


@pytest.mark.parametrize(("transport", "verb"), UNRELIABLE)
@pytest.mark.parametrize("size", [1, 8, 512, 4096])
def test_numbered_flow_verifies_every_arriving_byte(transport, verb, size, monkeypatch):
    fabric = Fabric(random.Random(7), delay_ns=200_000, unreliable=True)
    fields = {"transport": transport, "verb": verb, "check": True}
    flow_on(monkeypatch, fabric, **fields, message_bytes=size, messages=301, qps=3, depth=3)
    done = run_checked(fabric, verb)["rx"]
    assert sum(total["messages"] for total in done["totals"]) == 301
    assert (done["checked_bytes"], done["wrong_bytes"]) == (301 * size, 0)


class Losing(Fabric):
    """A fabric that loses a fifth of all messages, including credits and requests for them."""

    lost = 0

    def spoilt(self, *message):
        if self.choice.random() < 0.2:
            self.lost += bool(message[2])
            return None
        return message


@pytest.mark.parametrize(("transport", "verb"), UNRELIABLE)
def test_numbered_flow_with_losses_reports_no_wrong_bytes_and_ends(transport, verb, monkeypatch):
    fabric = Losing(random.Random(7), delay_ns=200_000, unreliable=True)
    fields = {"transport": transport, "verb": verb, "check": True}
    flow_on(monkeypatch, fabric, **fields, messages=200, depth=16)
    done = run_checked(fabric, verb)
    sampled = {who: fields.get("has_arrived", True) for who, event, fields in fabric.events if event == "sample"}
    assert sampled == {"tx": False, "rx": True}
    came = done["rx"]["totals"][0]["messages"]
    assert done["tx"]["totals"][0]["messages"] == 200
    assert fabric.lost > 10
    assert came == 200 - fabric.lost
    assert (done["rx"]["checked_bytes"], done["rx"]["wrong_bytes"]) == (came * 512, 0)


@pytest.mark.parametrize(("transport", "verb"), UNRELIABLE)
@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda data, _: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:], range(1, 2)),
        (lambda data, _: bytes([data[0] ^ 1]) + data[1:], range(1, 2)),
        (lambda data, before: data[:256] + before[256:], range(200, 257)),
        (lambda _, before: before, range(400, 513)),
        (lambda *_: b"", range(400, 513)),
    ],
    ids=["a byte", "its number", "torn", "another one", "left over"],
)
def test_numbered_flow_counts_changed_bytes(transport, verb, spoil, wrong, monkeypatch):
    class Spoiling(Fabric):
        count, before = 0, b""

        def spoilt(self, opcode, remote, data, *rest):
            self.count += bool(data)
            if data and self.count == 20:
                return opcode, remote, spoil(data, self.before), *rest
            self.before = data or self.before
            return opcode, remote, data, *rest

    fabric = Spoiling(random.Random(7), delay_ns=200_000, unreliable=True)
    fields = {"transport": transport, "verb": verb, "check": True}
    flow_on(monkeypatch, fabric, **fields, messages=40, depth=4)
    done = run_checked(fabric, verb)["rx"]
    assert done["checked_bytes"] == 40 * 512
    assert done["wrong_bytes"] in wrong


class LateToLook(Fabric):
    """A fabric whose receiver sees written data 5 ms after its arrival, in order."""

    def spoilt(self, opcode, remote, data, imm, *rest):
        if opcode != VERBS["write-imm"] or remote is None or not (data or imm >> 31):
            return opcode, remote, data, imm, *rest
        if data:
            ctypes.memmove(remote, data, len(data))
        self.later(CLOCK.monotonic_ns() + 5 * MS, self.tasks["tx"].conns[0], (opcode, None, b"", imm, *rest))
        return None


def test_numbered_flow_never_reuses_a_slot_before_its_check(monkeypatch):
    fabric = LateToLook(random.Random(7), delay_ns=100_000, unreliable=True)
    flow_on(monkeypatch, fabric, transport="uc", verb="write", check=True, messages=100, depth=4)
    done = run_checked(fabric, "write")["rx"]
    assert (done["totals"][0]["messages"], done["wrong_bytes"]) == (100, 0)


def test_numbered_flow_ignores_a_write_to_a_settled_slot(monkeypatch):
    """A copy of message 1 arrives while its slot holds message 5, and message 9 is the next one for that slot."""
    fabric = Fabric(random.Random(7), delay_ns=100_000, unreliable=True)
    flow_on(monkeypatch, fabric, transport="uc", verb="write", check=True, messages=8, depth=4)
    run_checked(fabric, "write")
    receiver = fabric.tasks["rx"]
    receiver.on_recv(receiver.conns[0], 1, CLOCK.monotonic_ns())
    assert (receiver.checked, receiver.wrong, receiver.counts[0][0]) == (8 * 512, 0, 8)
    receiver.on_recv(receiver.conns[0], 9, CLOCK.monotonic_ns())
    assert receiver.wrong > 400


def test_numbered_writer_without_reports_loses_its_queue_pair(monkeypatch):
    class OneWay(Fabric):
        def spoilt(self, *message):
            return message if message[2] else None

    fabric = OneWay(random.Random(7), delay_ns=100_000, unreliable=True)
    all_fields = {"transport": "uc", "verb": "write", "check": True, "op_deadline_s": 0.3}
    flow_on(monkeypatch, fabric, **all_fields, messages=100, depth=4)
    fabric.tasks["rx"].begin(0)
    with pytest.raises(AssertionError, match="wait for each other"):  # no controller rebuilds the connection
        fabric.run(["tx"], seconds=1.0)
    (error,) = [fields for _, event, fields in fabric.events if event == "qp_error"]
    assert error["status"] == "OP_DEADLINE"


@pytest.mark.parametrize(("transport", "verb"), UNRELIABLE)
def test_numbered_flow_accepts_reordered_and_duplicate_messages(transport, verb, monkeypatch):
    class Overtaking(LateToLook):
        late = doubled = 0

        def spoilt(self, *message):
            *message, again = message
            lot = self.choice.random() if message[2] and not again else 1.0
            if lot < 0.3:
                after_ns = self.choice.randint(0, 30 * MS) if lot < 0.2 else 0
                self.later(CLOCK.monotonic_ns() + after_ns, self.tasks["tx"].conns[0], (*message, "again"))
            self.late += lot < 0.2
            self.doubled += 0.2 <= lot < 0.3
            return None if lot < 0.2 else super().spoilt(*message, None)

    fabric = Overtaking(random.Random(7), delay_ns=100_000, unreliable=True)
    fields = {"transport": transport, "verb": verb, "check": True}
    flow_on(monkeypatch, fabric, **fields, messages=200, depth=4)
    done = run_checked(fabric, verb)["rx"]
    assert fabric.late > 10
    assert fabric.doubled > 5
    assert done["totals"][0]["messages"] == 200, "a copy is no goodput"
    samples = [
        size for who, event, fields in fabric.events if (who, event) == ("rx", "sample") for size in fields["sizes"]
    ]
    assert sum(samples) == 200 * 512
    assert done["checked_bytes"] >= 200 * 512
    assert done["wrong_bytes"] == 0


@pytest.mark.parametrize(("transport", "verb"), UNRELIABLE)
def test_numbered_sender_keeps_message_numbers_after_a_rebuild(transport, verb, monkeypatch):
    fabric = Fabric(random.Random(7), delay_ns=100_000, unreliable=True)
    flow_on(monkeypatch, fabric, transport=transport, verb=verb, check=True, messages=50, depth=4)
    run_checked(fabric, verb)
    sender = fabric.tasks["tx"]
    lane = sender.lanes[0]
    lane.in_flight.extend([lane.idle.popleft(), lane.idle.popleft()])
    sender.joined(sender.conns[0])
    assert [lane.keep[index][0].imm_data for index in lane.in_flight] == [48, 49]


def test_numbered_receiver_remembers_the_newest_numbers_only(monkeypatch):
    fabric = Fabric(random.Random(7), delay_ns=100_000, unreliable=True)
    flow_on(monkeypatch, fabric, transport="ud", verb="send", check=True, messages=50, depth=4)
    receiver = fabric.tasks["rx"]
    conn = receiver.conns[0]
    for number in range(20_000):
        assert receiver._is_first(conn, number)
        receiver.next_number[0] = number + 1
    assert len(receiver.arrived[0]) <= 2 * 4096 + 1
    assert not receiver._is_first(conn, 19_999)
    assert not receiver._is_first(conn, 15_000)


@given(st.integers(0, 1 << 40), st.integers(-(1 << 30) + 1, (1 << 30) - 1))
def test_nearest_recovers_a_number_from_its_remainder(due, away):
    number = max(0, due + away)
    assert nearest(number % (1 << 31), due, 1 << 31) == number


def test_latencies_of_a_flow_have_the_message_that_never_came_back(monkeypatch):
    """Otherwise no percentile would include a stall at the end."""

    class Stuck(Fabric):
        carried = 0

        def carry(self, qp, chain):
            self.carried += 1
            if self.carried <= 20:
                super().carry(qp, chain)

    fabric = Stuck(random.Random(7), delay_ns=1000)
    flow_on(monkeypatch, fabric, verb="write", latency=True, depth=1, duration_s=0.3)
    monkeypatch.setattr(sys.modules["faultbed.traffic.node.flows.flow"], "DRAIN_NS", 200 * MS)
    fabric.tasks["rx"].begin(0)
    fabric.run(["tx"])
    (done,) = (fields for _, event, fields in fabric.events if event == "done")
    assert done["undrained"] == 1
    assert len(done["latencies_ns"]) == 21
    assert max(done["latencies_ns"]) > 200 * MS
