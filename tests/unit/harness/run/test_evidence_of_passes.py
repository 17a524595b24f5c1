"""Each pass writes its evidence when it ends, so that a controller that is killed leaves what it knew, and no PASS."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from engine_labs import RANK_OF, RankEngine, RankLab, node_ns
from pass_stand_ins import setting_of

from faultbed.harness import judge
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.parts.part import planned_by
from faultbed.harness.parts.telemetry import telemetry_part
from faultbed.harness.record import rundir
from faultbed.harness.record.evidence import run_evidence
from faultbed.harness.run import conclude, loop
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.run_record import RunRecord, begin_pass
from faultbed.harness.verdict import Verdict
from faultbed.inject.journal import Journal
from faultbed.testbed.backends.lab_backend import Environment
from faultbed.testbed.errors import LabError
from faultbed.testbed.observe.telemetry import Recorded

MS = 1_000_000
EXPERIMENT = b"""
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
iterations = 20
warmup = 0
[[expect]]
metric = "jct_ratio"
max = 9.0
"""


class Engine(RankEngine):
    """A rank that reports 20 iterations as soon as it starts."""

    wrong = 0

    def do_start(self, task):
        now_ns = node_ns()
        for index in range(20):
            start_ns = now_ns + index * MS
            self.emit(
                "iteration", task=task, index=index, start_ns=start_ns, end_ns=start_ns + MS, compute_ns=0,
                comm_ns=MS, wait_ns=0, wrong=self.wrong if RANK_OF[self.host] == 0 else 0, phases_ns=[MS],
            )  # fmt: skip
        end_ns = now_ns + 20 * MS
        self.emit("done", task=task, start_ns=now_ns, end_ns=end_ns, iterations=20, wrong=self.wrong)


class EngineLab(RankLab):
    engine = Engine


@pytest.fixture
def passes(tmp_path, monkeypatch):
    """Return a function that runs the two passes of an experiment; `at` is called at each moment of them."""
    following = SimpleNamespace(heard_ns=dict, without_log=list, stop=Recorded)
    monkeypatch.setattr(telemetry_part.telemetry, "start", lambda *_, **__: contextlib.nullcontext(following))
    monkeypatch.setattr(telemetry_part.counters, "read", lambda _lab: {})
    monkeypatch.setattr(loop.workload, "paths_of", lambda *_: {})
    experiment = fit(decode(EXPERIMENT, source="x.toml"), EngineLab.topology, "soft")
    plan = run_plan.plan(experiment, inventory_digest="9f" * 32, version="0")
    lab = EngineLab(None)
    lab.name, lab.accelerator = "soft", "tcg"
    lab.heartbeat, lab.state_dir, lab.guard = lambda: None, tmp_path, lambda: None
    lab.started_ahead = lambda *_: contextlib.nullcontext()

    def execute(at):
        run_dir = rundir.create(
            tmp_path / "runs", experiment=EXPERIMENT, name="x", seed=1, lab="soft", started=datetime.now(UTC)
        )
        run_dir.write_plan(plan)
        run_dir.write_ledger(judge.planned_ledger(planned_by(plan)))
        write = rundir.RunDir._write

        def watched(self, name, content, **mode):
            at(f"before {name}", self)
            write(self, name, content, **mode)
            at(f"after {name}", self)

        monkeypatch.setattr(rundir.RunDir, "_write", watched)
        with Journal(run_dir.journal) as journal:
            setting = setting_of(experiment=experiment, plan=plan, lab=lab, journal=journal, run_dir=run_dir)
            record = execute.record = RunRecord(setting=setting)
            loop._calibrate(setting)
            loop._run_pass(begin_pass(record, "twin"), lambda _event: at("event", run_dir))
            at("between", run_dir)
            loop._run_pass(begin_pass(record, "measured"), lambda _event: at("event", run_dir))
        return run_dir

    return execute


def sealed(run_dir, phase):
    return sorted(file.stem for file in (run_dir.path / "evidence" / phase).glob("*.json"))


def test_run_killed_at_any_moment_leaves_whole_evidence_and_an_inconclusive_ledger(passes):
    """What is on disk at a moment is what a SIGKILL at that moment would leave."""
    moments, folds, torn = [], [], []

    def look(moment, run_dir):
        moments.append(moment)
        folds.append(fold(run_dir.read_ledger()))
        run_dir.read_evidence(run_evidence.OF_RUNS)  # raises if a file is not whole
        torn.extend(run_dir.path.glob("verdict.json"))

    passes(look)
    assert len(moments) >= 50
    assert set(folds) == {Verdict.INCONCLUSIVE}
    assert torn == []


def test_twin_is_on_disk_before_the_measured_pass_begins(passes):
    between = {}

    def look(moment, run_dir):
        if moment == "between":
            between.update({phase: sealed(run_dir, phase) for phase in ("twin", "measured")})

    run_dir = passes(look)
    assert between == {"twin": ["workload"], "measured": []}
    assert sealed(run_dir, "measured") == ["faults", "stops", "telemetry", "workload"]
    assert sealed(run_dir, "calibrate") == ["emulation"]
    twin = run_dir.read_evidence(run_evidence.OF_RUNS).of(run_evidence.ALWAYS["workload"], "twin")
    assert len(twin.series) == 4
    assert len(twin.series[0].iterations) == 20


def test_pass_that_an_error_ends_is_sealed_and_the_error_kept(passes, monkeypatch):
    def refuse(*_):
        raise LabError("host1 does not answer")

    monkeypatch.setattr(telemetry_part.counters, "read", refuse)
    written = []
    with pytest.raises(LabError, match="host1 does not answer"):
        passes(lambda moment, _run_dir: written.append(moment))
    assert "after evidence/measured/workload.json" in written


def concluded(record, monkeypatch):
    """Judge a run from what is on disk, on a machine about which nothing is known."""
    backend = SimpleNamespace(health=lambda _inventory: [], environment=lambda _lab: Environment())
    monkeypatch.setattr(conclude, "backend_of", lambda _kind: backend)
    monkeypatch.setattr("faultbed.harness.report.run_page.render", lambda path: path / "report.html")
    setting = record.setting
    resolved = SimpleNamespace(experiment=setting.experiment, plan=setting.plan, left_out=())
    finished = conclude.conclude(resolved, setting.lab, setting.run_dir, record, None)
    return finished.verdict.verdict, {check.name: check.verdict for check in finished.verdict.checks}


def test_run_whose_passes_ended_is_judged_from_its_evidence(passes, monkeypatch):
    passes(lambda *_: None)
    verdict, checks = concluded(passes.record, monkeypatch)
    assert verdict is not Verdict.ERROR
    assert (checks["workload"], checks["twin"], checks["lab_restored"]) == (Verdict.PASS,) * 3


def test_run_whose_measured_pass_never_began_is_inconclusive(passes, monkeypatch):
    """Its twin had wrong data, so nothing was measured: every claim about the measured pass is unknown."""
    run_dir = passes(lambda *_: None)
    record = passes.record
    del record.passes[1:]
    for file in (run_dir.path / "evidence" / "measured").iterdir():
        file.unlink()
    verdict, checks = concluded(record, monkeypatch)
    assert (verdict, checks["workload"]) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert [run.phase for run in record.passes] == ["twin", "measured"]
