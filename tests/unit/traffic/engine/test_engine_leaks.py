"""A living engine holds as many queue pairs, memory regions and descriptors after 200 rebuilds as before them."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_fabric import modules

from faultbed.traffic.flows import flow_run

REBUILDS = 200
LIVING = weakref.WeakSet()
"""All queue pairs that are not garbage yet."""
ADDRESSES = {"tx": "192.0.2.1", "rx": "192.0.2.2"}


class Rnic:
    """An RNIC that counts what is open on it, and on which nothing arrives."""

    def __init__(self, name, address):
        self.name, self.address, self.cq_entries, self.made = name, address, 1 << 15, 0
        self.fd, self.context = os.eventfd(0), SimpleNamespace(close=lambda: None)
        self.qps, self.regions = set(), set()

    def register(self, address, _size):
        region = SimpleNamespace(rkey=1, lkey=1, buf=address, number=object())
        self.regions.add(region.number)
        region.close = lambda: self.regions.remove(region.number)
        return region

    def gid_index(self):
        return 0

    def check_mtu(self, _mtu):
        pass

    def clear_event(self):
        pass

    def poll(self):
        return []

    drain = poll


class Qp:
    """A queue pair of that RNIC."""

    def __init__(self, rnic, *, sends, receives, psn, params):
        del sends, receives, params
        rnic.made += 1
        self.rnic, self.qpn, self.psn = rnic, 16 + rnic.made, psn
        rnic.qps.add(self.qpn)
        LIVING.add(self)

    def connect(self, peer):
        self.peer = peer

    def post_recv(self, _request):
        pass

    post_send = post_recv

    def halt(self):
        pass

    def psns(self):
        return self.psn, 0

    def close(self):
        self.rnic.qps.remove(self.qpn)


def held(engine):
    """Return how many objects and descriptors an engine holds."""
    gc.collect()
    return {
        "queue pairs": sum(len(rnic.qps) for rnic in engine.rnics.values()),
        "objects of queue pairs": len(LIVING),
        "memory regions": sum(len(rnic.regions) for rnic in engine.rnics.values()),
        "connections by number": len(engine.by_qpn),
        "connections": sum(len(task.conns) for task in engine.tasks.values()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def connect(engine, events, generation, qps):
    """Establish or rebuild all connections, as the controller does."""
    for number in range(qps):
        for task in ("tx", "rx"):
            request = {"task": task, "conn": number, "generation": generation, "psn": 256, "flow_label": 0}
            engine.do_qp(request)
        ends = {fields["task"]: fields["end"] for event, fields in events if event == "qp"}
        for task, other in (("tx", "rx"), ("rx", "tx")):
            engine.do_connect({"task": task, "conn": number, "generation": generation, "peer": ends[other]})
        for task in ("rx", "tx"):
            engine.do_go({"task": task, "conn": number, "generation": generation})


@pytest.mark.parametrize(
    "change", [{"verb": "write"}, {"verb": "send", "qps": 3}, {"verb": "write-imm", "check": True}]
)
def test_engine_after_200_rebuilds_holds_what_it_held_before(monkeypatch, change):
    node = modules(monkeypatch)
    monkeypatch.setattr(node.task, "RcQp", Qp)
    monkeypatch.delitem(sys.modules, "faultbed.traffic.node.engine", raising=False)
    module = importlib.import_module("faultbed.traffic.node.engine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(module, "Rnic", Rnic)
    engine, events = module.Engine(), []
    monkeypatch.setattr(engine, "emit", lambda event, **fields: events.append((event, fields)))
    spec = flow_run.FlowSpec(src="host2", dst="host1", message_bytes=512, depth=8, **change)
    for task in ("rx", "tx"):
        kind = f"{'checked' if 'check' in change else 'flow'}_{task}"
        fields = {"task": task, "kind": kind, "rnic": f"{task}0", "address": ADDRESSES[task]}
        engine.do_task({**fields, "spec": flow_run.engine_spec(spec)})
    connect(engine, events, 0, spec.qps)
    engine.do_start({"task": "tx"})
    before = held(engine)
    assert before["queue pairs"] == 2 * spec.qps
    for generation in range(1, REBUILDS + 1):
        events.clear()
        connect(engine, events, generation, spec.qps)
    assert not [fields for event, fields in events if event in ("error", "join_failed")]
    assert held(engine) == before
    rnics = list(engine.rnics.values())
    engine.close()
    assert [(rnic.qps, rnic.regions) for rnic in rnics] == [(set(), set())] * 2
