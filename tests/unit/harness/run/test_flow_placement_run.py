"""`te run`: it places flows for a time, reports each placement, and says what speaks against its rules."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_switches import FakeSchemeLease, Switches

from faultbed.harness.cli.lab import te_commands
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.run import flow_placement_run
from faultbed.harness.run.flow_placement_run import PlacedFor, place_flows_for
from faultbed.harness.verdict import FlowPlacement, FlowPlacements

DEMANDS = {("host1:rxe0", "host3"): 1.0, ("host2:rxe0", "host4"): 1.0}


class Noop(FakeSchemeLease):
    def update(self, tables):
        pass


@pytest.fixture
def run_on(monkeypatch, tmp_path):
    def run(lease=FakeSchemeLease, **words):
        monkeypatch.setattr(routing_scheme, "SchemeLease", lease)
        monkeypatch.setattr(flow_placement_run.dirty, "begin", lambda *_, **__: SimpleNamespace())
        outcome = SimpleNamespace(state="CLEAN", sentence="")
        monkeypatch.setattr(flow_placement_run.ends, "finish", lambda *_, **__: outcome)
        monkeypatch.setattr(flow_placement_run.telemetry, "start", lambda *_, **__: contextlib.nullcontext())
        lab, lines = Switches(), []
        lab.state_dir = tmp_path
        result = place_flows_for(lab, Fabric(routing="te", **words), DEMANDS, 0.0, lines.append)
        assert lab.obeys is None, "the rules end with the command"
        return result, lines

    return run


def test_te_run_places_flows_and_reports_each_placement(run_on, tmp_path):
    result, lines = run_on()
    assert (result.doubts, result.lab_state) == ((), "CLEAN")
    assert result.placements.cycles >= 1
    assert lines[0].startswith("start: 2 keys placed, 0 moved, ")
    assert "te.placed" in (tmp_path / flow_placement_run.JOURNAL).read_text()


def test_te_run_whose_rules_are_not_on_the_switches_says_so(run_on):
    result, _ = run_on(Noop)
    assert any("its rules are not those that the controller sent" in doubt for doubt in result.doubts)


def command(*words):
    return CliRunner().invoke(cli, ["--lab", "soft-3rack", "te", "run", *words])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cycle", "0.5s"), "--cycle 0.5s: a placement takes about as long; write at least 1s"),
        (("--cycle", "often"), "often"),
        (("--demand", "schedule", "--rank", "host1"), "--rank: a job needs at least 2 ranks"),
        (("--demand", "guessed"), "guessed"),
    ],
)
def test_te_run_refuses_bad_input_before_the_lab_is_touched(words, text):
    said = command(*words)
    assert said.exit_code != 0
    assert text in f"{said.output}{said.exception}"


def test_te_run_on_a_rack_is_refused_with_the_reason():
    said = CliRunner().invoke(cli, ["--lab", "inventory/rack-h100.example.yml", "te", "run"])
    assert "te run: faultbed does not configure a rack's switches" in str(said.exception)


@pytest.mark.parametrize(
    ("doubts", "state", "code"), [((), "CLEAN", 0), (("a rule was missing",), "CLEAN", 2), (("a",), "DIRTY", 5)]
)
def test_te_run_exit_code_says_whether_the_rules_are_proven_and_the_lab_clean(monkeypatch, doubts, state, code):
    record = FlowPlacements(
        cycles=3, largest_gap_s=5.0, placements=(FlowPlacement(at_ns=1, done_ns=2, cause="start", keys=2),)
    )
    result = PlacedFor(placements=record, doubts=doubts, lab_state=state)
    monkeypatch.setattr(te_commands, "place_flows_for", lambda *_: result)
    monkeypatch.setattr("faultbed.harness.cli.context.Session.working", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("faultbed.harness.cli.context.Session.progress", lambda *_: contextlib.nullcontext(print))
    words = ["--lab", "soft-3rack", "te", "run"]
    said = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False)
    assert said.return_value == code
    answer = json.loads(said.stdout)
    assert (answer["placements"]["cycles"], answer["lab_state"]) == (3, state)
    said = CliRunner().invoke(cli, words, standalone_mode=False)
    assert said.return_value == code
    assert f"te: 1 placements in 3 cycles; the lab is {state}" in said.stdout
