"""Shrinking finds the smallest failing experiment in few runs, and its file is a part of the old one."""

from __future__ import annotations

import contextlib
import tomllib
from itertools import combinations
from types import SimpleNamespace

import house
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.cli.experiments import shrinking
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment import experiment_file as experiment
from faultbed.harness.run.repeats.shrink import smallest, without
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory

DEMO = house.DEMO.read_bytes()
IDS = [fault.id for fault in experiment.decode(DEMO, source="demo").faults]


def first(fails):
    """Return what tries subsets one after the other, up to the first that fails."""
    return lambda candidates: next((some for some in candidates if fails(some)), None)


def first_of_all(fails):
    """Return what tries all subsets at once, as several labs do."""

    def first_failing(candidates):
        results = {some: fails(some) for some in reversed(candidates)}
        return next((some for some in candidates if results[some]), None)

    return first_failing


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_smallest_keeps_exactly_the_guilty_faults(drawn):
    """Exactly the faults that must act together remain, and each subset is tried at most once."""
    count, guilty = drawn
    requests = []

    def fails(some):
        requests.append(some)
        return guilty <= set(some)

    assert set(smallest(count, first(fails))) == guilty
    assert len(requests) == len(set(requests))


@given(st.integers(2, 7), st.data())
def test_smallest_result_cannot_lose_any_single_fault(count, data):
    """Even if further faults hide a failure, removing any single fault from the result makes it pass."""
    every = [some for size in range(count + 1) for some in combinations(range(count), size)]
    failing = data.draw(st.sets(st.sampled_from(every))) | {tuple(range(count))}
    left = smallest(count, first(lambda some: some in failing))
    assert left in failing
    assert smallest(count, first_of_all(lambda some: some in failing)) == left, "several labs decide as one does"
    assert all(tuple(other for other in left if other != one) not in failing for one in left)


def test_smallest_finds_one_of_sixteen_in_few_runs():
    requests = []
    assert smallest(16, first(lambda some: bool(requests.append(some)) or 11 in some)) == (11,)
    assert len(requests) <= 9


@pytest.mark.parametrize("keep", [(), (1,), (0, 2), (0, 1, 2)])
def test_without_keeps_the_rest_of_the_file_and_drops_expectations_of_removed_faults(keep):
    made = without(DEMO, IDS, keep)
    raw, old = tomllib.loads(made.decode()), tomllib.loads(DEMO.decode())
    assert [one["id"] for one in raw.get("faults", ())] == [IDS[number] for number in keep]
    assert raw["workload"] == old["workload"]
    assert ("recovery.uplink" in {one["metric"] for one in raw["expect"]}) == (0 in keep)
    decoded = experiment.decode(made, source="smaller")
    assert [fault.id for fault in decoded.faults] == [IDS[number] for number in keep]


def test_without_keeps_implied_fault_ids():
    """The second of two flaps has a number in its id, on which the seed's draws depend."""
    flap = '[[faults]]\nkind = "link.flap"\ntarget = "rtsw1:ctsw1"\nat = ["1s", "9s"]\nfor = "1s"\n'
    source = (DEMO.decode().partition("# An uplink")[0] + flap + flap).encode()
    ids = [fault.id for fault in experiment.decode(source, source="two").faults]
    (left,) = experiment.decode(without(source, ids, [1]), source="one").faults
    assert left.id == ids[1] != ids[0]


TWO = b"""name = "a"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "20s"
[[faults]]
id = "first"
kind = "packet.drop"
target = "rtsw1:ctsw1"
at = "5s"
for = "2s"
[[faults]]
id = "second"
kind = "packet.drop"
target = "rtsw1:ctsw2"
at = "9s"
for = "2s"
[faults.set]
share = 0.5
[[expect]]
metric = "wrong_elements"
max = 0
"""


def test_without_takes_the_parameters_of_a_removed_fault_along():
    """The intensity of the second fault used to stay, as that of the first one."""
    ((first,), (second,)) = (tomllib.loads(without(TWO, ["first", "second"], [n]).decode())["faults"] for n in (0, 1))
    assert (first["id"], second["id"]) == ("first", "second")
    assert "set" not in first
    assert second["set"] == {"share": 0.5}
    assert b"wrong_elements" in without(TWO, ["first", "second"], [])


