"""A sweep on a lab: goodput falls with the loss, a killed sweep resumes, and no-op faults show nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from house import HOUSE
from waiting import until

from faultbed.harness.experiment.parameters import parse
from faultbed.harness.record import sweep_file
from faultbed.harness.run.sweeps.sweep_points import metrics_for, points_of
from faultbed.harness.run.sweeps.sweep_runner import Sweep
from faultbed.harness.verdict import Verdict
from faultbed.testbed.observe import fingerprint

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 2")]

LOSS = HOUSE / "docs" / "sweeps" / "loss.toml"
OVER = "faults[0].set.share=0.002,0.02,0.1"
POINT_S = 240.0


def started(lab, folder):
    words = ["sweep", str(LOSS), "--over", OVER, "--out", str(folder / "sweep")]
    log = folder / f"said-{len(list(folder.glob('said-*')))}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "faultbed", *words], stdout=file, stderr=file,
            cwd=folder, stdin=subprocess.DEVNULL,
            env={**os.environ, "FAULTBED_LAB": str(lab.inventory.resolve()), "PYTHONPATH": str(HOUSE)},
        )  # fmt: skip
    return process, log


def test_sweep_goodput_falls_with_loss_and_resumes_after_a_kill(lab, tmp_path):
    before = fingerprint.capture(lab)
    process, log = started(lab, tmp_path)
    try:
        until(lambda: "point 2 of 3" in log.read_text() or process.poll() is not None, within_s=POINT_S)
        until(lambda: len(list(tmp_path.glob("sweep/runs/*/plan.json"))) == 2, within_s=POINT_S)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        partial = sweep_file.read(tmp_path / "sweep")
        assert [point.verdict for point in partial.points] == [Verdict.PASS, None, None], log.read_text()
        process, log = started(lab, tmp_path)
        assert process.wait(4 * POINT_S) == 0, log.read_text()
    finally:
        process.kill()
        lab.forget_connections()
    assert "point 1 of 3" not in log.read_text()
    whole = sweep_file.read(tmp_path / "sweep")
    assert whole.points[0] == partial.points[0]
    assert len(list(tmp_path.glob("sweep/runs/*"))) == 4, "three, and the half written one"
    (actual,) = zip(*(point.values for point in whole.points), strict=True)
    print([(value.value, value.low, value.high, value.predicted) for value in actual])
    assert [value.metric for value in actual] == ["goodput_mean_ratio"] * 3
    assert actual[0].value > actual[1].value > actual[2].value
    assert actual[2].value < actual[0].value / 2
    assert all(value.value < value.predicted for value in actual[1:]), "the model is an upper bound"
    assert all((tmp_path / "sweep" / f"sweep.{kind}").exists() for kind in ("parquet", "html"))
    assert fingerprint.settle(lab, before) == []


def test_sweep_of_noop_faults_is_no_pass_and_has_no_number(lab, tmp_path):
    over = [parse("faults[0].set.share=0.2")]
    points = points_of(LOSS.read_bytes(), over, lab.inventory_model, source="loss", seed=None, repeat=1)
    sweep = Sweep.open(tmp_path, lab.inventory_model, over, points, metrics_for(points, ()))
    try:
        result = sweep.execute(progress=print, mutations={"faults": "noop"})
    finally:
        lab.forget_connections()
    assert result.verdict is Verdict.INCONCLUSIVE
    assert [value.value for value in result.points[0].values] == [None]
    assert result.points[0].why.startswith("fired.packet.drop")
