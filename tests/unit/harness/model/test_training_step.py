"""The step of a large model: bounds, pipeline, placement, and the published runs of Llama 3."""

from dataclasses import replace

import numpy as np
import pytest

from faultbed.harness.model.preset_fabric import PRESETS, PresetFabric
from faultbed.harness.model.training_step import (
    LLAMA3_405B,
    PUBLISHED,
    Layout,
    calibrated_micro_batch_s,
    placed,
    step_time,
)
from faultbed.testbed.errors import UsageError

SMALL = PresetFabric(name="small", zones=2, racks=8, ctsws=4, taper=4.0)
LAYOUT = Layout(pp=4, dp=8, micro_batches=8, chunks=2)


def step(**changes):
    settings = {"micro_batch_s": 0.1, "qps": 4, **changes}
    return step_time(LLAMA3_405B, settings.pop("layout", LAYOUT), settings.pop("fabric", SMALL), **settings)


def test_step_pipeline_has_the_bubble_of_interleaved_1f1b():
    assert step().compute_s == pytest.approx(0.1 * (8 + 3 / 2))
    assert step(layout=replace(LAYOUT, chunks=1)).compute_s == pytest.approx(0.1 * (8 + 3))


def test_step_is_bounded_by_full_overlap_and_none():
    predicted = step()
    assert predicted.least_s < predicted.most_s
    assert predicted.most_s == pytest.approx(predicted.compute_s + predicted.pp_s + predicted.dp_s)
    assert predicted.tflops(predicted.least_s) > predicted.tflops(predicted.most_s)


def test_step_random_placement_over_a_taper_is_slower():
    ordered, scattered = step(), step(placement="random")
    assert scattered.dp_s > 1.2 * ordered.dp_s
    assert scattered.worst_link_share <= 1 + 1e-9


def test_step_larger_taper_never_speeds_up_a_ring():
    rates = [
        step(fabric=replace(SMALL, taper=taper), placement="random").dp_bytes_per_s.min() for taper in (1.0, 2.0, 8.0)
    ]
    assert rates == sorted(rates, reverse=True)


def test_step_without_pipeline_or_data_parallelism_has_no_such_time():
    alone = step(layout=Layout(pp=1, dp=1, micro_batches=4))
    assert (alone.pp_s, alone.dp_s) == (0.0, 0.0)
    assert alone.least_s == alone.most_s


def test_placement_keeps_hosts_whole_and_uses_each_gpu_once():
    gpus = placed(LAYOUT, SMALL, "random", np.random.default_rng(1))
    assert len(set(gpus.tolist())) == LAYOUT.gpus
    assert (gpus.reshape(-1, 8) == gpus.reshape(-1, 8)[:, :1] + np.arange(8)).all()


@pytest.mark.parametrize("overlaps", [True, False])
def test_llama3_calibrated_on_8192_predicts_16384_within_5_percent(overlaps):
    """430 TFLOP/s on 8,192 GPUs, 400 on 16,384 (The Llama 3 Herd of Models, table 4)."""
    fabric = PRESETS["llama3-24k"]
    measured = step_time(LLAMA3_405B, PUBLISHED, fabric, micro_batch_s=1.0)
    exposed_s = 0.0 if overlaps else measured.pp_s + measured.dp_s
    micro_batch_s = calibrated_micro_batch_s(LLAMA3_405B, PUBLISHED, tflops=430, exposed_s=exposed_s)
    predicted = step_time(LLAMA3_405B, Layout(dp=128, micro_batches=16), fabric, micro_batch_s=micro_batch_s)
    assert predicted.tflops(predicted.least_s if overlaps else predicted.most_s) == pytest.approx(400, rel=0.05)


def test_step_too_many_gpus_or_hosts_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"4096 GPUs .* but small has 256"):
        step(layout=Layout(pp=4, dp=128, micro_batches=1))
    with pytest.raises(UsageError, match="no whole number"):
        step(layout=Layout(tp=6, pp=1, dp=2, micro_batches=1))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_step_impossible_time_or_rate_is_refused(value):
    with pytest.raises(UsageError, match="more than 0 s"):
        step(micro_batch_s=value)
    with pytest.raises(UsageError, match="above 0"):
        calibrated_micro_batch_s(LLAMA3_405B, PUBLISHED, tflops=value)
