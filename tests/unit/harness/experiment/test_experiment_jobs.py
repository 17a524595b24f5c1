"""Jobs as the workload of an experiment: training, storage, inference and ranking, and refusals."""

from __future__ import annotations

import re

import pytest
from experiment_text import JOB, read
from synthetic_run import soft_topology

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.run_plan import decode as plan_decode
from faultbed.harness.experiment.run_plan import encode, plan
from faultbed.harness.experiment.workload_file import duration_ns
from faultbed.harness.run import loop as run
from faultbed.harness.run import workload
from faultbed.harness.run.prepare.bind_to_lab import fit, hosts_of
from faultbed.testbed import shipped
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic.workloads.inference import InferenceSpec
from faultbed.traffic.workloads.ranking import RankingSpec


def test_experiment_job_becomes_a_workload_with_a_plain_plan():
    experiment = fit(read(JOB.format("")), soft_topology(), "soft")
    work = experiment.workload
    assert (work.grid, duration_ns(work)) == ((("tp", 2), ("dp", 2)), None)
    assert [(phase.along, phase.size_bytes, phase.algorithm) for phase in work.phases] == [
        ("tp", 65536, "auto"),
        ("dp", 1 << 20, "ring"),
    ]
    assert work.ranks == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
    planned = plan(experiment, inventory_digest="0", version="0")
    assert plan_decode(encode(planned)).workload["phases"][1]["along"] == "dp"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tp=2", "tp", 'workload.grid: "tp" is not a dimension'),
        ("tp:all", "pp:all", 'workload: the grid has no dimension "pp"; it has tp, dp'),
        ("64KiB", "64KB!", "workload.phases[0]: "),
        ("all-gather", "gossip", 'workload: no collective "gossip"'),
        (":ring", ":rong", 'workload: no algorithm "rong" for all-gather; choose one of auto, ring'),
        ("iterations", "iteration", 'workload: no key "iteration" here; did you mean iterations?'),
        ("grid", 'flow = "write"\ngrid', "workload: say what runs: "),
    ],
)
def test_experiment_invalid_job_is_rejected_with_its_path(old, new, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(JOB.format("").replace(old, new, 1))


@pytest.mark.parametrize(
    "head",
    [
        'collective = "all-reduce"\nsize = "64KiB"\niterations = 3',
        'grid = "dp=4"\nphases = ["dp:all-reduce:64KiB"]\niterations = 3',
        "requests = 4",
        'embedding = "64KiB"\niterations = 3',
    ],
)
def test_experiment_workload_on_ranks_takes_queue_pairs_per_peer(head):
    text = f'name = "q"\n[workload]\n{head}\nqps_per_peer = 4\nspread = "round-robin"\nentropy = 2\n'
    work = decode(text.encode(), source="q.toml").workload
    assert (work.qps_per_peer, work.spread, work.entropy) == (4, "round-robin", 2)
    for old, new, message in (
        ("qps_per_peer = 4", "qps_per_peer = 0", "workload.qps_per_peer"),
        ("round-robin", "each", 'workload.spread: no spread "each"; '),
        ("entropy = 2", "entropy = 5000", "workload.entropy: 5000 is out of range; write 0 to 4096"),
    ):
        with pytest.raises(ConfigError) as caught:
            decode(text.replace(old, new).encode(), source="q.toml")
        assert message in str(caught.value)


def test_experiment_job_with_several_ranks_per_rnic_fits_a_grid_of_all_of_them():
    text = """
name = "sixteen"
[workload]
grid = "tp=2,dp=16"
phases = ["tp:all-reduce:64KiB"]
iterations = 3
ranks = ["host1:rxe0", "host3:rxe0"]
ranks_per_rnic = 16
"""
    fitted = fit(decode(text.encode(), source="s.toml"), soft_topology(), "soft").workload
    assert (fitted.ranks, fitted.ranks_per_rnic) == (("host1:rxe0", "host3:rxe0"), 16)
    for old, new, message in (
        ("ranks_per_rnic = 16", "ranks_per_rnic = 8", "has 32 ranks, but there are 2 RNICs with 8 each"),
        ("ranks_per_rnic = 16", "ranks_per_rnic = 0", "workload.ranks_per_rnic"),
        ('"host3:rxe0"]', '"host1:rxe0"]', "host1:rxe0 appears twice; name each RNIC once (ranks_per_rnic gives"),
    ):
        with pytest.raises(ConfigError) as caught:
            fit(decode(text.replace(old, new).encode(), source="s.toml"), soft_topology(), "soft")
        assert message in str(caught.value)


def test_experiment_grid_the_lab_cannot_fill_is_rejected():
    with pytest.raises(ConfigError, match=re.escape("workload.grid: has 8 ranks, but there are 4 RNICs")):
        fit(read(JOB.format("").replace("tp=2", "tp=4")), soft_topology(), "soft")


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


def test_experiment_job_names_its_storage():
    made = decode((STORED_JOB + 'ingest = "64KiB"\ncheckpoint = "4MiB:5:async"\n').encode(), source="job.toml")
    storage = made.workload.storage
    assert (storage.host, storage.ingest_bytes, storage.checkpoint_bytes) == ("host4", 65536, 4 << 20)
    assert (storage.every, storage.mode) == (5, "async")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "storage on host4 is not used"),
        ('ingests = "64KiB"', 'workload.storage: no key "ingests" here; did you mean ingest?'),
        ('ingest = "64 parsecs"', "workload.storage.ingest: "),
        ('checkpoint = "1MiB:often"', 'workload.storage.checkpoint: "often" is not a number of iterations'),
        ('checkpoint = "1MiB:5:later"', 'no checkpoint mode "later"; choose one of sync, staggered, async'),
        ('checkpoint = "1MiB:0"', "interval at least 1 iteration"),
        ('checkpoint = "1MiB"\nreaders = ["host3"]', "workload.storage: the readers host3 have nothing to read"),
        (
            'ingest = "1KiB"\nreaders = "host3"',
            'workload.storage.readers: expected a list, got "host3"',
        ),
        ('ingest = "1KiB"\nread_every = "1"', 'workload.storage.read_every: 1 has no unit; write "1s"'),
        ('ingest = "1KiB"\nread_every = "1ms"', "workload.storage: a reader reads at most once every 10 ms, got 1 ms"),
    ],
)
def test_experiment_invalid_storage_is_rejected_with_its_path(line, message):
    with pytest.raises(ConfigError) as caught:
        decode((STORED_JOB + line).encode(), source="job.toml")
    assert message in str(caught.value)


