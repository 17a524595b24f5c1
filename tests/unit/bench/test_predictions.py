from __future__ import annotations

import dataclasses

import pytest

from bench.predictions import CALIBRATING, HELD_OUT, Case, Outcome, experiment_text, rows_of, what_ifs
from bench.rows import MISSED, REACHED
from faultbed.harness.experiment import experiment_file

CASE = Case(collective="all-reduce", algorithm="ring", size_bytes=65536)


def outcome(predicted_s, measured_s, link_error=0.0, **changes):
    return Outcome(
        case=dataclasses.replace(CASE, **changes),
        predicted_s=predicted_s,
        measured_s=measured_s,
        link_error=link_error,
    )


@pytest.mark.parametrize("case", (*CALIBRATING, *HELD_OUT), ids=lambda case: case.name)
def test_cases_are_experiments_of_their_collective(case):
    experiment = experiment_file.decode(experiment_text(case).encode(), source=case.name)
    assert (experiment.workload.collective, experiment.workload.size_bytes) == (case.collective, case.size_bytes)


def test_no_held_out_case_calibrates():
    assert len(set(HELD_OUT)) == 20
    assert not set(HELD_OUT) & set(CALIBRATING)


def test_a_what_if_differs_in_one_field_and_by_more_than_a_tenth_as_measured():
    base = outcome(1.0, 1.0)
    assert what_ifs([base, outcome(1.5, 2.0, qps=4)]) == (1, 1)
    assert what_ifs([base, outcome(0.9, 2.0, qps=4)]) == (0, 1)
    assert what_ifs([base, outcome(0.9, 1.05, qps=4)]) == (0, 0)
    assert what_ifs([base, outcome(1.5, 2.0, qps=4, ranks=2)]) == (0, 0)


def test_rows_of_exact_predictions_reach_their_goals():
    exact = [outcome(1.0, 1.0), outcome(2.0, 2.0, ranks=2)]
    assert [row[-1] for row in rows_of(exact, 0.1)] == [REACHED] * 4


def test_rows_of_bad_predictions_miss_their_goals():
    bad = [outcome(1.0, 2.0, 0.1), outcome(0.5, 3.0, 0.1, ranks=2)]
    assert [row[-1] for row in rows_of(bad, 0.1)] == [MISSED] * 4


def test_link_bytes_that_were_not_read_are_no_success():
    rows = list(rows_of([outcome(1.0, 1.0, None)], 0.1))
    assert (rows[1][1], rows[1][-1]) == ("not read", MISSED)
