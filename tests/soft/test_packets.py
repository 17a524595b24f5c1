"""The software hop on a real lab: every packet kind in one warm flow, exact, and nobody else's packets touched."""

from __future__ import annotations

import threading

import pytest

from inject.injector import Injector
from inject.journal import Journal
from inject.plan import FaultSpec, plan
from traffic import flow
from traffic.flow import FlowSpec
from traffic.plan import QpParams

pytestmark = pytest.mark.soft

WINDOW_S = 2.0

KINDS = {
    "a share is lost": ("packet.drop", {"share": 0.05}),
    "bursts are lost": ("packet.drop", {"share": 0.1, "burst": 3}),
    "every 50th is lost": ("packet.drop", {"every": 50, "opcode": "data"}),
    "ACKs are lost": ("packet.drop", {"share": 0.3, "opcode": "ack", "to": "sender"}),
    "marked": ("packet.mark", {"share": 0.5, "opcode": "data"}),
    "corrupted": ("packet.corrupt", {"every": 50, "opcode": "data"}),
    "delayed": ("packet.delay", {"delay": 20}),
    "delayed on the way in": ("packet.delay", {"delay": 20, "direction": "from", "to": "sender"}),
    "duplicated": ("packet.duplicate", {"share": 0.2, "opcode": "data"}),
    "overtaken": ("packet.reorder", {"every": 20, "opcode": "data"}),
    "slow link": ("link.rate", {"rate": 2}),
    "silent one way": ("link.oneway", {}),
}


def ends(lab):
    """Sender and receiver of the flow under test: first RNICs of the first two hosts, which share a switch."""
    one, two = lab.topology.hosts[:2]
    return f"{one.name}:{one.rnics[0].name}", f"{two.name}:{two.rnics[0].name}"


@pytest.fixture
def warm(lab):
    """A flow that goes on until the test is over; its queue pairs outlive seconds of silence."""
    src, dst = ends(lab)
    running = flow.start(
        lab,
        FlowSpec(
            src=src, dst=dst, message_bytes=16384, depth=4, duration_s=600.0, op_deadline_s=60.0,
            stall_deadline_s=120.0, qp=QpParams(timeout=16, retry_cnt=6),
        ),
    )  # fmt: skip
    yield running
    running.stop()
    running.wait(timeout_s=60)


def planned(lab, kind, params, *, for_s=WINDOW_S, index=0):
    src, dst = ends(lab)
    target = src if params.get("to") == "sender" else dst
    settings = {name: value for name, value in params.items() if name != "to"}
    return plan(
        FaultSpec(kind=kind, target=target, for_s=for_s, params=settings), lab.topology, lab_kind="soft", index=index
    )


def receipt_of(injector, fault):
    prepared = injector.prepare(fault)
    armed = prepared.arm()
    threading.Event().wait(fault.for_s)
    return armed, prepared.clear()


def test_every_packet_kind_is_proved_in_one_warm_flow(lab, tmp_path, warm):
    """One after the other in the same flow: armed, counted, witnessed, cleared; a doubt is named by its case."""
    assert not warm.is_over
    found = {}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal) as injector:
        for index, (name, (kind, params)) in enumerate(KINDS.items()):
            armed, receipt = receipt_of(injector, planned(lab, kind, params, index=index))
            print(
                name, receipt.fired.count, receipt.fired.witness, dict(armed.readback), dict(receipt.cleared.readback)
            )
            found[name] = [*receipt.doubts, *([] if receipt.cleared.ok else [str(receipt.cleared.error)])]
            assert not warm.is_over, f"the flow has not survived: {name}"
    assert {name: doubts for name, doubts in found.items() if doubts} == {}
