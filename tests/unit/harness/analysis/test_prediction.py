"""Predictions agree with closed forms, and are shown next to the measurement."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from finished_run import finished
from hypothesis import given
from hypothesis import strategies as st
from labelled_run import connections
from synthetic_run import MS, changed, fired_between, lost_at, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.prediction import losses, max_over_mean, predictions, qp_error_ns
from faultbed.harness.model.fault_effects import goodput_share
from faultbed.harness.parts.faults.hop_packet_bounds import passed
from faultbed.harness.report.run_page import render
from faultbed.inject.evidence.receipt import Armed, Cleared
from faultbed.inject.selection import by_share
from faultbed.testbed.observe.telemetry import Sample
from faultbed.traffic.engine.task_specs import QpParams


def test_prediction_two_flows_on_two_links_collide_half_the_time():
    low, middle, high = max_over_mean(2, 2)
    assert (low, high) == (1.0, 2.0)
    assert middle in {1.0, 2.0}


def test_prediction_many_flows_even_out_and_many_links_do_not():
    assert max_over_mean(10_000, 4)[2] < 1.05
    assert max_over_mean(16, 16)[1] >= 3.0


def test_prediction_queue_pair_dies_after_its_last_retry():
    assert qp_error_ns(QpParams()) == pytest.approx(7 * 67.1e6, rel=0.01)
    assert qp_error_ns(QpParams(timeout=18, retry_cnt=0)) == pytest.approx(1.0737e9, rel=0.001)


def of(run):
    return {prediction.what.split()[0]: prediction for prediction in predictions(run, observe(run))}


def test_prediction_of_a_collective_has_its_model():
    one = of(synthetic_run())["ring"]
    assert one.what == "ring all-reduce over 4 ranks"
    assert one.holds is None


def test_prediction_of_an_automatic_algorithm_uses_the_chosen_one():
    run = synthetic_run()
    auto = changed(run, workload={**run.workload.planned, "algorithm": "auto"})
    assert any("all-reduce over 4 ranks" in prediction.what for prediction in predictions(auto, observe(auto)))


def test_prediction_of_a_flow_has_no_collective_model():
    run = changed(synthetic_run(), workload={"flow": "write", "size_bytes": 65536})
    assert "ring" not in of(run)


def test_prediction_counts_uplinks_by_the_paths():
    run = changed(synthetic_run(), connections=connections())
    actual = [prediction for prediction in predictions(run, observe(run)) if "uplinks of rtsw1" in prediction.what]
    assert actual[0].measured == "1.33 (ctsw1 2, ctsw2 1)"
    assert actual[0].holds


def test_prediction_queue_pair_that_dies_too_early_is_outside():
    run = synthetic_run()
    fired_ns = run.injected.faults[0].receipt.fired.first_ns
    late = changed(run, qps_lost=(lost_at(fired_ns + 520 * MS),))
    early = changed(run, qps_lost=(lost_at(fired_ns + 100 * MS),))
    assert of(late)["first"].holds is True
    assert of(early)["first"].holds is False
    assert of(late)["first"].measured == "520 ms"
    assert "first" not in of(run)


def test_prediction_early_death_within_the_firings_uncertainty_is_not_outside():
    """The QP died 460 ms after the observed firing. The minimum is 470 ms, but the fault may have fired 20 ms
    earlier."""
    run = synthetic_run()
    died = changed(run, qps_lost=(lost_at(run.injected.faults[0].receipt.fired.first_ns + 460 * MS),))
    assert of(died)["first"].holds is False
    assert of(fired_between(died, "uplink", 20 * MS, 0))["first"].holds is True
    assert of(fired_between(died, "uplink", 5 * MS, 0))["first"].holds is False


def test_prediction_uses_the_queue_pairs_own_parameters():
    """Timeout 8 and one retry give 2 x 1.05 ms. With the defaults (470 ms), the error would look too early."""
    run = synthetic_run()
    died = (lost_at(run.injected.faults[0].receipt.fired.first_ns + 4 * MS),)
    quick = {**QpParams().to_dict(), "timeout": 8, "retry_cnt": 1}
    request = changed(run, qps_lost=died, workload={**run.workload.planned, "qp": quick}, clock_error_ns=0)
    assert of(request)["first"].holds is True
    assert of(request)["first"].model == "2 transmissions, timeout 8"
    of_before = changed(run, qps_lost=died, clock_error_ns=0)
    assert of(of_before)["first"].holds is False


def lossy(run, *, passed, share=0.02, **more):
    """Return the run with a fault that hit 61 packets, a `share` of those that passed."""
    fault = run.injected.faults[1]
    plan = dataclasses.replace(fault.plan, params={"share": share, **more})
    return changed(run, faults=(msgspec.structs.replace(fault, plan=plan, passed=passed),))


def test_prediction_of_packets_hit_follows_share_and_seed():
    """At 2 %, 61 hits of some 3,200 packets are as expected. Of 10,000 they are too few, of 900 too many."""
    run = synthetic_run()
    chosen = by_share(0.02, run.injected.faults[1].plan.seed)
    one = of(lossy(run, passed=(2_900, 3_400)))["packets"]
    expected = f"{chosen.selected_among(2_900) - 1} to {chosen.selected_among(3_400) + 1}"
    assert (one.predicted, one.measured, one.holds) == (expected, "61", True)
    assert of(lossy(run, passed=(10_000, 10_000)))["packets"].holds is False
    assert of(lossy(run, passed=(900, 900)))["packets"].holds is False


def test_prediction_of_packets_hit_needs_a_share_of_all_packets():
    run = synthetic_run()
    assert "packets" not in of(lossy(run, passed=None))
    assert "packets" not in of(lossy(run, passed=(1, 2), opcode="ack"))
    assert "packets" not in of(lossy(run, passed=(1, 2), burst=4.0))


@given(share=st.floats(0.001, 1), packets=st.integers(0, 5_000), seed=st.integers(0, 2**31 - 1))
def test_prediction_of_losses_is_within_one_packet_of_the_count(share, packets, seed):
    low, high = losses(share, seed, packets, packets)
    hit = packets if share >= 1 else by_share(share, seed).selected_among(packets)
    assert max(0, hit - 1) <= low <= hit <= high <= hit + 1


def test_prediction_of_goodput_under_go_back_n():
    """Without loss all goodput is kept; 32 packets resent per 100 leave three quarters; a flow shows the same model."""
    assert goodput_share(0, 32) == 1
    assert goodput_share(0.01, 32) == pytest.approx(0.99 / 1.31)
    flow = {"flow": "write", "size_bytes": 65536, "depth": 2, "qps": 4}
    run = changed(lossy(synthetic_run(), passed=None), workload=flow)
    one = of(run)["goodput"]
    assert "32 packets resent for each lost one" in one.model
    assert one.predicted == "0.60 at most"
    assert 0 < float(one.measured) < 1


def sampled(at_s, value):
    return Sample(at_ns=int(at_s * 1000) * MS, node="rtsw2", values={"host3-rxe0.tx_packets": value})


def test_prediction_bounds_the_packets_that_passed():
    """Ten packets pass every 0.1 s. The minimum is between first and last hit, the maximum from arming to removal plus
    drops."""
    run = synthetic_run()
    start = run.injected.faults[1].receipt.fired.first_ns / 1e9
    receipt = msgspec.structs.replace(
        run.injected.faults[1].receipt,
        armed=Armed(ok=True, at_ns=int(start * 1e9), readback={"device": "host3-rxe0", "hook": "egress"}),
        cleared=Cleared(ok=True, at_ns=int((start + 3) * 1e9)),
        fired=msgspec.structs.replace(run.injected.faults[1].receipt.fired, last_ns=int((start + 3) * 1e9)),
    )
    samples = [sampled(start - 1.05 + 0.1 * place, 10 * place) for place in range(60)]
    assert passed(samples, receipt, node="rtsw2") == (290, 350 + 61)
    assert passed(samples[:3] + samples[-3:], receipt, node="rtsw2") == (0, 550 + 61)
    assert passed(samples[20:], receipt, node="rtsw2") is None
    assert passed(samples, receipt, node="rtsw1") is None


def test_prediction_is_in_the_report(tmp_path):
    run = synthetic_run()
    early = changed(run, qps_lost=(lost_at(run.injected.faults[0].receipt.fired.first_ns + 100 * MS),))
    page = render(finished(tmp_path, early).path).read_text(encoding="utf-8")
    assert "Prediction beside measurement" in page
    assert "100 ms <b>(outside)</b>" in page
