"""What theory predicts agrees with what is known in closed form, and stands beside the measurement."""

from __future__ import annotations

import msgspec
import pytest
from labelled_run import connections
from synthetic_run import MS, lost_at, synthetic_run
from test_report import finished

from harness.observe import observe
from harness.prediction import max_over_mean, predictions, qp_error_ns
from harness.report import render
from traffic.plan import QpParams


def test_two_flows_on_two_links_collide_half_the_time():
    low, middle, high = max_over_mean(2, 2)
    assert (low, high) == (1.0, 2.0)
    assert middle in {1.0, 2.0}


def test_many_flows_even_out_and_many_links_do_not():
    assert max_over_mean(10_000, 4)[2] < 1.05
    assert max_over_mean(16, 16)[1] >= 3.0


def test_a_queue_pair_dies_after_its_last_sending():
    assert qp_error_ns(QpParams()) == pytest.approx(7 * 67.1e6, rel=0.01)
    assert qp_error_ns(QpParams(timeout=18, retry_cnt=0)) == pytest.approx(1.0737e9, rel=0.001)


def of(run):
    return {one.what.split()[0]: one for one in predictions(run, observe(run))}


def test_the_collective_has_its_model():
    one = of(synthetic_run())["ring"]
    assert one.what == "ring all-reduce over 4 ranks"
    assert one.holds is None


def test_an_algorithm_that_was_chosen_is_chosen_again():
    run = synthetic_run()
    auto = msgspec.structs.replace(run, workload={**run.workload, "algorithm": "auto"})
    assert any("all-reduce over 4 ranks" in one.what for one in predictions(auto, observe(auto)))


def test_what_is_not_a_collective_has_none():
    run = msgspec.structs.replace(synthetic_run(), workload={"flow": "write", "size_bytes": 65536})
    assert "ring" not in of(run)


def test_uplinks_are_counted_by_the_paths():
    run = msgspec.structs.replace(synthetic_run(), connections=connections())
    found = [one for one in predictions(run, observe(run)) if "uplinks of rtsw1" in one.what]
    assert found[0].measured == "1.33 (ctsw1 2, ctsw2 1)"
    assert found[0].holds


def test_a_queue_pair_that_dies_too_early_is_outside():
    run = synthetic_run()
    fired_ns = run.faults[0].receipt.fired.first_ns
    late = msgspec.structs.replace(run, qps_lost=(lost_at(fired_ns + 520 * MS),))
    early = msgspec.structs.replace(run, qps_lost=(lost_at(fired_ns + 100 * MS),))
    assert of(late)["first"].holds is True
    assert of(early)["first"].holds is False
    assert of(late)["first"].measured == "520 ms"
    assert "first" not in of(run)


def test_a_queue_pair_dies_as_its_own_parameters_say():
    """Timeout 8 and one retry: 2 x 1.05 ms. The usual ones would need 470 ms, and call it outside."""
    run = synthetic_run()
    died = (lost_at(run.faults[0].receipt.fired.first_ns + 4 * MS),)
    quick = {**QpParams().to_dict(), "timeout": 8, "retry_cnt": 1}
    asked = msgspec.structs.replace(run, qps_lost=died, workload={**run.workload, "qp": quick}, clock_error_ns=0)
    assert of(asked)["first"].holds is True
    assert of(asked)["first"].model == "2 sendings, timeout 8"
    of_before = msgspec.structs.replace(run, qps_lost=died, clock_error_ns=0)
    assert of(of_before)["first"].holds is False


def test_it_stands_in_the_report(tmp_path):
    run = synthetic_run()
    early = msgspec.structs.replace(run, qps_lost=(lost_at(run.faults[0].receipt.fired.first_ns + 100 * MS),))
    page = render(finished(tmp_path, early).path).read_text(encoding="utf-8")
    assert "Prediction beside measurement" in page
    assert "100 ms <b>(outside)</b>" in page
