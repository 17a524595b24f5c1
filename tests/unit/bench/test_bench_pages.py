"""The bench: its ten-minute run can be planned, and its tables show words instead of markup."""

from __future__ import annotations

import itertools

from bench.__main__ import _show
from bench.results.pages import name_of, with_faults
from bench.rows import ratio
from faultbed.harness.cli.context import Session
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run.loop import resolve
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventory_named


def test_bench_ten_minute_run_has_a_fault_each_minute_and_time_to_settle():
    source = with_faults()
    resolved = resolve(decode(source.encode(), source="x"), source.encode(), load(inventory_named("soft")))
    at_s = [fault.at_ns / 1e9 for fault in resolved.plan.faults]
    assert len(at_s) >= 8
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(at_s))
    assert at_s[-1] <= 540
    assert name_of(resolved) == "report of a run of 600 s with 8 faults"


def test_bench_goal_is_shown_as_a_coloured_word(capsys):
    """Tables do not interpret markup, so the word itself must be coloured: `[green]reached[/green]` was once printed as
    is."""
    _show(Session(None), [ratio("a / b", [0.9, 1.0, 1.1], 1.0), ratio("b / a", [0.9, 0.9, 1.1], 1.0)])
    out = capsys.readouterr().out
    assert ("reached" in out, "missed" in out, "[" in out) == (True, True, False)


def test_bench_median_of_an_even_number_of_ratios_is_between_the_middle_two():
    """The higher of the two was printed as the median, and reached goals that the median missed."""
    assert ratio("a / b", [0.5, 0.6, 0.8, 0.9], 0.75)[1:] == ("0.70", "0.50..0.90, n=4", ">= 0.75", "missed")
