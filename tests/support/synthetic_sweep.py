"""Sweeps with synthetic runs: their points, run directories as the run loop writes them, and commands without a lab."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from types import SimpleNamespace

import house
import msgspec
import pytest
from click.testing import CliRunner
from finished_run import write_run
from synthetic_run import synthetic_run

from faultbed.harness import judge
from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.parameters import parse
from faultbed.harness.parts.part import Planned
from faultbed.harness.record import rundir
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.sweeps.sweep_points import points_of
from faultbed.harness.verdict import Check, Verdict
from faultbed.testbed.inventory import lab_inventory

DEMO = str(house.DEMO)
SOFT = lab_inventory.load(house.HOUSE / "inventory" / "soft.yml")
SHARE = "faults[1].set.share"
OVER = f"{SHARE}=0.1,0.2,0.4"


def points(*overs, repeat=1, seed=None, inventory=SOFT):
    parameters = [parse(text) for text in overs or (OVER,)]
    made = points_of(house.DEMO.read_bytes(), parameters, inventory, source="demo", seed=seed, repeat=repeat)
    return parameters, made


@functools.cache
def measured(*, fired, lab_state):
    run = synthetic_run(fired=fired, lab_state=lab_state)
    return run, observe(run)


def written(decided, out, *, fired=True, error=None, lab_state="CLEAN", code=None, is_control=False, accelerator="tcg"):
    """Write a run directory with synthetic measurements, and the judge's verdict on them."""
    directory = rundir.create(
        out, experiment=decided.source, name="demo", seed=decided.plan.seed, lab="soft", started=datetime.now(UTC)
    )
    run, observed = measured(fired=fired, lab_state=lab_state)
    plan = msgspec.structs.replace(decided.plan, control=is_control or msgspec.UNSET)
    directory.write_plan(plan)
    environment = rundir.describe_environment(qemu=None, accelerator=accelerator, guest_kernel=None)
    directory.write_environment(msgspec.structs.replace(environment, code=code or environment.code))
    write_run(directory, run)
    expected = decided.experiment.expectations
    output = judge.judge(before=Planned(plan=decided.plan, expectations=expected), run=run, observed=observed).verdict
    if error is not None:
        check = Check(name="harness", verdict=Verdict.ERROR, observed=None, bound=None, unit="", detail=error)
        output = msgspec.structs.replace(output, checks=(check, *output.checks), verdict=Verdict.ERROR)
    directory.write_verdict(output)
    return Finished(run_dir=directory, verdict=output, report=directory.report)


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """Run `faultbed sweep` without a lab. `acts` maps the number of a run to what it does instead of passing."""
    done = SimpleNamespace(shares=[], acts={}, folder=tmp_path / "sweep")

    def execute(decided, inventory, *, out, progress, guard, mutations=None):
        done.shares.append(decided.plan.faults[1].params["share"])
        act = done.acts.get(len(done.shares), {})
        if isinstance(act, BaseException):
            half = rundir.create(
                out, experiment=decided.source, name="demo", seed=decided.plan.seed, lab="soft",
                started=datetime.now(UTC),
            )  # fmt: skip
            half.write_plan(decided.plan)
            raise act
        return written(decided, out, **act)

    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("faultbed.harness.run.loop.execute", execute)
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda inventory, progress: "already up")
    return done


def swept(executed, *words):
    command = ["sweep", DEMO, "--over", OVER, "--out", str(executed.folder), *words]
    return CliRunner().invoke(cli, command, standalone_mode=False)
