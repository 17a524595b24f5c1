"""A verdict is rebuilt, byte for byte, from the files of its run alone."""

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from recorded_runs import RUNS
from synthetic_run import synthetic_run

from faultbed.harness import verdict as verdict_file
from faultbed.harness.cli.main import cli
from faultbed.harness.ledger import ledger
from faultbed.harness.ledger.claims import Broken, Unknown
from faultbed.harness.run.judge_run import judge_run
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import RecordError


@pytest.mark.parametrize("name", RUNS)
def test_judge_run_rebuilds_the_verdict_of_every_recorded_run(tmp_path, name):
    recorded = RUNS[name]
    directory = finished(tmp_path, recorded.run, planned=recorded.plan, sealed=recorded.sealed)
    judged = judge_run(directory)
    assert verdict_file.encode(judged.verdict) == directory.read_bytes("verdict.json")
    assert ledger.encode(judged.ledger) == directory.read_bytes("ledger.json")
    assert ledger.fold(judged.ledger) is judged.verdict.verdict
    assert judged.verdict.checks


def test_judge_run_after_evidence_was_lost_knows_less(tmp_path):
    recorded = RUNS["stopped"]
    directory = finished(tmp_path, recorded.run, planned=recorded.plan, sealed=recorded.sealed)
    (name,) = [name for name in judge_run(directory).ledger.statuses if name.startswith("stop.")]
    assert isinstance(judge_run(directory).ledger.statuses[name], Broken)
    (directory.path / "evidence" / "measured" / "stops.json").unlink()
    assert isinstance(judge_run(directory).ledger.statuses[name], Unknown)


@pytest.mark.parametrize("content", [b"", b"{", b'{"t0_ns": "x"}', b"[]"])
def test_judge_run_refuses_damaged_evidence(tmp_path, content):
    recorded = RUNS["stopped"]
    directory = finished(tmp_path, recorded.run, planned=recorded.plan, sealed=recorded.sealed)
    path = directory.path / "evidence" / "measured" / "stops.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"stops\.json: not as this version writes it"):
        judge_run(directory)


def test_judge_run_refuses_a_plan_with_an_unknown_metric(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    path = directory.path / "plan.json"
    path.write_bytes(path.read_bytes().replace(b'"recovery.uplink"', b'"recovery.nothing"'))
    with pytest.raises(RecordError, match=r"recovery\.nothing"):
        judge_run(directory)


def test_report_judge_writes_the_verdict_again(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    content = directory.read_bytes("verdict.json")
    (directory.path / "verdict.json").unlink()
    result = CliRunner().invoke(cli, ["report", str(directory.path), "--judge"])
    assert directory.read_bytes("verdict.json") == content
    assert "verdict.json is another one now" in result.stderr
    result = CliRunner().invoke(cli, ["report", str(directory.path), "--judge"])
    assert "the same verdict.json" in result.stderr
    better = msgspec.structs.replace(directory.read_verdict(), checks=(), verdict=Verdict.PASS)
    directory.write_verdict(better)
    CliRunner().invoke(cli, ["report", str(directory.path), "--judge"])
    assert directory.read_bytes("verdict.json") == content
