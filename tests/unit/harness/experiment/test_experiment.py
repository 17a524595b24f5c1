"""The experiment file is decoded into frozen types, and every error names its path in the file."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest
from experiment_text import COLLECTIVE, FLOW, JOB, read, refused
from house import DEMO
from synthetic_run import soft_topology

from faultbed.harness.experiment.experiment_file import decode, load
from faultbed.harness.experiment.needs import parse_need, unmet
from faultbed.harness.experiment.workload_file import Collective
from faultbed.harness.run.loop import resolve
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import ConfigError, FaultbedError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

GOOD = """
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "30s"
[[faults]]
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "8s"
for = "1s"
[[expect]]
metric = "recovery.total"
max = "3s"
"""


def test_demo_experiment_fits_the_soft_lab():
    demo = fit(load(DEMO), soft_topology(), "soft")

    assert isinstance(demo.workload, Collective)
    assert demo.workload.ranks == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
    assert [fault.id for fault in demo.faults] == ["uplink", "loss", "slow-gpu"]
    assert unmet(demo.needs, soft_topology()) == ()


def test_experiment_quantities_become_numbers_and_the_result_is_frozen():
    experiment = read(GOOD)

    assert experiment.workload.duration_ns == 30_000_000_000
    assert experiment.workload.size_bytes == 1 << 20
    assert experiment.faults[0].at == (8_000_000_000,)
    assert experiment.expectations[0].maximum == 3.0
    with pytest.raises(FrozenInstanceError):
        experiment.name = "y"


@pytest.mark.parametrize(
    ("old", "new", "path", "reason"),
    [
        ("rtsw1:ctsw1", "rtsw9:ctsw1", "faults[0].target", "did you mean rtsw2:ctsw1?"),
        ('kind = "link.flap"', 'kind = "link.flap"\nduratoin = "1s"', "faults[0]", 'no key "duratoin"'),
        ('target = "rtsw1:ctsw1"', "target = 7", "faults[0].target", "expected"),
        ('target = "rtsw1:ctsw1"', "target = []", "faults[0].target", "empty list"),
        ('at = "8s"', "", "faults[0]", "`at`"),
        ('at = "8s"', 'at = "8"', "faults[0].at", '8 has no unit; write "8s"'),
        ('at = "8s"', 'at = ["9s", "6s"]', "faults[0].at", "before it begins"),
        ('at = "8s"', 'at = "29500ms"', "faults[0]", "workload ends at 30 s"),
        ('at = "8s"', 'at = "1s"', "expect[0].metric", "fault-free start"),
        ("recovery.total", "recovry.total", "expect[0].metric", "did you mean recovery.total?"),
        ("recovery.total", "recovery.nobody", "expect[0].metric", "no metric"),
        ('max = "3s"', "max = 3", "expect[0].max", 'write "3s"'),
        ('max = "3s"', "", "expect[0]", "no bound"),
        ('max = "3s"', 'max = "3s"\nequals = 3', "expect[0]", "stands alone"),
        ('max = "3s"', "equals = 3", "expect[0].equals", 'write "3s"'),
        ('max = "3s"', "equals = false", "expect[0].equals", "not false"),
        ('recovery.total"\nmax = "3s"', 'straggler"\nequals = "hots2"', "expect[0].equals", "did you mean host2?"),
        ('size = "1MiB"', 'size = "1MB "\nsise = 3', "workload", "did you mean size?"),
        ('size = "1MiB"', 'size = "big"', "workload.size", "16MiB"),
        ('size = "1MiB"', 'size = "0B"', "workload.size", "write more than 0B"),
        ('duration = "30s"', "", "workload", "iterations or duration"),
        ('collective = "all-reduce"', "", "workload", "say what runs"),
        ('collective = "all-reduce"', 'collective = "all-gossip"', "workload.collective", "all-gossip"),
        ('duration = "30s"', 'duration = "30s"\nranks = ["host1:rxe0"]', "workload.ranks", "at least 2"),
        (
            'duration = "30s"',
            'duration = "30s"\nranks = ["host1", "host2:rxe0"]',
            "workload.ranks[0]",
            "not an RNIC",
        ),
        ('name = "x"', 'name = "x"\nsed = 3', "", "did you mean seed?"),
        ('name = "x"', 'name = "X Y"', "name", ""),
        ('name = "x"', 'name = "x\\n"', "name", ""),
        ("[[faults]]", f'[[faults]]\nid = "{"a" * 300}"', "faults[0].id", "has 300 characters"),
        ("[[faults]]", f'[[faults]]\nid = "{"a" * 64}"', "faults[0].id", "has 64 characters"),
        ("[[faults]]", '[[faults]]\nid = "a/b"', "faults[0].id", "must be lower-case"),
        (
            'name = "x"',
            'name = "x"\nlab = { needs = ["uplink >= 2"] }',
            "lab.needs[0]",
            "did you mean uplinks?",
        ),
    ],
)
def test_experiment_error_names_its_path(old, new, path, reason):
    assert old in GOOD

    message = refused(GOOD.replace(old, new, 1))

    assert message.startswith(f"x.toml: {path}: " if path else "x.toml: ")
    assert reason in message


def test_experiment_absolute_rate_bound_is_rejected_on_a_soft_lab():
    text = GOOD.replace("recovery.total", "goodput.mean").replace('max = "3s"', 'min = "1Gb/s"')

    assert "ratios within one run" in refused(text)
    fit(read(text), soft_topology(), "rack")


def test_experiment_datagram_flow_label_is_rejected_on_a_soft_lab():
    flow = 'flow = "send"\nsrc = "host1:rxe0"\ndst = "host3:rxe0"\ntransport = "ud"\nqp = { flow_label = 7 }'
    text = GOOD.replace('collective = "all-reduce"', flow).replace('size = "1MiB"', 'size = "1KiB"')

    assert refused(text).startswith("x.toml: workload.qp: soft RoCE sends datagrams")
    fit(read(text), soft_topology(), "rack")


def test_experiment_not_toml_or_missing_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="not TOML"):
        decode(b"name = ", source="x.toml")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")


def test_experiment_faults_of_one_kind_get_distinct_ids():
    block = GOOD[GOOD.index("[[faults]]") : GOOD.index("[[expect]]")]

    assert [fault.id for fault in read(GOOD + block).faults] == ["link.flap", "link.flap-2"]


def test_experiment_duplicate_fault_id_is_rejected():
    block = GOOD[GOOD.index("[[faults]]") : GOOD.index("[[expect]]")] + 'id = "link.flap"\n'

    with pytest.raises(ConfigError, match=r"faults\[1\]\.id: .* faults\[0\]"):
        read(GOOD + block)


@pytest.mark.parametrize(
    ("need", "met"),
    [
        ("rdma", True),
        ("gpu", True),
        ("hosts >= 4", True),
        ("hosts > 4", False),
        ("uplinks >= 2", True),
        ("uplinks >= 3", False),
        ("racks == 2", True),
        ("rnics < 2", False),
    ],
)
def test_experiment_needs_are_checked_against_the_topology(need, met):
    assert (unmet((parse_need(need),), soft_topology()) == ()) is met


@pytest.mark.parametrize("text", ["hosts", "rdma >= 2", "hosts => 2", "hosts >= two", ""])
def test_need_that_makes_no_sense_is_rejected(text):
    with pytest.raises(ValueError, match=r"."):
        parse_need(text)


def test_experiment_collective_takes_the_command_lines_parameters():
    text = COLLECTIVE.format("reduce-scatter", 'algorithm = "recursive-halving"\ndtype = "bf16"\nop = "avg"')
    work = decode(text.encode(), source="x.toml").workload
    assert (work.collective, work.algorithm, work.dtype, work.op) == (
        "reduce-scatter",
        "recursive-halving",
        "bf16",
        "avg",
    )
    assert decode(COLLECTIVE.format("barrier", "").encode(), source="x").workload.algorithm == "auto"


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("all-reduc", "", 'workload.collective: no collective "all-reduc"; did you mean all-reduce'),
        ("all-to-all", 'algorithm = "ring"', 'workload.algorithm: no algorithm "ring"; choose one of auto, full-mesh'),
        ("all-reduce", 'dtype = "fp8"', 'workload.dtype: no dtype "fp8"; did you mean'),
        ("all-reduce", 'op = "prod"', 'workload.op: no op "prod"; choose one of sum, max, avg'),
        ("broadcast", "root = -1", "workload.root: -1 is out of range; write at least 0"),
    ],
)
def test_experiment_unknown_collective_is_rejected_with_its_path(name, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        decode(COLLECTIVE.format(name, more).encode(), source="x.toml")


@pytest.mark.parametrize("text", [COLLECTIVE.format("barrier", "{}"), FLOW.format("write", "{}"), JOB])
def test_experiment_every_workload_accepts_qp_parameters(text):
    work = read(text.format("[workload.qp]\ntimeout = 18\nmtu = 1024")).workload
    assert (work.qp.timeout, work.qp.mtu, work.qp.retry_cnt) == (18, 1024, 6)
    for values, message in (
        ("retry_cnt = 7", "workload.qp.retry_cnt: 7 is out of range; write 0 to 6 (rxe treats 7 as 'retry forever'"),
        ("mtu = 1500", "workload.qp.mtu: 1500 is not allowed; choose one of 1024, 2048, 4096"),
        ("timeuot = 1", 'workload.qp: no key "timeuot" here; did you mean timeout?'),
        ('timeout = "18"', 'workload.qp.timeout: expected a whole number, got "18"; write one such as 1'),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(text.format(f"[workload.qp]\n{values}"))


TWO_FAULTS = """
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "30s"
[[faults]]
kind = "link.down"
target = "rtsw1:ctsw1"
at = "20s"
for = "1s"
[[faults]]
kind = "{kind}"
target = "{target}"
at = "{at}"
for = "1s"
{more}
"""


@pytest.mark.parametrize(
    ("kind", "target", "at", "more", "message"),
    [
        ("packet.drop", "rtsw1:ctsw2", "8s", "set = { share = 7 }", "x.toml:17: faults[1].set.share: 7 is not in"),
        ("gpu.throttle", "rtsw1:ctsw2", "8s", "", "x.toml:14: faults[1].target: gpu.throttle cannot target"),
        ("link.down", "rtsw1:ctsw1", "19.5s", "", "x.toml:7: faults[0]: link.down on rtsw1:ctsw1 overlaps faults[1] ("),
        (
            "storage.stall",
            "host1",
            "8s",
            "",
            "x.toml:12: faults[1]: storage.stall on host1: the workload has no",
        ),
    ],
)
def test_experiment_misfit_fault_is_named_by_its_place_in_the_file(kind, target, at, more, message):
    """The plan orders faults by time, so an index into it would name another fault."""
    text = TWO_FAULTS.format(kind=kind, target=target, at=at, more=more).encode()

    with pytest.raises(FaultbedError) as caught:
        resolve(decode(text, source="x.toml"), text, lab_inventory.load(inventories() / "soft.yml"))

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("metric", "written", "bound"),
    [("recovery.total", '"3s"', 3.0), ("recovery.total", '"0s"', 0.0), ("iterations", "12", 12)],
)
def test_experiment_equals_is_in_the_metric_unit(metric, written, bound):
    """A duration that stayed text would equal no measured number, so the check could never pass."""
    text = GOOD.replace("recovery.total", metric).replace('max = "3s"', f"equals = {written}")
    (expected,) = decode(text.encode(), source="x.toml").expectations
    assert (expected.equals, type(expected.equals)) == (bound, type(bound))


@pytest.mark.parametrize("metric", ["dip", "split.wire", "jfi", "slo_attainment"])
def test_experiment_share_written_in_percent_is_refused(metric):
    """A share never reaches 20, so that the bound held whatever the fault cost."""
    text = GOOD.replace("recovery.total", metric)
    message = refused(text.replace('max = "3s"', "max = 20"))
    assert f"expect[0].max: {metric} is never above 1: 20 decides nothing; write 0.2 for 20 %" in message
    assert decode(text.replace('max = "3s"', "max = 1").encode(), source="x.toml").expectations[0].maximum == 1.0


def test_experiment_number_as_text_is_no_bound_of_a_count():
    message = refused(GOOD.replace("recovery.total", "iterations").replace('max = "3s"', 'equals = "12"'))
    assert "expect[0].equals: iterations is a plain number" in message
