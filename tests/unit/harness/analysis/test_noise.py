"""The noise floor of a lab comes only from fault-free runs, and widens the intervals that the judge decides by."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from finished_run import finished
from judged_runs import PLAN
from repeated_runs import without_faults
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis import noise
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.run_plan import PlannedFabric
from faultbed.harness.record.evidence.workload_evidence import ResilienceRun
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.verdict import RoutingDecisions, RoutingReceipt, SchemeArmed, SchemeCleared
from faultbed.testbed.errors import UsageError
from faultbed.traffic.flows.flow_spec import FlowSpec
from faultbed.traffic.probes.prober import ProbeSpec
from faultbed.traffic.workloads.elastic.elastic_results import Restart

RECEIPT = RoutingReceipt(
    scheme="pinned",
    fidelity="real",
    armed=SchemeArmed(ok=True),
    decisions=RoutingDecisions(queried=1, agreed=1),
    cleared=SchemeCleared(),
)


FLOW = FlowSpec(src="host2:rxe1", dst="host4:rxe1", verb="write", message_bytes=4096, qps=1, depth=1, rate_bps=0.0)
CONDITIONS = noise.Conditions(
    lab="soft", inventory="9f", accelerator="tcg", cpus=2, workload={"collective": "all-reduce"}
)


def alike(runs, conditions=CONDITIONS):
    """Runs under the same conditions, as `measure` takes them."""
    return {name: (conditions, run) for name, run in runs.items()}


def test_noise_floor_recovers_the_deviation_between_runs():
    factors = np.exp(0.05 * np.random.default_rng(3).normal(size=12))
    run = synthetic_run()
    floor = noise.measure(alike({f"aa-{index}": without_faults(run, factor) for index, factor in enumerate(factors)}))
    assert floor.spreads["job_time"].log_sd == pytest.approx(np.log(factors).std(ddof=1), rel=1e-3)
    assert floor.spreads["job_time"].pair > np.exp(2.576 * np.sqrt(2) * np.log(factors).std(ddof=1))
    assert noise.decode(noise.encode(floor)) == floor


def ended(run, later_ns):
    """Return the synthetic run with another end time, because a copy would not count."""
    return changed(run, end_ns=run.workload.end_ns + later_ns)


def test_noise_floor_of_one_run_under_several_names_is_rejected(tmp_path):
    """Copies do not differ, so the floor would be 0, and every difference would exceed it."""
    run = synthetic_run()
    with pytest.raises(UsageError, match="b is a copy of a"):
        noise.measure(alike({"a": run, "b": run, "c": ended(run, 1)}))
    first = finished(tmp_path, run).path
    for name in ("copy", "again"):
        shutil.copytree(first, tmp_path / name)
    folders = [str(first), str(tmp_path / "copy"), str(tmp_path / "again")]
    done = CliRunner().invoke(cli, ["noise", *folders, "--out", str(tmp_path / "f")], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert not (tmp_path / "f").exists()


def test_noise_floor_uses_only_the_twin_of_a_run_with_faults():
    run = synthetic_run()
    floor = noise.measure(alike({name: ended(run, number) for number, name in enumerate("abc")}))
    assert floor.sources == ("a (twin)", "b (twin)", "c (twin)")


OTHERWISE = (
    {"lab": "another"},
    {"inventory": "aa"},
    {"accelerator": "kvm"},
    {"cpus": 64},
    {"workload": {"collective": "all-reduce", "qps_per_peer": 4}},
    {"routing": ("pinned", {})},
    {"capture": ("rtsw1:ctsw1",)},
    {"probe": ProbeSpec(per_s=10, qps=1)},
    {"bystander": FLOW},
)


def test_every_condition_is_one_of_those_that_keep_a_floor_from_a_run():
    assert [name for changed in OTHERWISE for name in changed] == list(noise.Conditions.__struct_fields__)


@pytest.mark.parametrize("changed", OTHERWISE, ids=lambda changed: next(iter(changed)))
def test_noise_floor_of_other_conditions_is_not_measured_and_not_used(tmp_path, changed):
    """A floor without a routing scheme widened the intervals of a run with one, and the other way round."""
    run = synthetic_run()
    other = msgspec.structs.replace(CONDITIONS, **changed)
    runs = {"a": (CONDITIONS, run), "b": (other, ended(run, 1)), "c": (CONDITIONS, ended(run, 2))}
    with pytest.raises(UsageError, match=f"a and b differ in {next(iter(changed))}: they have no common noise"):
        noise.measure(runs)
    for own, foreign in ((CONDITIONS, other), (other, CONDITIONS)):
        floor = noise.NoiseFloor(conditions=own, iterations=5, sources=(), spreads={})
        (tmp_path / noise.FILE).write_bytes(noise.encode(floor))
        reasons = []
        assert noise.load(tmp_path, own, reasons.append) == floor
        assert not reasons
        assert noise.load(tmp_path, foreign, reasons.append) is None
        (reason,) = reasons
        assert f"is not used: it was measured with another {next(iter(changed))}" in reason


def test_noise_floor_of_an_older_version_is_not_used(tmp_path):
    """The older format does not contain the routing scheme and the machine of its runs."""
    old = {"schema": 1, "lab": "soft", "workload": CONDITIONS.workload, "iterations": 5, "sources": [], "spreads": {}}
    (tmp_path / noise.FILE).write_bytes(msgspec.json.encode(old))
    reasons = []
    assert noise.load(tmp_path, CONDITIONS, reasons.append) is None
    assert "it was measured under unknown conditions; measure" in reasons[0]


def test_noise_floor_needs_three_series_that_ran_as_planned():
    run = synthetic_run()
    with pytest.raises(UsageError, match="at least 3"):
        noise.measure(alike({"a": run}))
    runs = {name: ended(run, number) for number, name in enumerate("abc")}
    unproven = msgspec.structs.replace(RECEIPT, unproven=("no packet was marked",))
    routed = msgspec.structs.replace(CONDITIONS, routing=("pinned", {}))
    for receipt in (None, unproven):
        several = {name: changed(run, routing=receipt) for name, run in runs.items()}
        with pytest.raises(UsageError, match=r"0 fault-free series .* scheme is not proven"):
            noise.measure(alike(several, routed))
    proven = {name: changed(run, routing=RECEIPT) for name, run in runs.items()}
    assert len(noise.measure(alike(proven, routed)).sources) == 3
    crowded = {name: changed(run, offered_bps=9e9, carried_bps=1e9) for name, run in runs.items()}
    with pytest.raises(UsageError, match="0 fault-free series"):
        noise.measure(alike(crowded))
    restart = Restart(
        number=1, reason="host3 is gone", cause="host", hosts=("host3",), before=(), progress_ns=0, noticed_ns=1,
        iterations=3,
    )  # fmt: skip
    lost = ResilienceRun(restarts=(restart,), states=(), repeated_iterations=0, initialised_ns=1, connections=2)
    calm = msgspec.structs.replace(lost, restarts=())
    restarted, resilient = (
        {name: changed(run, faults=(), twin=None, resilience=resilience) for name, run in runs.items()}
        for resilience in (lost, calm)
    )
    with pytest.raises(UsageError, match=r"0 fault-free series .* that was restarted"):
        noise.measure(alike(restarted))
    assert len(noise.measure(alike(resilient)).sources) == 3


def test_noise_floor_has_the_ratios_of_disjoint_pairs():
    runs = {f"aa-{index}": ended(synthetic_run(), index) for index in range(4)}
    assert len(noise.measure(alike(runs)).ratios) == 2


def test_noise_floor_of_many_pairs_replaces_the_declared_tolerance():
    floor = noise.NoiseFloor(iterations=5, sources=(), spreads={}, ratios=(1.02, 0.9, *([1.0] * 17)))
    assert noise.tolerance_of(synthetic_run(), None).factor == 1.75
    measured = noise.tolerance_of(synthetic_run(), floor)
    assert (measured.factor, measured.source, measured.level) == (pytest.approx(1 / 0.9), "measured", 0.05)
    few = msgspec.structs.replace(floor, ratios=(1.02, 0.9))
    assert noise.tolerance_of(synthetic_run(), few).source == "emulated"
    worse = msgspec.structs.replace(floor, ratios=(2.5,))
    assert (noise.tolerance_of(synthetic_run(), worse).factor, noise.tolerance_of(synthetic_run(), worse).level) == (
        2.5,
        0.5,
    )


def test_noise_command_keeps_the_floor_for_its_workload(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    run = synthetic_run()
    folders = [str(finished(tmp_path / str(index), ended(run, index)).path) for index in range(3)]
    done = CliRunner().invoke(cli, ["noise", *folders, "--json"], standalone_mode=False)
    assert done.exception is None
    kept = json.loads(done.output)["kept"]
    folder = tmp_path / "home" / "labs" / "soft"
    assert kept == str(folder / noise.FILE)
    conditions = noise.conditions_in(RunDir(Path(folders[0])), run)
    assert noise.load(folder, conditions).spreads["job_time"].runs == 3
    assert noise.load(folder, msgspec.structs.replace(conditions, workload={"flow": "write"})) is None


def test_noise_command_on_a_full_disk_keeps_the_earlier_floor(tmp_path, monkeypatch):
    """Half of a floor took the place of the earlier one, and every later run was refused because of it."""
    run, kept = synthetic_run(), tmp_path / "floor.json"
    folders = [str(finished(tmp_path / str(index), ended(run, index)).path) for index in range(3)]
    argv = ["noise", *folders, "--out", str(kept)]
    assert CliRunner().invoke(cli, argv, standalone_mode=False).exception is None
    before = kept.read_bytes()

    def fill(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert isinstance(CliRunner().invoke(cli, argv, standalone_mode=False).exception, OSError)
    assert kept.read_bytes() == before
    assert [path.name for path in tmp_path.glob("*floor*")] == ["floor.json"]


def test_comparison_says_which_run_the_noise_floor_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    run = synthetic_run()
    a, b = finished(tmp_path, run, name="a"), finished(tmp_path, run, name="b")
    fabric = PlannedFabric(routing="pinned", fidelity="real")
    b.write_plan(msgspec.structs.replace(b.read_plan(), fabric=fabric))
    folder = tmp_path / "home" / "labs" / "soft"
    folder.mkdir(parents=True)
    spread = noise.Spread(runs=10, middle=40.0, unit="s", log_sd=0.2)
    for fitting, other in ((a, "B"), (b, "A")):
        conditions = noise.conditions_in(fitting, run)
        floor = noise.NoiseFloor(conditions=conditions, iterations=5, sources=(), spreads={"job_time": spread})
        (folder / noise.FILE).write_bytes(noise.encode(floor))
        done = CliRunner().invoke(cli, ["report", "--compare", str(a.path), str(b.path)], standalone_mode=False)
        assert done.exception is None
        assert f"{other}: {folder / noise.FILE} is not used: it was measured with another routing" in done.output
        assert "no noise floor is kept" not in done.output


def test_noise_conditions_are_those_of_plan_and_environment(tmp_path):
    fabric = PlannedFabric(routing="pinned", fidelity="real", parameters={"uplinks": (1, 2)})
    planned = msgspec.structs.replace(PLAN, fabric=fabric, capture=("rtsw1:ctsw1",), bystander=FLOW)
    conditions = noise.conditions_of(planned, lab="soft", accelerator="tcg", cpus=8)
    assert conditions.routing == ("pinned", {"uplinks": [1, 2]}), "as it is read from a file"
    assert (conditions.capture, conditions.bystander, conditions.cpus) == (("rtsw1:ctsw1",), FLOW, 8)
    plain = noise.conditions_of(PLAN, lab="soft", accelerator="tcg", cpus=8)
    assert noise.differing(conditions, plain) == ("routing", "capture", "bystander")
    run = synthetic_run()
    directory = finished(tmp_path, run)
    assert noise.conditions_in(directory, run).cpus == directory.read_environment().cpu_count
    assert noise.conditions_in(directory, run).workload == directory.read_plan().workload


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"schema": 2}', b"[" * 100_000])
def test_noise_floor_file_that_is_broken_is_named_in_one_sentence(tmp_path, content):
    (tmp_path / noise.FILE).write_bytes(content)
    with pytest.raises(UsageError, match=r"noise-floor\.json: not a noise floor .*measure it again"):
        noise.load(tmp_path, CONDITIONS)
