"""Invalid specs are refused in one sentence, before anything is started on a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_labs import NothingStarts

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.workloads import collective

TOPOLOGY = lab_inventory.load(Path("inventory/soft.yml")).topology


FLOW = {"src": "host1:rxe0", "dst": "host3:rxe0", "duration_s": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"message_bytes": 0}, "message size must be 1 byte"),
        ({"qps": 0}, "1 to 64 QPs"),
        ({"messages": 5}, "either a duration or a number"),
        ({"duration_s": None}, "either a duration or a number"),
        ({"duration_s": 0.0}, "above 0 s"),
        ({"duration_s": None, "messages": 1, "qps": 2}, "cannot be spread"),
        ({"dst": "host1:rxe0"}, "two RNICs"),
        ({"dst": "host1:rxe1"}, "inside one host"),
        ({"dst": "host3:rxe9"}, 'no target "host3:rxe9".*did you mean'),
        ({"dst": "rtsw1"}, "is a switch"),
        ({"qp": QpParams(retry_cnt=7)}, "7 as .retry forever."),
        ({"qp": QpParams(rnr_retry=8)}, "0 to 6, or 7 to retry forever"),
        ({"late_receives_ms": -1.0}, "late_receives_ms cannot be negative"),
        ({"late_receives_ms": 5.0}, "late receives need send or write-imm over rc"),
        ({"late_receives_ms": 5.0, "verb": "send", "transport": "uc"}, "late receives need send or write-imm over rc"),
        ({"late_receives_ms": 1e4, "verb": "send"}, "exceeds the operation deadline of 10 s"),
        ({"check": True}, r"bytes can be checked for rc \(send, write-imm, read\), uc \(write, send\), ud \(send\)"),
        ({"check": True, "verb": "atomic", "message_bytes": 8}, "must know when a message has arrived"),
        (
            {"check": True, "echo": True, "verb": "send", "transport": "ud", "message_bytes": 64},
            "bytes can be checked for",
        ),
        ({"check": True, "verb": "send", "transport": "uc", "chain": 2}, "a checked flow cannot have late receives"),
        ({"check": True, "verb": "send", "late_receives_ms": 1.0}, "a checked flow cannot have late receives"),
        ({"check": True, "verb": "send", "message_bytes": 1 << 28}, "limit 268435456; use a smaller depth"),
        ({"qp": QpParams(timeout=0)}, "timeout must be 1 to 31"),
        ({"qp": QpParams(mtu=1500)}, "1024, 2048 or 4096"),
        ({"verb": "push"}, 'no verb "push"; choose one of write, send, read, atomic'),
        ({"verb": "atomic"}, "an atomic has 8 bytes, got 65536"),
        ({"spread": "spray"}, 'no spread "spray"'),
        ({"entropy": -1}, "share 1 to 4096 source ports"),
        ({"spread": "split", "qps": 3}, "cannot be split evenly over 3 QPs"),
        ({"rate_bps": -1.0}, "cannot be negative"),
        ({"on_s": 1.0}, "both, an on time and an off time"),
        ({"transport": "xrc"}, 'no transport "xrc"; choose one of rc, uc, ud'),
        ({"transport": "ud"}, "ud carries send, not write"),
        ({"transport": "uc", "verb": "read"}, "uc carries write and send, not read"),
        ({"transport": "ud", "verb": "send"}, "at most 4096 bytes .the MTU., got 65536"),
        (
            {"transport": "ud", "verb": "send", "message_bytes": 64, "qp": QpParams(flow_label=7)},
            "ignores flow labels: flow_label=7 is for rc and uc here",
        ),
        ({"admit": 2, "verb": "send"}, "admission needs writes over rc"),
        ({"admit": -1}, "at least 1 grant"),
        ({"admit": 1, "rate_bps": 1e6}, "sends when it gets a grant"),
        ({"transport": "uc", "latency": True}, "arrivals are not acknowledged"),
    ],
)
def test_flow_spec_rejects_invalid_values(change, message):
    with pytest.raises(UsageError, match=message):
        flow_run.start(NothingStarts(), flow_run.FlowSpec(**{**FLOW, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size_bytes": 0}, "multiple of 4 bytes .* above 0"),
        ({"size_bytes": 1022}, "multiple of 4 bytes"),
        (
            {"algorithm": "rign"},
            'no algorithm "rign" for all-reduce; choose one of auto, ring, .*; did you mean ring.$',
        ),
        ({"algorithm": "star"}, 'no algorithm "star" for all-reduce; choose one of auto, ring, .*, hierarchical$'),
        ({"collective": "barrier", "algorithm": "ring"}, "for barrier; choose one of auto, recursive-doubling$"),
        ({"collective": "all-in"}, 'collective "all-in"'),
        ({"ranks": ("host1:rxe0",)}, "at least 2 ranks"),
        ({"ranks": ("host1:rxe0", "host2:rxe0", "host1:rxe0")}, "host1:rxe0 is named twice"),
        ({"ranks": ("host1:rxe0", "host1:rxe1", "host2:rxe0")}, "neighbours are on different hosts"),
        ({"ranks": ("host1:rxe0", "host7")}, "host7"),
        ({"iterations": 0}, "at least 1 iteration"),
        ({"duration_s": 2.0}, "either a duration or a number"),
        ({"segment_bytes": 10}, "segment size"),
        ({"slots": 1}, "slots"),
        ({"compute_units": 5, "gpu": "gpu7"}, "has no GPU gpu7"),
        ({"dtype": "fp8"}, 'no data type "fp8"; choose one of fp32, fp16, bf16, int32'),
        ({"redop": "prod"}, 'no reduction "prod"; choose one of sum, max, avg'),
        ({"dtype": "fp16", "size_bytes": 1023}, r"multiple of 2 bytes \(fp16\)"),
        ({"collective": "broadcast", "root": 4}, "root of broadcast must be a rank from 0 to 3, got 4"),
        (
            {"collective": "all-to-all", "size_bytes": 40},
            "10 elements cannot be divided among 4 ranks; use 12 elements",
        ),
        ({"collective": "all-to-allv", "size_bytes": 8}, "at least one element for each, got 2"),
        ({"collective": "all-to-all", "in_place": True}, "cannot run in place"),
        ({"algorithm": "hierarchical", "ranks": ("host1", "host2", "host3")}, "the same number of consecutive ranks"),
        ({"skew": -1.0}, "skew cannot be negative"),
        ({"deadline_s": 0.0}, "deadline must be above 0 s"),
    ],
)
def test_collective_spec_rejects_invalid_values(change, message):
    with pytest.raises(UsageError, match=message):
        collective.start(NothingStarts(), collective.CollectiveSpec(**{"iterations": 3, **change}))


@pytest.mark.parametrize(
    ("lab_kind", "transport", "label"), [("soft", "rc", 7), ("soft", "uc", 7), ("soft", "ud", 0), ("rack", "ud", 7)]
)
def test_flow_label_is_accepted_where_it_has_an_effect(lab_kind, transport, label):
    flow_run.check_on(lab_kind, transport=transport, qp=QpParams(flow_label=label))


@pytest.mark.parametrize(("transport", "verb", "check", "kind"), [
    ("uc", "write", True, "numbered"), ("ud", "send", True, "numbered"), ("uc", "write", False, "unreliable"),
    ("rc", "send", True, "checked"), ("rc", "send", False, "flow"),
])  # fmt: skip
def test_checking_task_runs_only_for_a_checked_flow(transport, verb, check, kind):
    fields = {"transport": transport, "verb": verb, "check": check, "message_bytes": 512}
    ends = flow_run._tasks(NothingStarts(), flow_run.FlowSpec(**{**FLOW, **fields}), "")
    assert [end.kind for end in ends] == [f"{kind}_tx", f"{kind}_rx"]


def test_infinite_rnr_retry_is_never_the_default():
    assert QpParams().rnr_retry < 7
    output = flow_run.FlowSpec(**{**FLOW, "verb": "send", "late_receives_ms": 5.0, "qp": QpParams(rnr_retry=7)})
    flow_run.check(output)
    assert flow_run.engine_spec(output)["qp"]["rnr_retry"] == 7