def test_experiment_storage_on_a_missing_host_is_rejected():
    made = decode((STORED_JOB.replace("host4", "host9") + 'ingest = "1KiB"').encode(), source="job.toml")
    with pytest.raises(ConfigError, match=r'workload\.storage\.host: no host "host9"; choose one of host1'):
        fit(made, soft_topology(), "soft")


READ_JOB = """
name = "job"
seed = 1
[workload]
grid = "dp=2"
ranks = ["host[0]:rnic[0]", "host[1]:rnic[0]"]
phases = ["dp:all-reduce:1MiB"]
iterations = 5
[workload.storage]
host = "host4"
ingest = "1KiB"
"""


def test_experiment_readers_are_hosts_without_a_part_in_the_job():
    made = decode((READ_JOB + 'readers = ["host[2]"]\nread_every = "1s"').encode(), source="job.toml")
    storage = fit(made, soft_topology(), "soft").workload.storage
    assert (storage.readers, storage.read_every_ns) == (("host3",), 1_000_000_000)


@pytest.mark.parametrize(
    ("readers", "message"),
    [
        ('"host3", "host1"', "workload.storage.readers[1]: host1 cannot be a reader: it has a rank"),
        ('"host[-1]"', "workload.storage.readers[0]: host4 cannot be a reader: it serves the storage"),
        ('"host3", "host[2]"', "workload.storage.readers[1]: host3 is named twice"),
        ('"host9"', 'workload.storage.readers[0]: no host "host9" to read on; choose one of host1'),
        ('"host[9]"', "workload.storage.readers[0]: "),
    ],
)
def test_experiment_reader_with_a_part_in_the_job_is_rejected_with_its_path(readers, message):
    made = decode((READ_JOB + f"readers = [{readers}]").encode(), source="job.toml")
    with pytest.raises(ConfigError, match=re.escape(message)):
        fit(made, soft_topology(), "soft")


