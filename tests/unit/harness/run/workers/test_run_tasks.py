"""Runs of a sweep on workers, without processes: what a worker makes, and what becomes of results and errors."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from house import DEMO as HOUSE_DEMO
from house import HOUSE
from synthetic_sweep import DEMO, OVER, SHARE, SOFT, points, written

from faultbed.harness.cli.main import cli
from faultbed.harness.record import sweep_file
from faultbed.harness.run.repeats.in_order import in_order
from faultbed.harness.run.sweeps.sweep_points import metrics_for
from faultbed.harness.run.sweeps.sweep_runner import Sweep
from faultbed.harness.run.workers import open_pool as opening
from faultbed.harness.run.workers import run_tasks
from faultbed.harness.run.workers.run_tasks import make_run, task_of
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import LabError, UsageError


@pytest.fixture
def lab(monkeypatch):
    """A lab whose runs are synthetic. `runs` are the seeds of those that were made, `acts` what the next ones do."""
    state = SimpleNamespace(runs=[], acts=[], resets=[])

    def execute(decided, _inventory, *, out, progress, guard):
        state.runs.append(decided.plan.seed)
        return written(decided, out, **(state.acts.pop(0) if state.acts else {}))

    backend = SimpleNamespace(make_ready=lambda *_: "up", reset=lambda *_: state.resets.append(1) or state.restored)
    state.restored = True
    monkeypatch.setattr(run_tasks.loop, "execute", execute)
    monkeypatch.setattr(run_tasks, "backend_of", lambda _: backend)
    monkeypatch.setattr(run_tasks, "hold", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(refresh=None)))
    return state


def one_task(folder):
    _, (point,) = points(f"{SHARE}=0.1")
    return task_of(point.runs[0], SOFT.path, folder)


def test_run_whose_key_is_published_is_not_made_again(lab, tmp_path):
    task = one_task(tmp_path)
    assert make_run(task) == make_run(task)
    assert lab.runs == [7]
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize("act", [{"error": "gone"}, {"code": "0" * 16}, {"is_control": True}], ids=str)
def test_run_that_does_not_count_is_made_again(lab, tmp_path, act):
    lab.acts = [act]
    task = one_task(tmp_path)
    make_run(task)
    make_run(task)
    assert lab.runs == [7, 7]


@pytest.mark.parametrize("change", [{"code": "0" * 16}, {"plan": b"{}"}], ids=["sources", "plan"])
def test_worker_with_another_faultbed_or_inventory_is_refused_before_the_run(lab, tmp_path, change):
    with pytest.raises(UsageError, match="plans another run on this worker"):
        make_run(dataclasses.replace(one_task(tmp_path), **change))
    assert not lab.runs


def test_dirty_lab_of_a_worker_is_reset_or_ends_its_runs(lab, tmp_path):
    lab.acts = [{"lab_state": "DIRTY"}, {"lab_state": "DIRTY"}]
    assert make_run(one_task(tmp_path)).name.endswith("-demo-7"), "it keeps its own name"
    lab.restored = False
    with pytest.raises(LabError, match="cannot be reset"):
        make_run(one_task(tmp_path))
    assert len(lab.resets) == 2


class InTurn:
    """Workers that make runs in this process, the last one first; `failing` are the numbers of runs that fail."""

    def __init__(self, failing=()):
        self.failing = failing

    def map(self, work, items):
        for number, item in reversed(list(enumerate(items))):
            if number in self.failing:
                yield item, OSError(28, "No space left on device", "samples.parquet")
            else:
                yield item, work(item)


def opened(folder, *, repeat=1):
    parameters, made = points(OVER, repeat=repeat)
    return Sweep.open(folder, SOFT, parameters, made, metrics_for(made, ()))


def test_sweep_on_workers_is_the_one_that_was_made_in_turn(lab, tmp_path):
    result = opened(tmp_path, repeat=2).execute_on(InTurn(), lambda _: None)
    assert [[run.seed for run in point.runs] for point in result.points] == [[7, 8]] * 3
    again = opened(tmp_path, repeat=2)
    assert again.pending_runs() == []
    assert sweep_file.read(tmp_path) == result == again.snapshot()


def test_full_disk_of_a_worker_is_an_error_of_its_point_alone(lab, tmp_path):
    result = opened(tmp_path).execute_on(InTurn(failing=(1,)), lambda _: None)
    assert [point.verdict for point in result.points] == [Verdict.PASS, Verdict.ERROR, Verdict.PASS]
    assert result.points[1].why == "seed 7: samples.parquet: No space left on device"
    assert result.verdict is Verdict.ERROR
    assert len(opened(tmp_path).pending_runs()) == 1


@pytest.mark.parametrize(
    "text", ["local:0", "local:", "local:1.5", "ssh:", "slurm:", "slurm:a b", "tls:host", "tcp://h:1", "2", "local:-1"]
)
def test_workers_that_are_none_are_refused_before_anything_starts(tmp_path, text):
    command = ["sweep", DEMO, "--over", OVER, "--out", str(tmp_path / "out"), "--on", text]
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert f"--on {text}: no workers; give local:N, ssh:HOST,…, slurm:PARTITION" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_workers_are_refused_for_machines_that_faultbed_does_not_start(tmp_path):
    rack = str(HOUSE / "inventory" / "rack-h100.example.yml")
    experiment = tmp_path / "flow.toml"
    workload = '[workload]\nflow = "write"\nsrc = "host1:rnic[0]"\ndst = "host2:rnic[0]"\nduration = "5s"\n'
    experiment.write_text(f'name = "x"\nseed = 1\n{workload}')
    command = ["--lab", rack, "sweep", str(experiment), "--over", "workload.size=4KiB", "--on", "local:2"]
    done = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "out")], standalone_mode=False)
    assert "has machines of its own" in str(done.exception)


@pytest.fixture
def on_workers(lab, monkeypatch, tmp_path):
    """Run `faultbed run … --on local:2` with workers that make the runs of each two seeds in the wrong order."""
    experiment = tmp_path / "paired.toml"
    experiment.write_text(f'{HOUSE_DEMO.read_text()}\n[[expect]]\nmetric = "jct_ratio"\nmax = 1.5\n')

    class Swapped:
        def map(self, work, items):
            for first in range(0, len(items), 2):
                for item in reversed(items[first : first + 2]):
                    yield item, work(item)

    monkeypatch.setattr(opening, "open_pool", lambda *_, **__: contextlib.nullcontext(Swapped()))

    def run(*words):
        command = ["run", str(experiment), "--seed", "7", "--out", str(tmp_path / "runs"), "--on", "local:2", *words]
        return CliRunner().invoke(cli, command, standalone_mode=False)

    return run


def test_until_decided_on_workers_looks_at_runs_in_the_order_of_their_seeds(on_workers, lab):
    done = on_workers("--until-decided")
    looks = [int(seed) for seed in re.findall(r"run \d+ of 12, seed (\d+)", done.output)]
    assert looks == [*range(7, 16)], f"as with one lab, the first look is after nine runs: {done.output}"
    assert lab.runs[:4] == [8, 7, 10, 9]
    assert done.return_value == 0


def test_dirty_run_ends_the_repeats_on_workers_although_a_later_one_was_made(on_workers, lab):
    lab.acts = [{}, {}, {}, {"lab_state": "DIRTY"}]
    done = on_workers("--repeat", "6", "--json")
    assert [run["seed"] for run in json.loads(done.stdout)["runs"]] == [7, 8, 9]
    assert done.return_value == 5


def test_runs_of_two_kinds_of_machine_are_not_pooled(on_workers, lab):
    lab.acts = [{}, {"accelerator": "kvm"}]
    done = on_workers("--repeat", "2")
    assert isinstance(done.exception, UsageError)
    assert "use workers of one kind of machine" in str(done.exception)


@pytest.mark.parametrize("words", [(), ("--repeat", "2", "--control"), ("--repeat", "2", "--shard", "1/2")], ids=str)
def test_workers_for_one_run_or_with_other_options_are_refused(on_workers, lab, words):
    done = on_workers(*words)
    assert isinstance(done.exception, (UsageError, click.UsageError))
    assert not lab.runs


def test_results_wait_for_those_before_them():
    arriving = iter([("c", 3), ("a", 1), ("b", 2)])
    results = in_order(arriving, "abcd")
    assert [next(results) for _ in range(3)] == [1, 2, 3]
    assert list(results) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--workers", "3"),
        ("--on", "local:2", "--workers", "3"),
        ("--interface", "lo"),
        ("--on", "local:2", "--interface", "lo"),
        ("--on", "local:2", "--merge", "."),
    ],
    ids=str,
)
def test_options_of_workers_that_do_not_fit_are_refused_before_anything_starts(tmp_path, words):
    command = ["sweep", DEMO, "--over", OVER, "--out", str(tmp_path / "out"), *words]
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    assert isinstance(done.exception, (UsageError, click.UsageError))
    assert not (tmp_path / "out").exists()
