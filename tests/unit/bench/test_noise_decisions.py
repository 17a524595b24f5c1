"""The product's decisions on generators of noise: rarely wrong at the truth, and decided beyond it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.__main__ import bench
from bench.noise import noises
from bench.noise.decisions import Generator, load, measure
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.testbed.errors import UsageError

PAIRS = """
METRIC, TRUE = "jct_ratio", 1.1
def pairs(rng, k, n):
    made = []
    for _ in range(k):
        run, twin = 1 + 0.05 * rng.normal(size=(2, n))
        run[n // 2 : n // 2 + n // 10] += 1
        made.append((run, twin, n // 2, n // 2 + n // 10 - 1))
    return made
"""


def rows(generator, n, counts, trials=60):
    return list(measure(generator, lengths=(n,), counts=counts, trials=trials, tolerance=DECLARED["emulated"]))


@pytest.mark.parametrize("shape", noises.WITHIN)
def test_one_run_at_the_truth_is_never_decided_and_one_far_beyond_it_is(shape):
    generator = Generator(metric=METRICS["goodput.mean"], truth=1.0, values=noises.WITHIN[shape])
    (row,) = rows(generator, 100, ())
    assert (row.wrong_fail, row.wrong_pass, row.inconclusive) == (0, 0, 1)
    assert row.decided_far >= 0.9


def test_pairs_have_power_and_rarely_err(tmp_path):
    file = tmp_path / "noise.py"
    file.write_text(PAIRS)
    single, several = rows(load(file), 40, (12,), trials=120)
    assert (single.k, single.inconclusive, several.k) == (1, 1, 12)
    assert several.is_right
    assert several.decided["10"] >= 0.95
    assert several.decided["2"] <= several.decided["5"] <= several.decided["20"]


def test_ettr_whose_level_moves_with_the_fault_is_not_decided_at_the_truth(tmp_path):
    file = tmp_path / "noise.py"
    file.write_text(
        'METRIC, TRUE = "ettr", 0.9\n'
        "def pairs(rng, k, n):\n"
        "    made = []\n"
        "    for _ in range(k):\n"
        "        run = 1 + 0.02 * rng.normal(size=n)\n"
        "        run[n // 2 :] *= 1.03 if rng.random() < 0.5 else 0.97\n"
        "        run[n // 2 : n // 2 + n // 10] *= 1 + 1 / 0.9\n"
        "        made.append((run, run, n // 2, n // 2 + n // 10 - 1))\n"
        "    return made\n"
    )
    row = rows(load(file), 100, ())[0]
    assert row.is_right


def test_calibration_command_gives_rows(tmp_path):
    file = tmp_path / "noise.py"
    file.write_text(PAIRS)
    argv = ["calibration", "--noise", str(file), "--n", "20", "--k", "9", "--trials", "5", "--json"]
    made = json.loads(CliRunner().invoke(bench, argv, standalone_mode=False).output)
    assert [(row["n"], row["k"]) for row in made] == [(20, 1), (20, 9)]
    assert {"wrong_fail", "wrong_pass", "inconclusive", "decided"} <= made[0].keys()
    assert list(made[0]["decided"]) == ["2", "5", "10", "20"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("TRUE = 1\n", "METRIC is None"),
        ('METRIC, TRUE = "jct_ratios", 1\n', "METRIC is 'jct_ratios'"),
        ('METRIC, TRUE = "jct_ratio", float("nan")\n', "TRUE is nan"),
        ('METRIC, TRUE = "jct_ratio", 1.0\n', "defines no values, runs or pairs"),
        ('METRIC, TRUE = "jct_ratio", 1.0\ndef values(rng): ...\n', r"define it as values\(rng, n\)"),
        ("1 / 0\n", "cannot be run: ZeroDivisionError"),
    ],
)
def test_generator_that_lacks_something_is_refused_with_a_remedy(tmp_path, content, words):
    file = tmp_path / "noise.py"
    file.write_text(content)
    with pytest.raises(UsageError, match=words):
        load(file)


@pytest.mark.parametrize("body", ["return 1", "return []", "raise KeyError('x')", "return [[[1.0]]] * k"])
def test_generator_that_returns_something_else_is_named(tmp_path, body):
    file = tmp_path / "noise.py"
    file.write_text(f'METRIC, TRUE = "goodput.mean", 1.0\ndef runs(rng, k, n):\n    {body}\n')
    with pytest.raises(UsageError, match=r"noise\.py: runs: .*; correct the file"):
        rows(load(file), 10, (8,))