def test_experiment_readers_beside_a_job_with_restarts_are_rejected():
    text = READ_JOB + 'checkpoint = "1MiB"\nreaders = ["host3"]\n[workload.resilience]\nrestart = "same"\n'
    with pytest.raises(ConfigError, match=r"workload\.resilience: .* leave readers out"):
        decode(text.encode(), source="job.toml")


FAULT_OF_A_PROGRAM = """
[[faults]]
kind = "{kind}"
target = "{target}"
at = "6s"
for = "2s"
"""


@pytest.mark.parametrize(
    ("kind", "target", "missing"),
    [
        ("storage.stall", "host4", None),
        ("storage.burst", "host4", None),
        ("storage.burst", "host2", r"no storage .* there; choose one of host4"),
        ("storage.slow", "host1", r"no storage .* there; choose one of host4"),
        ("host.rank-hang", "host2", None),
        ("host.rank-kill", "host3", r"no rank there; choose one of host1, host2"),
    ],
)
def test_experiment_fault_of_a_program_the_workload_lacks_is_rejected(kind, target, missing):
    two_ranks = STORED_JOB.replace("dp=4", "dp=2").replace(
        "iterations", 'ranks = ["host1:rxe0", "host2:rxe0"]\niterations'
    )
    text = two_ranks + 'ingest = "1KiB"' + FAULT_OF_A_PROGRAM.format(kind=kind, target=target)
    made = decode(text.encode(), source="job.toml")
    lab = lab_inventory.load(shipped.inventories() / "soft.yml")
    if missing is None:
        assert [fault.mechanism.of_workload for fault in run.resolve(made, text.encode(), lab).faults] == [True]
    else:
        with pytest.raises(ConfigError, match=rf"faults\[0\]: {kind} on {target}: the workload has {missing}"):
            run.resolve(made, text.encode(), lab)


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


def test_experiment_inference_job_becomes_a_workload_with_its_slos():
    made = fit(decode(SERVING.encode(), source="serving.toml"), soft_topology(), "soft").workload
    assert isinstance(made, InferenceSpec)
    assert (made.requests, made.prefill_bytes, made.decode_ms, made.slo_ttft_ms) == (20, 256 << 10, 2.0, 500.0)
    assert len(made.ranks) == 4


def test_experiment_ranking_job_becomes_a_workload():
    made = fit(decode(RANKING.encode(), source="ranking.toml"), soft_topology(), "soft").workload
    assert isinstance(made, RankingSpec)
    assert (made.embedding_bytes, made.skew, made.iterations, len(made.ranks)) == (512 << 10, 1.2, 30, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SERVING.replace("tokens = 8", "prefill_ranks = 3"),
            r"workload: an inference job needs groups of at least 2 ranks",
        ),
        (SERVING.replace('"4KiB"', '"none"'), r"workload\.decode: "),
        (SERVING.replace("tokens", "tokns"), r'workload: no key "tokns" here; did you mean tokens\?'),
        (RANKING.replace('"512KiB"', '"513B"'), r"workload: embedding_bytes must be a multiple of 4"),
        (RANKING + "requests = 3", r"workload: say what runs"),
    ],
)
def test_experiment_invalid_serving_job_is_rejected_with_its_path(text, message):
    with pytest.raises(ConfigError, match=message):
        fit(decode(text.encode(), source="x.toml"), soft_topology(), "soft")


SURVIVING_JOB = """
name = "job"
seed = 1
[workload]
grid = "dp=3"
phases = ["dp:all-reduce:256KiB"]
iterations = 50
ranks = ["host1:rxe0", "host2:rxe0", "host3:rxe0"]
[workload.storage]
host = "host4"
checkpoint = "512KiB:10"
[workload.resilience]
"""


