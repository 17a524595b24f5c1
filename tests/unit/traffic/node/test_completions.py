"""A completion queue holds the completions of all posted requests if all its queue pairs fail at once."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_fabric import Rnic, modules
from samples import samples

from faultbed.testbed.errors import UsageError
from faultbed.traffic.flows import flow_run, flow_spec
from faultbed.traffic.node import completions

KINDS = {
    ("rc", "send", False): ("flow", "Flow"),
    ("rc", "write-imm", False): ("flow", "Flow"),
    ("rc", "write", False): ("flow", "Flow"),
    ("rc", "read", False): ("flow", "Flow"),
    ("rc", "send", True): ("checked", "Checked"),
    ("uc", "send", False): ("unreliable", "Unreliable"),
    ("uc", "send", True): ("numbered", "Numbered"),
    ("ud", "send", False): ("unreliable", "Unreliable"),
}


def spec_of(kind, qps, depth, size=64):
    transport, verb, check = kind
    verb = {"uc": "send-imm" if "send-imm" in flow_spec.TRANSPORTS["uc"] else verb}.get(transport, verb)
    made = {"src": "host1", "dst": "host3", "message_bytes": size, "duration_s": 1.0, "qps": qps, "depth": depth}
    return flow_run.FlowSpec(**made, transport=transport, verb=verb, check=check)


@settings(max_examples=samples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), qps=st.integers(1, 64), depth=st.integers(0, 20_000))
def test_flow_accepted_by_the_planner_fits_into_the_completion_queue(monkeypatch, kind, qps, depth):
    """Both ends are created as by the engine, and the requests of all QPs complete at once."""
    spec = spec_of(kind, qps, depth)
    try:
        flow_spec.check(spec)
    except UsageError:
        return
    node = modules(monkeypatch)
    module, name = KINDS[kind]
    engine_spec = flow_run.engine_spec(spec)
    for end in ("Sender", "Receiver"):
        task = getattr(getattr(node, module), f"{name}{end}")("t", Rnic("rxe0"), engine_spec, lambda *_, **__: None)
        per_qp = sum(task.capacity(SimpleNamespace(number=0)))
        assert per_qp <= flow_spec.requests_a_qp(engine_spec["depth"])
        assert qps * per_qp <= completions.CQ_ENTRIES


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_flow_default_depth_on_maximum_qps_is_accepted(kind):
    flow_spec.check(spec_of(kind, flow_spec.MAX_QPS, 0))


def test_flow_deeper_than_the_completion_queue_is_refused_with_the_limit():
    """A depth of 4,096 used to be accepted with a completion queue of 4,096, but there are twice as many receives."""
    flow_spec.check(spec_of(("rc", "send", False), 1, 4096))
    with pytest.raises(UsageError, match=r"depth 4096 on 4 QPs: up to 32896 .* has 32767 entries; use a smaller depth"):
        flow_spec.check(spec_of(("rc", "send", False), 4, 4096))


def test_engine_rejects_a_qp_that_exceeds_the_rnics_completion_queue(monkeypatch):
    """Two flows on one RNIC, each of which would fit alone."""
    modules(monkeypatch)
    verbs = sys.modules["faultbed.traffic.node.verbs"]
    assert isinstance(verbs, types.ModuleType)
    monkeypatch.delitem(sys.modules, "faultbed.traffic.node.engine", raising=False)
    from faultbed.traffic.node import engine as engine_module

    monkeypatch.setitem(sys.modules, "faultbed.traffic.node.engine", engine_module)
    made, lines = [], []
    rnic = SimpleNamespace(name="rxe0", address="10.0.0.1", cq_entries=100)

    class Task:
        name = "t"

        def __init__(self):
            self.spec = {"qp": {}}
            self.rnic, self.conns = rnic, {0: SimpleNamespace(task=self, qp=None, number=0, generation=0, state="")}

        def capacity(self, _conn):
            return 10, 50

        def make_qp(self, **wanted):
            made.append(wanted)
            return SimpleNamespace(qpn=len(made), psn=1)

        def endpoint(self, _conn):
            return {}

    one = SimpleNamespace(tasks={"a": Task(), "b": Task()}, by_qpn={}, emit=lambda event, **_: lines.append(event))
    request = {"conn": 0, "generation": 1, "flow_label": 0, "psn": 1}
    engine_module.Engine.do_qp(one, {"task": "a", **request})
    with pytest.raises(completions.CompletionQueueFull, match="has 100 entries, and a QP with 60 requests beside 60"):
        engine_module.Engine.do_qp(one, {"task": "b", **request})
    assert len(made) == 1
    assert lines == ["qp"]