def test_without_refuses_to_make_another_experiment():
    """A line within a text that looks like a section cannot be told from one."""
    odd = TWO.replace(b'id = "second"', b'id = "second"\nnote = """\n[faults]\n"""')
    with pytest.raises(UsageError, match="cannot be removed one by one"):
        without(odd, ["first", "second"], [0])


def verdict_of(*checks):
    file = VerdictFile(
        experiment="a", seed=1, lab="soft", verdict=Verdict.FAIL, checks=checks, faults=(), lab_state="CLEAN"
    )
    return SimpleNamespace(verdict=file)


def test_part_that_fails_at_the_other_bound_does_not_fail_as_the_whole():
    def check(sign, verdict):
        return Check(name="goodput_min_ratio", verdict=verdict, observed=0.5, bound=1, unit="", comparison=sign)

    whole = shrinking._failed(verdict_of(check("min", Verdict.FAIL), check("max", Verdict.PASS)))
    part = shrinking._failed(verdict_of(check("min", Verdict.PASS), check("max", Verdict.FAIL)))
    assert whole
    assert not whole & part


def test_without_rejects_inline_fault_tables():
    source = b'name = "a"\nfaults = [{kind = "link.flap"}]\n'
    with pytest.raises(UsageError, match="a table of its own"):
        without(source, ["link.flap"], [])


def search_of(source, tmp_path, make, **options):
    return shrinking._Search(
        source=source, experiment=experiment.decode(source, source="demo"), seed=None, out=tmp_path,
        inventory=lab_inventory.load(house.HOUSE / "inventory" / "soft.yml"), make=make,
        failed_with_all=frozenset({("wrong_elements", "observed <= bound", 0)}),
        **{"progress": print, "most": 9} | options,
    )  # fmt: skip


def made(trials, _out):
    """Yield a run that passes for each plan."""
    for trial in trials:
        yield verdict_of(Check(name=trial.plan.experiment, verdict=Verdict.PASS, observed=0, bound=1, unit=""))


def test_part_that_cannot_be_planned_does_not_end_the_search(tmp_path):
    """An experiment with a stop condition was never shrunk: without any fault it is refused, after all other runs."""
    source = DEMO + b'\n[[stop]]\nmetric = "qp_errors"\nmax = 3\n'
    lines = []
    search = search_of(source, tmp_path, made, progress=lines.append)
    assert search.first_failing([()]) is None
    assert search.tried == []
    assert "no faults: not run: demo:34: stop[0]" in lines[0]


def test_search_counts_runs_in_the_order_of_the_candidates_and_ends_the_others(tmp_path):
    ended = []

    def make(trials, out):
        try:
            yield from made(trials, out)
        finally:
            ended.append(len(trials))

    search = search_of(DEMO, tmp_path, make, most=2)
    with pytest.raises(UsageError, match="--most 2"):
        search.first_failing([(0,), (1,), (2,)])
    assert [some for some, _ in search.tried] == [(0,), (1,)]
    assert ended == [3]


def test_result_of_shrink_on_workers_is_run_once_more_in_a_folder_of_its_own(tmp_path, monkeypatch):
    """A worker does not make a published run again: in the same folder, the second run would be the first one."""
    folders = []

    def failing(trials, out):
        folders.append(out)
        for _ in trials:
            failed = Check(name="wrong_elements", verdict=Verdict.FAIL, observed=1, bound=0, unit="", comparison="max")
            run = verdict_of(failed)
            run.run_dir, run.report = SimpleNamespace(path=out / "run"), out / "report.html"
            yield run

    @contextlib.contextmanager
    def maker(_session, _inventory, _out, *, place, why):
        assert (str(place), why) == ("local:2", "shrink demo")
        yield failing, print

    monkeypatch.setattr(shrinking, "runs_made", maker)
    file = tmp_path / "demo.toml"
    file.write_bytes(DEMO)
    words = ["shrink", str(file), "--on", "local:2", "--out", str(tmp_path), "--json"]
    answer = CliRunner().invoke(cli, words, standalone_mode=False)
    assert answer.exception is None, answer.exception
    assert answer.return_value == 0
    assert folders[0] == tmp_path
    assert folders[-1].parent == tmp_path
    assert folders[-1] not in folders[:-1]
