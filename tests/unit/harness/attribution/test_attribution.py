"""The place of a fault is found from its symptoms alone, and a cause outside the network is not blamed on it."""

from __future__ import annotations

import dataclasses
import json

import msgspec
from click.testing import CliRunner
from finished_run import finished
from labelled_run import Network
from synthetic_run import changed, synthetic_run, with_doubts

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.confusion import score
from faultbed.harness.cli.main import cli
from faultbed.harness.findings import CAUSES, NOTHING, PLACES
from faultbed.testbed.errors import UsageError


def test_attribution_places_synthetic_campaign(labelled):
    """Over 60 synthetic runs at all link, switch, host and GPU places: culprit >= 95 %, network or not >= 97 %."""
    total = score((run, ()) for _, _, run in labelled)
    assert total.runs == total.single == len(labelled) >= 60
    assert total.right >= 0.95 * total.single, total.matrix
    assert total.network_right >= 0.97 * total.single, total.matrix
    assert total.precision.low > 0.85
    assert sum(total.matrix.values()) == total.single


def test_attribution_fault_free_run_has_no_culprit():
    run = Network(3).run().measured(None, "")
    assert attribute(run) == (NOTHING,)


def test_attribution_ignores_the_fault_plan(labelled):
    for _, _, run in labelled[::15]:
        assert attribute(run) == attribute(changed(run, faults=synthetic_run().injected.faults))


def test_attribution_findings_use_documented_causes_and_places(labelled):
    for _, _, run in labelled[::5]:
        for one in attribute(run):
            assert one.cause in CAUSES
            assert one.place in PLACES
            assert 0 <= one.confidence <= 1
            assert one.evidence


def test_score_skips_runs_whose_fault_is_in_doubt(labelled):
    _, _, run = labelled[0]
    doubted = changed(run, faults=(with_doubts(run.injected.faults[0], "no witness"),))
    assert score([(doubted, ())]).runs == 0


def test_score_skips_runs_with_an_error_of_the_harness(tmp_path):
    """A fault-free run that broke off showed nothing, which counted as rightly found."""
    run = Network(3).run().measured(None, "")
    broken = changed(run, errors=("host1: its kernel broke",))
    assert (score([(run, ())]).right, score([(broken, ())]).runs) == (1, 0)
    kept = finished(tmp_path, broken).path
    text = CliRunner().invoke(cli, ["attribute", str(kept)], standalone_mode=False).output
    assert "1 of 1 runs are not scored" in text


def test_attribute_command_refuses_a_run_twice(tmp_path, labelled):
    """Each copy would count as one more finding that is right."""
    path = finished(tmp_path / "a", labelled[0][2]).path
    done = CliRunner().invoke(cli, ["attribute", str(path), f"{path}/../{path.name}"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "is a copy of" in str(done.exception)


def test_attribute_command_scores_runs_against_their_faults(tmp_path, labelled):
    kept = [finished(tmp_path / str(index), run).path for index, (_, _, run) in enumerate(labelled[:3])]
    done = CliRunner().invoke(cli, ["attribute", *map(str, kept), "--json"], standalone_mode=False)
    assert done.exception is None
    output = json.loads(done.output)
    assert output["judged"] == output["single"]["runs"] == 3
    assert output["recall"]["of"] == 3
    text = CliRunner().invoke(cli, ["attribute", *map(str, kept)], standalone_mode=False).output
    assert "precision" in text
    assert "true place / blamed" in text


def test_precision_counts_findings_and_not_the_faults_that_one_of_them_names(labelled):
    """Two faults at one place are named by one finding, which counted as two right ones."""
    run = next(run for _, _, run in labelled if score([(run, ())]).found == 1)
    first = run.injected.faults[0]
    again = msgspec.structs.replace(first, plan=dataclasses.replace(first.plan, id="again"))
    again = msgspec.structs.replace(again, receipt=msgspec.structs.replace(first.receipt, id="again"))
    once, twice = score([(run, ())]), score([(changed(run, faults=(first, again)), ())])
    assert (once.found, once.correct, twice.found) == (1, 1, 2)
    assert (twice.correct, twice.false) == (once.correct, once.false)
    assert twice.precision == once.precision
