"""Flows as the workload of an experiment: every option of the command line, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from experiment_text import COLLECTIVE, FLOW, read, refused
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import soft_topology

from faultbed.harness.cli.traffic.flows_and_collectives import flow as flow_command
from faultbed.harness.cli.traffic.flows_and_collectives import specs_of
from faultbed.harness.experiment import workload_specs
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.toml_text import inline
from faultbed.harness.experiment.workload_file import Flow
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.traffic.flows.flow_run import SPREADS, TRANSPORTS, VERBS


def test_experiment_flow_becomes_a_flow_workload():
    text = """
name = "f"
[workload]
flow = "write"
src = "host1:rxe0"
dst = "host3:rxe0"
duration = "9s"
qps = 4
"""

    workload = fit(read(text), soft_topology(), "soft").workload

    assert workload == Flow(
        flow="write",
        src="host1:rxe0",
        dst="host3:rxe0",
        qps=4,
        spread="each",
        size_bytes=65536,
        depth=16,
        duration_ns=9_000_000_000,
        pairs=(("host1:rxe0", "host3:rxe0"),),
    )


flow_words = st.fixed_dictionaries(
    {
        "flow": st.sampled_from(VERBS),
        "transport": st.sampled_from(sorted(TRANSPORTS)),
        "size": st.sampled_from(["64B", "4KiB", "64KiB", "1MB"]),
        "qps": st.integers(1, 4),
        "spread": st.sampled_from(SPREADS),
        "depth": st.integers(0, 64),
        "entropy": st.integers(0, 2),
        "admit": st.integers(0, 2),
        "rate": st.one_of(st.integers(0, 1000).map("{}Mb/s".format), st.sampled_from(["0b/s", "20Mb/s", "1.5Gb/s"])),
        "on": st.sampled_from(["20ms", "1.5s"]),
        "off": st.sampled_from(["250us", "1m"]),
        "latency": st.booleans(),
        "late_receives": st.just("5ms"),
        "check": st.booleans(),
        "probe": st.booleans(),
        "duration": st.sampled_from(["9s", "500ms"]),
    }
).flatmap(
    lambda words: st.sets(st.sampled_from(sorted(words)), max_size=6).map(
        lambda names: {name: words[name] for name in sorted(names | {"flow", "duration"})}
    )
)


@given(flow_words)
def test_experiment_flow_equals_the_command_lines_flow(words):
    """Equal parameters give equal flows, defaults included, and both sides reject the same ones."""
    ends = ("host1:rxe0", "host3:rxe0")
    args = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in words.items()
        if value is not False
    ]
    parsed = flow_command.make_context("flow", [*ends, *args, "--qp", "timeout=14"]).params
    options = {name: parsed[name] for name in parsed if name not in ("src", "dst", "out", "perftest_json", "as_json")}
    lines = "\n".join(f"{name} = {inline(value)}" for name, value in words.items())
    text = f'name = "x"\n[workload]\n{lines}\nsrc = "{ends[0]}"\ndst = "{ends[1]}"\n'
    try:
        work = read(text).workload
    except ConfigError as error:
        with pytest.raises(UsageError) as caught:
            specs_of([ends], **options)
        assert str(caught.value) in str(error)
    else:
        assert workload_specs.flow_specs(replace(work, pairs=(ends,))) == specs_of([ends], **options)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('transport = "tcp"', 'workload.transport: no transport "tcp"; choose one of rc, uc, ud'),
        ('on = "20ms"', "workload: a flow with bursts needs both"),
        ('on = "20"', 'workload.on: 20 has no unit; write "20s"'),
        ("rate = -1", "workload.rate: -1 is out of range; write at least 0b/s"),
        ('late_receives = "soon"', 'workload.late_receives: "soon" is not a duration'),
        ('late_receives = "5ms"', "workload: late receives need send or write-imm"),
        ("admit = 1\nlatency = true", "workload: an admitted flow"),
        ('transport = "ud"\nsize = "1KiB"', "workload: ud carries send"),
        ("latency = true\nprobe = true", "workload: latency times the flow's own messages, probe those of the flow"),
    ],
)
def test_experiment_impossible_flow_is_rejected(more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(PATTERN.format(f'pattern = "incast"\n{more}'))


PATTERN = 'name = "x"\n[workload]\nflow = "write"\nduration = "9s"\n{}\n'


def test_experiment_pattern_becomes_a_flow_workload():
    work = fit(read(PATTERN.format('pattern = "incast"')), soft_topology(), "soft").workload
    assert work.pairs == tuple((f"host{number}:rxe0", "host1:rxe0") for number in (2, 3, 4))
    for more, message in (
        ('pattern = "incst"', 'workload.pattern: no pattern "incst"; did you mean incast?'),
        ("", "workload: name src and dst, or a pattern"),
        ('src = "host1:rxe0"', "workload: name src and dst, or a pattern"),
        ('src = "a"\ndst = "b"\npattern = "incast"', "workload: name src and dst, or a pattern"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(PATTERN.format(more))


def test_experiment_flow_takes_verb_and_spread():
    work = decode(FLOW.format("read", 'spread = "split"\nqps = 4').encode(), source="x").workload
    assert (work.flow, work.spread, work.qps) == ("read", "split", 4)


@pytest.mark.parametrize(
    ("verb", "more", "message"),
    [
        ("push", "", 'workload.flow: no flow "push"; choose one of write, send, read, atomic'),
        ("send", 'spread = "splitt"', 'workload.spread: no spread "splitt"; did you mean split?'),
    ],
)
def test_experiment_unknown_flow_is_rejected_with_its_path(verb, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        decode(FLOW.format(verb, more).encode(), source="x.toml")


INSIDE_ONE_HOST = {
    "workload.dst": FLOW.format("write", "").replace("host3", "host1:rxe1").replace('"host1"', '"host1:rxe0"'),
    "workload: all-reduce": COLLECTIVE.format("all-reduce", 'ranks = ["host1:rxe0", "host1:rxe1", "host3:rxe0"]'),
    "workload: job of 2 ranks": """
name = "x"
[workload]
grid = "dp=2"
phases = ["dp:all-reduce:64KiB"]
iterations = 2
ranks = ["host1:rxe0", "host1:rxe1"]
""",
}


@pytest.mark.parametrize(("message", "text"), INSIDE_ONE_HOST.items())
def test_experiment_traffic_within_a_host_is_rejected_on_a_soft_lab_only(message, text):
    """This used to be found only after the lab was reset, and the run was an ERROR."""
    output = refused(text)
    assert message in output
    assert "host1:rxe0 -> host1:rxe1 is inside one host" in output
    fit(read(text), soft_topology(), "rack")
