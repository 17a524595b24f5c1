"""Replay of a trace: it must have the plan's digest, and lies beside the experiment or in its run directory."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest
from house import TRACES
from synthetic_run import changed, soft_topology, synthetic_run
from trace_lab import TraceLab

from faultbed.harness.experiment import replayed
from faultbed.harness.experiment.experiment_file import decode, load
from faultbed.harness.experiment.run_plan import encode, plan
from faultbed.harness.experiment.workload_file import duration_ns
from faultbed.harness.record import workload_series
from faultbed.harness.report import summary
from faultbed.harness.run import workload
from faultbed.harness.run.prepare.bind_to_lab import fit, hosts_of
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.traffic import traces

FILE = """
name = "x"
[workload]
replay = "traces/ranking.json"
warmup = 0
repeat = 2
compute = false
{}
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(TRACES, tmp_path / "traces")
    return tmp_path


def written(folder, text=FILE, more=""):
    path = folder / "x.toml"
    path.write_text(text.format(more))
    return path


def fitted(path):
    return fit(load(path), soft_topology(), "soft")


def test_replay_plan_has_the_traces_digest_and_no_local_path(folder):
    result = plan(fitted(written(folder)), inventory_digest="0", version="1")
    content = (folder / "traces" / "ranking.json").read_bytes()
    assert result.workload["sha256"] == hashlib.sha256(content).hexdigest()
    assert str(folder).encode() not in encode(result)
    assert result.workload["ranks"] == [f"host{number}:rxe0" for number in (1, 2, 3, 4)]
    assert duration_ns(fitted(written(folder)).workload) is None


def test_trace_digest_of_a_folder_covers_names_and_contents(folder):
    before = traces.digest(folder / "traces" / "pipeline")
    (folder / "traces" / "pipeline" / "notes.txt").write_text("no trace")
    assert traces.digest(folder / "traces" / "pipeline") == before
    (folder / "traces" / "pipeline" / "2.json").write_text("[]")
    assert traces.digest(folder / "traces" / "pipeline") != before
    (folder / "groups.json").write_text("{}")
    assert traces.digest(folder / "traces" / "ranking.json", groups=folder / "groups.json") != before


def test_replay_trace_with_fewer_ranks_uses_the_first_ones(folder):
    path = folder / "traces" / "ranking.json"
    record = {"comms": "all_reduce", "in_msg_size": 64, "out_msg_size": 64, "dtype": "float32", "world_size": 2}
    path.write_text(json.dumps([record]))
    work = fitted(written(folder, more='ranks = ["host4:rxe0", "host3:rxe0", "host2:rxe0"]')).workload
    assert hosts_of(work) == ("host4", "host3")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("traces/ranking.json", "traces/absent.json", "workload.replay: .*absent.json: no such trace"),
        ("traces/ranking.json", "traces", "workload.replay: .*no file in the folder is named like a rank's trace"),
        ("traces/ranking.json", "traces/tensor-parallel/layer.0.et", "workload.replay: .*name their folder"),
        ("repeat = 2", "repeat = 0", "workload.repeat: "),
        ("repeat = 2", "repat = 2", 'workload: no key "repat" here; did you mean repeat'),
        ("repeat = 2", "speed = 0.0", "workload.speed: 0.0 is out of range; write more than 0"),
        ("repeat = 2", 'format = "parm"', 'workload.format: no format "parm"; did you mean param'),
        ("repeat = 2", 'groups = "absent.json"', "workload.replay: .*absent.json: No such file"),
        ("repeat = 2", 'collective = "all-reduce"', "workload: say what runs"),
        ("repeat = 2", "scale = 1e5", "workload.replay: .*ranking.json: record 1: all-to-allv"),
        ("repeat = 2", 'ranks = ["host1:rxe0", "host2:rxe0"]', "workload.replay: .*has 4 ranks, but there are 2 RNICs"),
        ("repeat = 2", 'ranks = ["host1:rxe0", "host9:rxe0"]', r"workload.ranks\[1\]"),
        ("repeat = 2", "qp = { retry_cnt = 7 }", "workload.qp.retry_cnt: 7 is out of range; write 0 to 6"),
    ],
)  # fmt: skip
def test_replay_impossible_trace_is_rejected_with_its_path(folder, old, new, message):
    path = written(folder)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        fitted(path)
    assert re.match(rf"{re.escape(str(path))}:[0-9]+: workload", str(caught.value))


def test_replay_unsupported_operation_is_rejected_unless_skipped(folder):
    record = {"in_msg_size": 64, "out_msg_size": 64, "dtype": "float32", "world_size": 4}
    lines = [{"comms": "all_reduce", **record}, {"comms": "gather", **record}]
    (folder / "traces" / "ranking.json").write_text(json.dumps(lines))
    with pytest.raises(ConfigError, match=re.escape("record 1: gather")):
        fitted(written(folder))
    assert fitted(written(folder, more="skip_unsupported = true")).workload.skip_unsupported


@pytest.mark.parametrize(
    ("name", "groups"), [("ranking.json", None), ("tensor-parallel", None), ("tensor-parallel", "my/g.json")]
)
def test_run_directory_has_the_trace_for_its_experiment_copy(folder, tmp_path_factory, name, groups):
    (folder / "my").mkdir()
    (folder / "my" / "g.json").write_text("{}")
    text = FILE.replace("ranking.json", name)
    first = load(written(folder, text, f'groups = "{groups}"' if groups else ""))
    there = tmp_path_factory.mktemp("run")
    replayed.keep(first.workload, first.source, there)
    (there / "experiment.toml").write_bytes((folder / "x.toml").read_bytes())
    shutil.rmtree(folder / "traces")
    again = fitted(there / "experiment.toml")
    assert again.workload.sha256 == first.workload.sha256
    assert replayed.trace_of(again.workload, again.source, 4).ranks == 4


class Beating(TraceLab):
    beats = 0

    def heartbeat(self):
        self.beats += 1


def test_replay_repeats_rounds_and_measures_like_other_jobs(folder):
    lab, experiment = Beating(lambda engine: engine.over()), fitted(written(folder))
    running = workload.start(experiment, lab)
    assert workload.patience_s(experiment, running) > 2 * 6 * 120, "each of six operations has its time, in each round"
    result = running.wait(20)
    assert (result.outcome, result.iterations_completed, result.wrong_elements) == ("completed", 2, 0)
    assert [operation.record for operation in result.operations] == [1, 4, 5, 6, 7, 8]
    assert [len(one.iterations) for one in workload_series.series_of(result)] == [2] * 4
    assert lab.beats
    decided = plan(experiment, inventory_digest="0", version="1")
    run = changed(synthetic_run(), workload=decided.workload, ranks=result.ranks)
    output = summary.describe_workload(run)
    assert output == "trace traces/ranking.json, replayed 2 times on 4 ranks"
    assert kind_of(experiment.workload).measured(experiment.workload, result) == {}, "it has no bus bandwidth"


def test_replay_trace_changed_since_planning_is_rejected(folder):
    experiment = fitted(written(folder))
    path = folder / "traces" / "ranking.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UsageError, match="has changed since the run was planned"):
        workload.start(experiment, Beating(None))


def test_replay_relative_path_is_resolved_from_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert decode(FILE.format("").encode(), source="x.toml").workload.replay == "traces/ranking.json"
