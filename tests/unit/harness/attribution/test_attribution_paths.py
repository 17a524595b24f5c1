"""Probes during a run locate a place, or add evidence to a finding at that place."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from finished_run import finished
from labelled_run import Network
from probe_echoes import round_trips
from synthetic_run import T0

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.probe_findings import with_probes
from faultbed.harness.cli.main import cli
from faultbed.harness.findings import NOTHING, Attribution
from faultbed.harness.report.run_page import render
from faultbed.traffic.probes.results import ProbeTrips
from faultbed.traffic.probes.tomography import Probes

WHILE_NS = 16_000_000_000


def probed(place=(), times=6.0, *, lost=0.0, start=0.0, end=1.0, count=40):
    """Return probes over the synthetic fabric: for some time, a place delays or loses some of them."""
    rng, collected = np.random.default_rng(3), []
    for number, trip in enumerate(round_trips(count=count)):
        at = number % count / count
        there, back, one = hurt(trip.there, place), hurt(trip.back, place), trip.echo
        factor = times if (there or back) and start <= at < end else 1.0
        gone = [is_hurt and start <= at < end and rng.random() < lost for is_hurt in (there, back)]
        whole_ns = one.responder_ns + int(factor * (one.whole_ns - one.responder_ns))
        reported = dataclasses.replace(
            one,
            connection=number // count,
            sent_ns=T0 + int(at * WHILE_NS),
            came=not gone[0],
            responder_ns=None if gone[0] else one.responder_ns,
            whole_ns=None if any(gone) else whole_ns,
        )
        collected.append(dataclasses.replace(trip, echo=reported))
    return tuple(sorted(collected, key=lambda trip: trip.echo.sent_ns))


def hurt(path, place):
    return place in Probes(path=path, sent=1, lost=0).places


@pytest.mark.parametrize(
    ("place", "cause", "kind", "name"),
    [
        (("rtsw1", "ctsw1"), "congestion", "rtsw-ctsw-link", "rtsw1:ctsw1"),
        (("rtsw2", "host3:rxe1"), "congestion", "host-link", "rtsw2:host3:rxe1"),
        (("ctsw2",), "congestion", "ctsw", "ctsw2"),
        (("host2",), "busy-host", "rank", "host2"),
    ],
)
def test_probes_long_round_trips_without_loss_name_the_place(place, cause, kind, name):
    run = Network(3).run().measured(None, "")
    assert attribute(run) == (NOTHING,)
    top = attribute(run, (), probed(place))[0]
    text = " ".join(top.evidence)
    # The link up from one rack and the link down to the other carry the same probes, so both are in the evidence.
    assert (top.cause, top.place) == (cause, kind)
    assert top.name == name or " -> ".join(place) in text
    assert "times what they take on similar paths" in text
    assert "software times" in text


def test_probes_round_trips_add_evidence_to_an_existing_finding(labelled):
    truth, run = next((truth, run) for truth, kind, run in labelled if attribute(run)[0].cause == "loss")
    before = attribute(run)
    link = next(link for link in run.lab.topology.links if link.name == before[0].name)
    near, far = link.a.node, link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
    after = attribute(run, (), probed((near, far)))
    assert (after[0].cause, after[0].name, after[0].confidence) == (
        before[0].cause,
        before[0].name,
        before[0].confidence,
    ), truth
    assert len(after) == len(before)
    assert len(after[0].evidence) == len(before[0].evidence) + 1


@pytest.mark.parametrize(("confidence", "is_added"), [(0.4, True), (0.9, False)])
def test_probes_add_a_link_finding_unless_its_switch_is_certain(confidence, is_added):
    """An uncertain finding about a switch (16 packets lost by rtsw2) used to absorb the probes' evidence on one of its
    links.
    """
    known = Attribution(cause="loss", place="rtsw", name="rtsw2", confidence=confidence, evidence=("16 packets",))
    findings = with_probes(Network(3).run().measured(None, ""), [known], probed(("rtsw2", "host3:rxe1")))
    assert [finding.name for finding in findings] == ["rtsw2", *(["rtsw2:host3:rxe1"] if is_added else [])]
    assert len(findings[0].evidence) == (1 if is_added else 2)


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ((), []),
        (("rtsw2", "host3:rxe1"), ["rtsw2:host3:rxe1"]),
        (("host1",), ["host1"]),
        (("rtsw1", "host1:rxe0"), ["host1", "rtsw1:host1:rxe0"]),
    ],
)
def test_probes_answered_by_a_host_clear_it_of_silence(place, names):
    """Peers' timers also expire when a link delays packets. The finding of the probes about that link stays."""
    silent = Attribution(cause="silent-host", place="rank", name="host1", confidence=0.56, evidence=("35 timers",))
    run = Network(3).run().measured(None, "")
    assert [finding.name for finding in with_probes(run, [silent], probed(place))] == names
    assert with_probes(run, [silent], ()) == [silent]


