"""`faultbed traffic job --alone`: a group whose job failed when it ran alone has no ratio, and the command fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from local_traffic import LocalLab

from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic import jobs
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.traffic.workloads.job import GroupTime

PLACED = ("--rank", "host1", "--rank", "host2", "--rank", "host3", "--rank", "host4")
TWO_GROUPS = ("--grid", "tp=2,dp=2", "--phase", "dp:all-reduce:16KiB:ring", *PLACED, "--iterations", "3", "--alone")
FIRST = "job of host1:rxe0 and host3:rxe0 alone"
SECOND = "job of host2:rxe0 and host4:rxe0 alone"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command with real engines on this machine; `broken` are results to change, by a part of the job's name.

    Returns the invocation and the names of the jobs that ran.
    """
    lab = LocalLab(tmp_path)

    def run(*words, broken=None):
        ran = []

        def run_ranks(session, ranks, name, start):
            del session, ranks
            ran.append(name)
            with start(lab, lambda _: None) as running:
                result = running.wait(60)
            assert (result.outcome, result.where, result.wrong_elements) == ("completed", None, 0)
            return replace(result, **(broken or {}).get(name, {}))

        monkeypatch.setattr(jobs, "run_ranks", run_ranks)
        done = CliRunner().invoke(cli, ["--lab", "soft", "traffic", "job", *words], standalone_mode=False)
        return done, ran

    yield run
    lab.close()


def test_groups_run_alone_and_all_went_well(run):
    done, ran = run(*TWO_GROUPS, "--json")
    assert (done.return_value, ran) == (ExitCode.PASS, ["job tp=2,dp=2", FIRST, SECOND])
    assert [one["members"] for one in json.loads(done.stdout)["interference"]] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"outcome": "failed", "where": "host3: the engine is gone"}, ExitCode.ERROR, f"{FIRST}: host3: the engine is"),
        ({"wrong_elements": 4096}, ExitCode.FAIL, f"{FIRST}: 4096 wrong elements"),
    ],
)
def test_a_group_that_fails_alone_has_no_ratio_and_fails_the_command(run, change, code, message):
    done, ran = run(*TWO_GROUPS, "--json", broken={FIRST: change})
    assert done.return_value == code
    assert len(ran) == 3
    assert message in done.stderr
    assert [one["members"] for one in json.loads(done.stdout)["interference"]] == [[1, 3]]


@pytest.mark.parametrize(
    ("change", "code"), [({"outcome": "failed", "where": "host1: gone"}, ExitCode.ERROR), ({"wrong_elements": 1}, 1)]
)
def test_no_group_runs_alone_after_a_job_that_failed(run, change, code):
    done, ran = run(*TWO_GROUPS, broken={"job tp=2,dp=2": change})
    assert (done.return_value, ran) == (code, ["job tp=2,dp=2"])
    assert "no group was run alone" in done.stderr
    assert "interference" not in done.stdout


def test_the_worst_job_decides(run):
    change = {FIRST: {"outcome": "failed", "where": "host3: gone"}, SECOND: {"wrong_elements": 1}}
    done, _ = run(*TWO_GROUPS, broken=change)
    assert done.return_value == ExitCode.ERROR
    assert "interference" not in done.stdout


def test_a_group_with_two_ranks_on_each_rnic_runs_alone(run):
    words = ("--grid", "dp=4", "--phase", "dp:all-reduce:16KiB:ring", "--rank", "host1", "--rank", "host3", "--alone")
    done, ran = run(*words, "--ranks-per-rnic", "2", "--iterations", "3", "--json")
    assert (done.exception, done.return_value) == (None, ExitCode.PASS)
    assert ran == ["job dp=4", "job of host1:rxe0 and host3:rxe0 with 2 ranks each alone"]
    (one,) = json.loads(done.stdout)["interference"]
    assert one["members"] == [0, 1, 2, 3]


def test_a_group_that_cannot_run_alone_is_refused_before_anything_runs(run):
    words = ("--grid", "dp=3,tp=2", "--phase", "dp:all-reduce:16KiB", "--rank", "host1", "--rank", "host3")
    done, ran = run(*words, "--ranks-per-rnic", "3", "--alone")
    assert isinstance(done.exception, UsageError)
    assert "more ranks on some of its RNICs" in str(done.exception)
    assert ran == []


def test_phase_whose_bandwidth_is_not_defined_shows_none(run):
    """An all-to-all of unequal sizes has no bus bandwidth, and was shown with one of 0."""
    done, _ = run("--grid", "ep=4", "--phase", "ep:all-to-allv:16KiB", *PLACED, "--iterations", "2")
    assert done.return_value == ExitCode.PASS
    assert "n/a" in done.stdout
    assert "0.00000" not in done.stdout


def test_job_that_finished_no_iteration_shows_no_times(run):
    """Times of 0 and a bus bandwidth of 0 were shown of a job that had measured nothing."""
    nothing = GroupTime(phase=0, members=(0, 1, 2, 3), time_ns=0.0, busbw_gbytes_per_s=0.0)
    change = {"outcome": "failed", "where": "host1: gone", "iterations_completed": 0, "groups": (nothing,)}
    words = ("--grid", "dp=4", "--phase", "dp:all-reduce:16KiB:ring", *PLACED, "--iterations", "2")
    done, _ = run(*words, broken={"job dp=4": change})
    assert done.return_value == ExitCode.ERROR
    assert done.stdout.count("n/a") == 2
    assert "0 iterations, 0 wrong elements\n" in done.stdout