def test_experiment_job_has_its_restart_policy():
    text = 'spares = ["host[3]:rnic[0]"]\nwithout_spare = "shrink"\nmost_restarts = 2\nrejoin = "90s"\n'
    text = SURVIVING_JOB.replace('"512KiB:10"', '"512KiB:10"\nkeep = 4') + text
    made = fit(decode(text.encode(), source="job.toml"), soft_topology(), "soft")
    resilience = made.workload.resilience
    assert resilience.spares == ("host4:rxe0",)
    assert (resilience.policy.restart, resilience.policy.without_spare) == ("spare", "shrink")
    assert (resilience.policy.most_restarts, resilience.rejoin_s, made.workload.storage.keep) == (2, 90.0, 4)
    assert hosts_of(made.workload) == ("host1", "host2", "host3", "host4")


@pytest.mark.parametrize(
    ("line", "waits_s"),
    [
        ('restart = "same"\nrejoin = "1800s"', 8 * 1800),
        ('restart = "same"\nrejoin = "1800s"\nmost_restarts = 2', 2 * 1800),
        ('spares = ["host4"]\nrejoin = "1800s"\nmost_restarts = 2', 0),
    ],
)
def test_experiment_job_with_restarts_has_time_for_every_restart(line, waits_s):
    """A job that waits for a host within its limits is not stuck. A job without restarts has ten minutes."""
    plain, _, _ = SURVIVING_JOB.partition("[workload.resilience]")
    without, made = (fit(decode(text.encode(), source="job.toml"), soft_topology(), "soft") for text in (
        plain, SURVIVING_JOB + line,
    ))  # fmt: skip
    restarts = made.workload.resilience.policy.most_restarts
    assert workload.patience_s(without, None) == 600
    # Each restart may also take the limits of diagnosis, engines, connections and state: minutes, on emulated hosts.
    assert 60 < (workload.patience_s(made, None) - 600 - waits_s) / restarts < 600


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ({}, "", "workload.resilience: restart = spare needs at least one spare"),
        ({}, 'restart = "spares"', 'workload.resilience.restart: no restart "spares"; did you mean spare?'),
        ({}, 'restart = "same"\nwithout_spare = "hope"', "workload.resilience.without_spare: "),
        ({}, 'restart = "same"\nspares = ["host4"]', "workload.resilience: restart = same uses no spares"),
        ({}, 'spares = ["host4", "host4"]', 'workload.resilience.spares[1]: "host4" appears twice'),
        ({}, 'spare = ["host4"]', 'workload.resilience: no key "spare" here; did you mean spares?'),
        ({}, 'restart = "same"\nmost_restarts = 0', "workload.resilience.most_restarts"),
        ({}, 'restart = "same"\nrejoin = "0s"', "workload.resilience.rejoin"),
        (
            {'"dp=3"': '"dp=2"'},
            'restart = "shrink"',
            "workload.resilience: the grid cannot shrink along dp from 2 to 1",
        ),
        (
            {'[workload.storage]\nhost = "host4"\ncheckpoint = "512KiB:10"\n': ""},
            'spares = ["host4"]',
            "workload.resilience: a job restarts from checkpoints, and this one stores none",
        ),
        ({'"512KiB:10"': '"512KiB:10"\nkeep = 1'}, 'spares = ["host4"]', "workload.storage.keep"),
    ],
)
def test_experiment_invalid_restart_is_rejected_with_its_path(changes, line, message):
    text = SURVIVING_JOB + line
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ConfigError) as caught:
        decode(text.encode(), source="job.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('spares = ["host2:rxe1"]', "workload.resilience.spares[0]: host2:rxe1 cannot be a spare: the job has a rank"),
        ('spares = ["host9"]', "workload.resilience.spares[0]: "),
        ('spares = ["host4:rxe0", "rtsw1"]', "workload.resilience.spares[1]: "),
    ],
)
def test_experiment_invalid_spare_is_rejected_with_its_path(line, message):
    with pytest.raises(ConfigError) as caught:
        fit(decode((SURVIVING_JOB + line).encode(), source="job.toml"), soft_topology(), "soft")
    assert message in str(caught.value)


def test_checkpoint_smaller_than_the_state_is_refused():
    text = SURVIVING_JOB.replace("512KiB", "1KiB") + 'spares = ["host4"]'
    with pytest.raises(ConfigError, match=r"workload\.resilience: a checkpoint of 1024 bytes cannot hold"):
        fit(decode(text.encode(), source="job.toml"), soft_topology(), "soft")
