"""The experiment file is read into frozen types, and what is wrong in it is named with its path."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import soft_topology

from harness import run, workload
from harness.cli.traffic import flow as flow_command
from harness.cli.traffic import flow_specs
from harness.experiment import decode, load
from harness.fit import fit
from harness.needs import parse_need, unmet
from harness.plan import decode as plan_decode
from harness.plan import encode, plan
from harness.workload_file import KEYS, Collective, Flow, duration_ns, workload_of
from testbed import inventory, shipped
from testbed.errors import ConfigError, UsageError
from traffic.flow import SPREADS, TRANSPORTS, VERBS, check
from traffic.inference import InferenceSpec
from traffic.plan import QpParams
from traffic.ranking import RankingSpec

DEMO = Path(__file__).parents[1] / "experiments" / "demo.toml"

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


def read(text):
    return decode(text.encode(), source="x.toml")


def refused(text):
    with pytest.raises(ConfigError) as caught:
        fit(read(text), soft_topology(), "soft")
    return str(caught.value)


def test_the_demo_fits_the_soft_lab():
    demo = fit(load(DEMO), soft_topology(), "soft")

    assert isinstance(demo.workload, Collective)
    assert demo.workload.ranks == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
    assert [fault.id for fault in demo.faults] == ["uplink", "loss", "slow-gpu"]
    assert unmet(demo.needs, soft_topology()) == ()


def test_quantities_become_numbers_and_the_result_is_frozen():
    experiment = read(GOOD)

    assert experiment.workload.duration_ns == 30_000_000_000
    assert experiment.workload.size_bytes == 1 << 20
    assert experiment.faults[0].at_earliest_ns == experiment.faults[0].at_latest_ns == 8_000_000_000
    assert experiment.expectations[0].maximum == 3.0
    with pytest.raises(FrozenInstanceError):
        experiment.name = "y"


def test_a_flow_is_a_workload_too():
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
        "verb": st.sampled_from(VERBS),
        "transport": st.sampled_from(sorted(TRANSPORTS)),
        "size": st.sampled_from(["64", "4KiB", "64KiB", "1MB"]),
        "qps": st.integers(1, 4),
        "spread": st.sampled_from(SPREADS),
        "depth": st.integers(0, 64),
        "admit": st.integers(0, 2),
        "rate": st.floats(0, 1000),
        "on": st.sampled_from([None, "20ms", "1.5s"]),
        "off": st.sampled_from([None, "250us", "1m"]),
        "latency": st.booleans(),
        "late_receives": st.sampled_from([None, "5ms"]),
        "check": st.booleans(),
        "probe": st.booleans(),
        "duration": st.sampled_from(["9s", "500ms"]),
    }
)


@given(flow_words)
def test_a_flow_of_an_experiment_is_that_of_the_command_line(words):
    """The same words give the same flows; what cannot be meant is refused by both."""
    ends = ("host1:rxe0", "host3:rxe0")
    typed = flow_specs([ends], **words, memory="host", qp=QpParams())
    said = {("flow" if name == "verb" else name): value for name, value in words.items() if value is not None}
    try:
        work = workload_of({**said, "src": ends[0], "dst": ends[1]}, "x.toml")
    except ConfigError:
        with pytest.raises(UsageError):
            check(typed[0])
    else:
        check(typed[0])
        assert workload._flows(replace(work, pairs=(ends,))) == typed


def test_an_experiment_can_say_all_of_a_flow():
    """Every option of the command but that of GPU memory, and those of how it is told; nobody may be forgotten."""
    options = {parameter.name for parameter in flow_command.params} - {
        "memory",
        "out",
        "perftest_json",
        "as_json",
        "verb",
    }
    assert options <= set(KEYS["flow"]), options - set(KEYS["flow"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('transport = "tcp"', 'workload.transport: no transport "tcp"; there is rc, uc, ud'),
        ('on = "20ms"', "workload: a flow with bursts needs both"),
        ('on = "20"', 'workload.on: "20" is not a duration'),
        ("rate = -1", "workload.rate"),
        ('late_receives = "soon"', 'workload.late_receives: "soon" is not a duration'),
        ('late_receives = "5ms"', "workload: late receives are of send and write-imm"),
        ("admit = 1\nlatency = true", "workload: an admitted flow"),
        ('transport = "ud"\nsize = "1KiB"', "workload: ud carries send"),
    ],
)
def test_what_a_flow_cannot_be_is_refused(more, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(PATTERN.format(f'pattern = "incast"\n{more}'))


PATTERN = 'name = "x"\n[workload]\nflow = "write"\nduration = "9s"\n{}\n'


def test_flows_of_a_pattern_are_a_workload_too():
    work = fit(read(PATTERN.format('pattern = "incast"')), soft_topology(), "soft").workload
    assert work.pairs == tuple((f"host{number}:rxe0", "host1:rxe0") for number in (2, 3, 4))
    for more, says in (
        ('pattern = "incst"', 'workload.pattern: no pattern "incst"; did you mean incast?'),
        ("", "workload: name src and dst, or a pattern"),
        ('src = "host1:rxe0"', "workload: name src and dst, or a pattern"),
        ('src = "a"\ndst = "b"\npattern = "incast"', "workload: name src and dst, or a pattern"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            read(PATTERN.format(more))


@pytest.mark.parametrize(
    ("old", "new", "path", "says"),
    [
        ("rtsw1:ctsw1", "rtsw9:ctsw1", "faults[0].target", "did you mean rtsw2:ctsw1?"),
        ('kind = "link.flap"', 'kind = "link.flap"\nduratoin = "1s"', "faults[0]", 'no key "duratoin"'),
        ('target = "rtsw1:ctsw1"', "target = 7", "faults[0].target", "expected"),
        ('target = "rtsw1:ctsw1"', "target = []", "faults[0].target", "empty list"),
        ('at = "8s"', "", "faults[0]", "`at`"),
        ('at = "8s"', 'at = "8"', "faults[0].at", '"8" is not a duration'),
        ('at = "8s"', 'at = ["9s", "6s"]', "faults[0].at", "before it begins"),
        ('at = "8s"', 'at = "29500ms"', "faults[0]", "workload ends at 30 s"),
        ('at = "8s"', 'at = "1s"', "expect[0].metric", "fault-free start"),
        ("recovery.total", "recovry.total", "expect[0].metric", "did you mean recovery.total?"),
        ("recovery.total", "recovery.nobody", "expect[0].metric", "no metric"),
        ('max = "3s"', "max = 3", "expect[0].max", 'write "3s"'),
        ('max = "3s"', "", "expect[0]", "no bound"),
        ('max = "3s"', 'max = "3s"\nequals = 3', "expect[0]", "stands alone"),
        ('size = "1MiB"', 'size = "1MB "\nsise = 3', "workload", "did you mean size?"),
        ('size = "1MiB"', 'size = "big"', "workload.size", "16MiB"),
        ('size = "1MiB"', 'size = "0"', "workload.size", "more than 0"),
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
        (
            'name = "x"',
            'name = "x"\nlab = { needs = ["uplink >= 2"] }',
            "lab.needs[0]",
            "did you mean uplinks?",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_path(old, new, path, says):
    assert old in GOOD

    message = refused(GOOD.replace(old, new, 1))

    assert message.startswith(f"x.toml: {path}: " if path else "x.toml: ")
    assert says in message


def test_absolute_rates_are_no_bounds_on_a_soft_lab():
    text = GOOD.replace("recovery.total", "goodput.mean").replace('max = "3s"', "min = 1")

    assert "ratios within one run" in refused(text)
    fit(read(text), soft_topology(), "rack")


def test_a_flow_label_that_datagrams_do_not_go_by_is_refused_on_a_soft_lab():
    flow = 'flow = "send"\nsrc = "host1:rxe0"\ndst = "host3:rxe0"\ntransport = "ud"\nqp = { flow_label = 7 }'
    text = GOOD.replace('collective = "all-reduce"', flow).replace('size = "1MiB"', 'size = "1KiB"')

    assert refused(text).startswith("x.toml: workload.qp: soft RoCE sends datagrams")
    fit(read(text), soft_topology(), "rack")


def test_not_toml_and_no_file_are_one_sentence_each(tmp_path):
    with pytest.raises(ConfigError, match="not TOML"):
        decode(b"name = ", source="x.toml")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")


def test_faults_of_one_kind_get_ids_of_their_own():
    block = GOOD[GOOD.index("[[faults]]") : GOOD.index("[[expect]]")]

    assert [fault.id for fault in read(GOOD + block).faults] == ["link.flap", "link.flap-2"]


def test_two_faults_with_one_id_are_refused():
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
def test_needs_are_held_against_the_topology(need, met):
    assert (unmet((parse_need(need),), soft_topology()) == ()) is met


@pytest.mark.parametrize("text", ["hosts", "rdma >= 2", "hosts => 2", "hosts >= two", ""])
def test_a_need_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_need(text)


COLLECTIVE = 'name = "x"\n[workload]\ncollective = "{0}"\nsize = "1MiB"\niterations = 3\n{1}\n'


def test_a_collective_takes_the_words_of_the_command_line():
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
    ("name", "more", "says"),
    [
        ("all-reduc", "", 'workload.collective: no collective "all-reduc"; did you mean all-reduce'),
        ("all-to-all", 'algorithm = "ring"', 'workload.algorithm: no algorithm "ring"; there is auto, full-mesh'),
        ("all-reduce", 'dtype = "fp8"', 'workload.dtype: no dtype "fp8"; did you mean'),
        ("all-reduce", 'op = "prod"', 'workload.op: no op "prod"; there is sum, max, avg'),
        ("broadcast", "root = -1", "workload.root: expected `int` >= 0"),
    ],
)
def test_a_collective_that_is_not_there_is_refused_with_its_path(name, more, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        decode(COLLECTIVE.format(name, more).encode(), source="x.toml")


FLOW = 'name = "x"\n[workload]\nflow = "{0}"\nsrc = "host1"\ndst = "host3"\nduration = "3s"\n{1}\n'


def test_a_flow_takes_its_verb_and_its_spread():
    work = decode(FLOW.format("read", 'spread = "split"\nqps = 4').encode(), source="x").workload
    assert (work.flow, work.spread, work.qps) == ("read", "split", 4)


@pytest.mark.parametrize(
    ("verb", "more", "says"),
    [
        ("push", "", 'workload.flow: no flow "push"; there is write, send, read, atomic'),
        ("send", 'spread = "splitt"', 'workload.spread: no spread "splitt"; did you mean split?'),
    ],
)
def test_a_flow_that_is_not_there_is_refused_with_its_path(verb, more, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        decode(FLOW.format(verb, more).encode(), source="x.toml")


JOB = """
name = "x"
[workload]
grid = "tp=2,dp=2"
phases = ["tp:all-reduce:64KiB", "dp:all-gather:1MiB:ring"]
iterations = 20
{}
"""


def test_a_job_is_a_workload_and_its_plan_is_plain():
    experiment = fit(read(JOB.format("")), soft_topology(), "soft")
    work = experiment.workload
    assert (work.grid, duration_ns(work)) == ((("tp", 2), ("dp", 2)), None)
    assert [(one.along, one.size_bytes, one.algorithm) for one in work.phases] == [
        ("tp", 65536, "auto"),
        ("dp", 1 << 20, "ring"),
    ]
    assert work.ranks == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
    planned = plan(experiment, inventory_digest="0", version="0")
    assert plan_decode(encode(planned)).workload["phases"][1]["along"] == "dp"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tp=2", "tp", 'workload.grid: "tp" is not a dimension'),
        ("tp:all", "pp:all", 'workload: the grid has no dimension "pp"; it has tp, dp'),
        ("64KiB", "64KB!", "workload.phases[0]: "),
        ("all-gather", "gossip", 'workload: no collective "gossip"'),
        (":ring", ":rong", 'workload: no algorithm "rong" for all-gather; there is auto, ring'),
        ("iterations", "iteration", 'workload: no key "iteration" here; did you mean iterations?'),
        ("grid", 'flow = "write"\ngrid', "workload: say what runs: "),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_with_its_path(old, new, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(JOB.format("").replace(old, new, 1))


def test_a_grid_that_the_lab_does_not_fill_is_refused():
    with pytest.raises(ConfigError, match=re.escape("workload.grid: has 8 ranks, but there are 4 RNICs")):
        fit(read(JOB.format("").replace("tp=2", "tp=4")), soft_topology(), "soft")


@pytest.mark.parametrize("text", [COLLECTIVE.format("barrier", "{}"), FLOW.format("write", "{}"), JOB])
def test_every_workload_has_parameters_of_its_queue_pairs(text):
    work = read(text.format("[workload.qp]\ntimeout = 18\nmtu = 1024")).workload
    assert (work.qp.timeout, work.qp.mtu, work.qp.retry_cnt) == (18, 1024, 6)
    for values, says in (
        ("retry_cnt = 7", "workload.qp: retry_cnt must be 0 to 6, got 7: rxe takes 7 as for ever"),
        ("mtu = 1500", "workload.qp: path MTU must be 1024, 2048 or 4096, got 1500"),
        ("timeuot = 1", 'workload.qp: no QP parameter "timeuot"; did you mean timeout?'),
        ('timeout = "18"', "workload.qp"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            read(text.format(f"[workload.qp]\n{values}"))


STORED_JOB = """
name = "job"
seed = 1
[workload]
grid = "dp=4"
phases = ["dp:all-reduce:1MiB"]
iterations = 5
[workload.storage]
host = "host4"
"""


def test_a_job_says_where_its_storage_is():
    made = decode((STORED_JOB + 'ingest = "64KiB"\ncheckpoint = "4MiB:5:async"\n').encode(), source="job.toml")
    storage = made.workload.storage
    assert (storage.host, storage.ingest_bytes, storage.checkpoint_bytes) == ("host4", 65536, 4 << 20)
    assert (storage.every, storage.mode) == (5, "async")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "for nothing"),
        ('ingests = "64KiB"', 'workload.storage: no key "ingests" here; did you mean ingest?'),
        ('ingest = "64 parsecs"', "workload.storage.ingest: "),
        ('checkpoint = "1MiB:often"', 'workload.storage.checkpoint: "often" is not a number of iterations'),
        ('checkpoint = "1MiB:5:later"', 'no checkpoints "later"; there is sync, staggered, async'),
        ('checkpoint = "1MiB:0"', "every 1 iteration or more"),
    ],
)
def test_storage_that_makes_no_sense_is_told_with_its_path(line, said):
    with pytest.raises(ConfigError) as caught:
        decode((STORED_JOB + line).encode(), source="job.toml")
    assert said in str(caught.value)


def test_storage_on_a_host_that_is_not_there_is_refused():
    made = decode((STORED_JOB.replace("host4", "host9") + 'ingest = "1KiB"').encode(), source="job.toml")
    with pytest.raises(ConfigError, match=r'workload\.storage\.host: no host "host9"; there is host1'):
        fit(made, soft_topology(), "soft")


FAULT_OF_A_PROGRAM = """
[[faults]]
kind = "{kind}"
target = "{target}"
at = "6s"
for = "2s"
"""


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("storage.stall", "host4", None),
        ("storage.burst", "host4", None),
        ("storage.burst", "host2", r"no storage .* there; it has on host4"),
        ("storage.slow", "host1", r"no storage .* there; it has on host4"),
        ("host.rank-hang", "host2", None),
        ("host.rank-kill", "host3", r"no rank there; it has on host1, host2"),
    ],
)
def test_a_fault_of_a_program_that_will_not_be_there_is_refused(kind, target, said):
    two_ranks = STORED_JOB.replace("dp=4", "dp=2").replace(
        "iterations", 'ranks = ["host1:rxe0", "host2:rxe0"]\niterations'
    )
    text = two_ranks + 'ingest = "1KiB"' + FAULT_OF_A_PROGRAM.format(kind=kind, target=target)
    made = decode(text.encode(), source="job.toml")
    lab = inventory.load(shipped.inventories() / "soft.yml")
    if said is None:
        assert [fault.of_workload for fault in run.decide(made, text.encode(), lab).faults] == [True]
    else:
        with pytest.raises(ConfigError, match=rf"faults: {kind} on {target}: the workload has {said}"):
            run.decide(made, text.encode(), lab)


SERVING = """
name = "serving"
seed = 1
[workload]
requests = 20
tokens = 8
prefill = "256KiB"
decode = "4KiB"
decode_time = "2ms"
slo_ttft = "500ms"
[[expect]]
metric = "ttft.p99"
max = "2s"
[[expect]]
metric = "slo_attainment"
min = 0.9
"""
RANKING = """
name = "ranking"
seed = 1
[workload]
embedding = "512KiB"
skew = 1.2
iterations = 30
"""


def test_an_inference_job_is_a_workload_with_its_promises():
    made = fit(decode(SERVING.encode(), source="serving.toml"), soft_topology(), "soft").workload
    assert isinstance(made, InferenceSpec)
    assert (made.requests, made.prefill_bytes, made.decode_ms, made.slo_ttft_ms) == (20, 256 << 10, 2.0, 500.0)
    assert len(made.ranks) == 4


def test_a_ranking_job_is_a_workload():
    made = fit(decode(RANKING.encode(), source="ranking.toml"), soft_topology(), "soft").workload
    assert isinstance(made, RankingSpec)
    assert (made.embedding_bytes, made.skew, made.iterations, len(made.ranks)) == (512 << 10, 1.2, 30, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SERVING.replace("tokens = 8", "prefill_ranks = 3"), r"workload: an inference job needs groups of 2 ranks"),
        (SERVING.replace('"4KiB"', '"none"'), r"workload\.decode: "),
        (SERVING.replace("tokens", "tokns"), r'workload: no key "tokns" here; did you mean tokens\?'),
        (RANKING.replace('"512KiB"', '"513"'), r"workload: embedding_bytes must be a multiple of 4"),
        (RANKING + "requests = 3", r"workload: say what runs"),
    ],
)
def test_a_job_that_serves_badly_is_refused_with_its_path(text, said):
    with pytest.raises(ConfigError, match=said):
        fit(decode(text.encode(), source="x.toml"), soft_topology(), "soft")
