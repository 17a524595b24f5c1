"""Round trips of probes point at a place, and are evidence for what is already found there."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from labelled_run import Network
from test_rtt import round_trips

from harness.attribution.attribute import attribute
from harness.cli.main import cli
from harness.findings import NOTHING
from harness.report.run_page import render
from traffic.probe import ProbeResult, ProbeSpec
from traffic.rtt import locate, times_of


def probed(place, times=6.0, count=40):
    """Round trips over the made-up fabric, of which a place makes each so many times as long."""
    return times_of(round_trips(place=place, times=times, count=count))


@pytest.mark.parametrize(
    ("place", "cause", "kind", "name"),
    [
        (("rtsw1", "ctsw1"), "congestion", "rtsw-ctsw-link", "rtsw1:ctsw1"),
        (("rtsw2", "host3:rxe1"), "congestion", "host-link", "rtsw2:host3:rxe1"),
        (("ctsw2",), "congestion", "ctsw", "ctsw2"),
        (("host2",), "busy-host", "rank", "host2"),
    ],
)
def test_long_round_trips_are_told_of_a_place_where_nothing_is_lost(place, cause, kind, name):
    run = Network(3).run().measured(None, "")
    assert attribute(run) == (NOTHING,)
    top = attribute(run, (), probed(place))[0]
    told = " ".join(top.evidence)
    # Up from one rack to a spine is down to the other: what the votes cannot tell is in the evidence.
    assert (top.cause, top.place) == (cause, kind)
    assert top.name == name or " -> ".join(place) in told
    assert "times what they take on like paths" in told
    assert "software times" in told


def test_round_trips_are_evidence_for_what_is_already_found_there(labelled):
    truth, run = next((truth, run) for truth, kind, run in labelled if attribute(run)[0].cause == "loss")
    before = attribute(run)
    link = next(one for one in run.topology.links if one.name == before[0].name)
    near, far = link.a.node, link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
    after = attribute(run, (), probed((near, far)))
    assert (after[0].cause, after[0].name, after[0].confidence) == (
        before[0].cause,
        before[0].name,
        before[0].confidence,
    ), truth
    assert len(after) == len(before)
    assert len(after[0].evidence) == len(before[0].evidence) + 1


def test_a_healthy_fabrics_round_trips_say_nothing():
    run = Network(3).run().measured(None, "")
    assert attribute(run, (), probed(())) == (NOTHING,)


def test_round_trips_in_the_run_directory_reach_the_command_and_the_page(tmp_path):
    """As `faultbed probe --json` writes them."""
    directory = finished(tmp_path, Network(3).run().measured(None, ""))
    assert directory.read_probes() == ()
    paths = probed(("rtsw1", "ctsw1"))
    result = ProbeResult(
        spec=ProbeSpec(), probes=(), suspects=(), links={}, uncovered=(), moved=0, paths=paths, slow=locate(paths)
    )
    (directory.path / "probes.json").write_bytes(msgspec.json.encode(result.to_dict()))
    assert directory.read_probes() == paths
    said = CliRunner().invoke(cli, ["attribute", str(directory.path), "--json"], standalone_mode=False)
    assert json.loads(said.output)["runs"][str(directory.path)][0]["cause"] == "congestion"
    assert "times what they take on like paths" in render(directory.path).read_text(encoding="utf-8")
