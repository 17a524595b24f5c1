"""The bench of restarts, with real engines and a real storage on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local_traffic import LocalLab

from bench import restarts
from bench.rows import MISSED, REACHED
from faultbed.harness.analysis.ettr import Ettr, Formula
from faultbed.traffic.workloads.elastic import driver
from faultbed.traffic.workloads.elastic.machine import MODES


@pytest.fixture
def lab(tmp_path, monkeypatch):
    plain = driver.storage.serve
    folder = str(tmp_path / "checkpoints")
    monkeypatch.setattr(driver.storage, "serve", lambda *args, **options: plain(*args, **options, folder=folder))
    made = LocalLab(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_bench_restart_state_after_each_of_twenty_losses_is_as_without_one(lab, mode):
    lines = []
    first, lost, *phases = restarts.measure(lab, mode, lines.append, losses=20)
    assert first == (f"{mode}: state after a loss as without one", "20 of 20", "", "20", REACHED), lines
    assert (lost[0], lost[-1]) == (f"{mode}: iterations lost", REACHED)
    names = [row[0].removeprefix(f"{mode}: ") for row in phases]
    assert names[:-1] == ["detect", "diagnose", "reschedule", "initialise", "restore", "catch_up"]
    assert all(row[1].endswith(" s") and "n=20" in row[2] for row in phases)


@pytest.mark.slow
def test_bench_restart_that_restores_nothing_is_missed(lab, monkeypatch):
    plain = driver.start
    monkeypatch.setattr(driver, "start", lambda lab, spec, how: plain(lab, spec, replace(how, restores=False)))
    (row,) = restarts.measure(lab, "same", lambda _: None, losses=1)
    assert (row[1], row[-1]) == ("0 of 1", MISSED)
    assert "wrong elements" in row[2]
    assert "state differs from the job without a loss" in row[2]


@pytest.mark.slow
def test_bench_ettr_counts_the_schedules_inside_the_formulas_interval(lab):
    lines = []
    counted, *rows, ratio = restarts.measure_ettr(lab, lines.append, schedules=1)
    assert counted == ("schedules whose job ended as without a loss, with an ETTR", "1 of 1", "", "", ""), lines
    assert rows[0][1:3] in (("0 of 0", "1 without an interval"), ("0 of 1", "0 without an interval"),
                            ("1 of 1", "0 without an interval"))  # fmt: skip
    assert "n=1" in ratio[2]
    assert "measured 0." in lines[0]


def test_bench_ettr_of_a_schedule_that_the_formula_gives_nothing_has_no_ratio():
    """With a slow start, the work between two checkpoints may be as long as the job: the formula predicts 0, so no
    ratio exists."""
    formula = Formula(
        predicted=0.0, low=0.0, high=0.02, interruptions=3, recovery_ns=3e9, interval_ns=4e9, checkpoint_share=0.1
    )
    known = Ettr(
        iterations=60, healthy_ns=1e8, wall_ns=20 * 10**9, lost_ns=0.0, storage_ns=0.0, predicted=None, formula=formula
    )
    end = restarts.JobEnd(wrong=None, phases_ns={}, lost_iterations=0, ettr=known)
    rows = list(restarts.ettr_rows([end]))
    assert [row[1] for row in rows] == ["1 of 1", "0 of 1"]