def test_probes_of_a_healthy_fabric_add_no_finding():
    run = Network(3).run().measured(None, "")
    assert attribute(run, (), probed(())) == (NOTHING,)


def test_probes_find_a_place_that_is_slow_for_an_eighth_of_the_run():
    run = Network(3).run().measured(None, "")
    (finding,) = attribute(run, (), probed(("rtsw2", "host3:rxe1"), start=0.5, end=0.625, count=80))
    assert (finding.cause, finding.name) == ("congestion", "rtsw2:host3:rxe1")
    assert "in 1 of 7 windows of 2.0 s, from 8.0 s to 10.0 s" in finding.evidence[0]


@pytest.mark.parametrize(
    ("place", "cause", "name"),
    [
        (("rtsw2", "host3:rxe1"), "loss", "rtsw2:host3:rxe1"),
        (("host3:rxe1", "rtsw2"), "loss", "rtsw2:host3:rxe1"),
        (("host2",), "silent-host", "host2"),
    ],
)
def test_probes_lost_for_part_of_the_run_name_the_place(place, cause, name):
    run = Network(3).run().measured(None, "")
    (finding,) = attribute(run, (), probed(place, times=1.0, lost=0.3, start=0.5, end=0.625, count=80))
    assert (finding.cause, finding.name) == (cause, name)
    assert "were lost between 8.0 s and 10.0 s" in finding.evidence[0]


def test_probes_rare_loss_is_detected_over_the_whole_run():
    run = Network(3).run().measured(None, "")
    (finding,) = attribute(run, (), probed(("ctsw1", "rtsw2"), times=1.0, lost=0.05))
    assert finding.cause == "loss"
    assert "ctsw1 -> rtsw2" in finding.evidence[0]


def test_probes_in_the_run_directory_reach_the_command_and_the_page(tmp_path):
    directory = finished(tmp_path, Network(3).run().measured(None, ""))
    assert directory.read_probes() == ProbeTrips()
    result = ProbeTrips(trips=probed(("rtsw1", "ctsw1"), lost=0.1), unknown=3, trouble="host2 is gone")
    directory.write_probes(result, t0_ns=T0)
    assert directory.read_probes() == result
    reported = pq.read_schema(directory.path / "probes.parquet").metadata
    assert (reported[b"stamps"], reported[b"unknown"], reported[b"trouble"]) == (b"software", b"3", b"host2 is gone")
    invoked = CliRunner().invoke(cli, ["attribute", str(directory.path), "--json"], standalone_mode=False)
    result = json.loads(invoked.output)["runs"][str(directory.path)][0]
    assert (result["cause"], len(result["evidence"])) == ("loss", 2)
    page = render(directory.path).read_text(encoding="utf-8")
    assert "times what they take on similar paths" in page
    assert "were lost between" in page
    assert "<b>Incomplete:</b> host2 is gone" in page
    assert "3 more have no known path" in page
    assert 'aria-labelledby="h-probes"' in page
