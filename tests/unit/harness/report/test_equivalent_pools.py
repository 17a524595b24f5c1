"""Pools of runs compared for equivalence: what is comparable, which runs leave nothing shown, and the command."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from repeated_runs import without_faults
from synthetic_run import changed, synthetic_run

from faultbed.harness import judge
from faultbed.harness.cli.main import cli
from faultbed.harness.report.comparison.equivalent_pools import PooledRun, compare_pools
from faultbed.testbed.errors import UsageError

SAME, LIKE, SLOW = (1.0, 1.01, 0.99, 1.005), (1.002, 1.012, 0.992, 1.0), (1.2, 1.21, 1.19, 1.205)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = finished(tmp_path_factory.mktemp("runs"), without_faults(synthetic_run()))
    plan = msgspec.structs.replace(directory.read_plan(), faults=(), expect=msgspec.UNSET)
    return PooledRun(plan=plan, run=directory.read_run(), sealed=directory.read_evidence(judge.KINDS))


@pytest.fixture(scope="module")
def pool_of(one):
    source = synthetic_run()

    def pool(name, factors, **changes):
        return {
            f"{name}-{number}": PooledRun(
                plan=msgspec.structs.replace(one.plan, seed=number, **changes),
                run=without_faults(source, factor),
                sealed=one.sealed,
            )
            for number, factor in enumerate(factors)
        }

    return pool


def test_pools_of_like_runs_are_equivalent_and_of_slow_ones_different(pool_of):
    assert compare_pools(pool_of("a", SAME), pool_of("b", LIKE), 0.05).says == "equivalent"
    slow = compare_pools(pool_of("a", SAME), pool_of("b", SLOW), 0.05)
    assert (slow.says, slow.ratio) == ("different", pytest.approx(1.2, abs=0.01))
    assert compare_pools(pool_of("a", SAME), pool_of("b", SAME[:2]), 0.05).says == "not shown"


def test_pools_with_a_run_that_failed_show_nothing_whatever_the_others_say(pool_of):
    a, b = pool_of("a", SAME), pool_of("b", LIKE)
    b["b-2"] = PooledRun(plan=b["b-2"].plan, run=changed(b["b-2"].run, failure="host3 died"), sealed=b["b-2"].sealed)
    result = compare_pools(a, b, 0.05)
    assert (result.says, result.more) == ("not shown", None)
    assert result.why == "b-2: the workload failed: host3 died"


def test_pools_whose_planned_fault_or_scheme_left_no_record_show_nothing(pool_of, tmp_path):
    planned = finished(tmp_path, synthetic_run()).read_plan()
    result = compare_pools(pool_of("a", SAME), pool_of("b", LIKE, faults=planned.faults), 0.05)
    assert (result.says, result.why) == ("not shown", "b-0: nothing is recorded of the fault uplink")


def test_pools_of_metric_without_a_value_show_nothing(pool_of):
    result = compare_pools(pool_of("a", SAME), pool_of("b", LIKE), 0.05, "ttft.p50")
    assert (result.says, result.why.startswith("a-0: ttft.p50 has no value")) == ("not shown", True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workload": {"collective": "all-reduce", "size_bytes": 2}}, "differ in the workload's"),
        ({}, "is in both pools"),
    ],
)
def test_pools_of_different_experiments_are_refused(pool_of, changes, text):
    name = "b" if changes else "a"
    with pytest.raises(UsageError, match=text):
        compare_pools(pool_of("a", SAME), pool_of(name, LIKE, **changes), 0.05)


def test_pool_of_two_labs_is_refused(pool_of):
    mixed = pool_of("a", SAME) | pool_of("c", LIKE, inventory="ff")
    with pytest.raises(UsageError, match="a-0 and c-0 are of one pool, but differ in inventory"):
        compare_pools(mixed, pool_of("b", LIKE), 0.05)


def test_pools_with_another_inventory_are_what_is_compared(pool_of):
    assert compare_pools(pool_of("a", SAME), pool_of("b", LIKE, inventory="ff"), 0.05).says == "equivalent"


def test_pools_metric_that_does_not_exist_is_refused(pool_of):
    with pytest.raises(UsageError, match="no metric jct"):
        compare_pools(pool_of("a", SAME), pool_of("b", LIKE), 0.05, "jct")


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory, pool_of):
    root = tmp_path_factory.mktemp("pools")
    for name, factors in (("a", SAME[:3]), ("b", LIKE[:3])):
        for word, pooled in pool_of(name, factors).items():
            directory = finished(root, pooled.run)
            directory.write_plan(pooled.plan)
            directory.path.rename(root / word)
    return root


def command(run_dirs, *words):
    return CliRunner().invoke(cli, ["equivalent", *(str(run_dirs / w) if w[:2] in ("a-", "b-") else w for w in words)])


def test_equivalent_command_takes_every_word_after_with_and_options_behind_it(run_dirs):
    words = ("a-0", "a-1", "a-2", "--with", "b-0", "b-1", "b-2", "--margin", "5%")
    said = command(run_dirs, *words)
    assert said.exit_code == 0, said.output
    assert said.output.startswith("equivalent: job time of B over A is 1.00")
    assert "(3 and 3 runs)" in said.output
    answer = json.loads(command(run_dirs, *words, "--json").output)
    assert (answer["says"], answer["runs"], answer["metric"]) == ("equivalent", [3, 3], "job time")
    narrow = command(run_dirs, *words[:-1], "1%")
    assert narrow.output.startswith("not shown: ")
    assert "more a side" in narrow.output
    assert "would not decide either" in command(run_dirs, *words[:-1], "0.1%").output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a-0", "--with", "b-0", "--margin", "0%"), "--margin 0%: leaves no room for noise"),
        (("a-0", "--with", "b-0", "--margin", "five"), '"five" is not a share'),
        (("a-0", "--with", "b-9"), "no such run directory"),
        (("a-0", "a-0", "--with", "b-0"), "is named twice"),
        (("a-0", "--with", "a-0"), "is in both pools"),
        (("a-0",), "--with"),
    ],
)
def test_equivalent_command_refuses_bad_input_in_one_sentence(run_dirs, words, text):
    said = command(run_dirs, *words)
    assert said.exit_code != 0
    assert text in f"{said.output}{said.exception}"
