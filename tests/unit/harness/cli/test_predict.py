"""`faultbed predict`, `calibrate` and `congestion`: what they print, their exit codes, and what they refuse."""

import json

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from house import DEMO, HOUSE
from synthetic_run import changed, soft_topology, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.prediction import predictions
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.experiment_file import load
from faultbed.harness.experiment.run_plan import plan
from faultbed.harness.model import calibration
from faultbed.harness.model.calibration import Calibration, Conditions, Estimate, Range
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import ConfigError, FaultbedError, UsageError
from faultbed.testbed.inventory import lab_inventory

RING = 'name = "ring"\n[workload]\ncollective = "all-reduce"\nalgorithm = "ring"\nsize = "1MiB"\niterations = 10\n'


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def ring(tmp_path):
    path = tmp_path / "ring.toml"
    path.write_text(RING)
    return str(path)


def called(*words, lab="soft"):
    return CliRunner().invoke(cli, ["--lab", lab, *words])


def stored(*, lab="soft", ranks=(4, 4), inventory=None):
    """Store a calibration for a lab."""
    digest = inventory or lab_inventory.load(HOUSE / "inventory" / f"{lab}.yml").digest
    kept = Calibration(
        conditions=Conditions(lab=lab, inventory=digest, accelerator="tcg", cpus=2),
        runs=12,
        sources=("a",),
        alpha_ns=Estimate(value=10e6, low=9e6, high=11e6),
        overhead_ns=Estimate(value=1e6, low=0, high=2e6),
        rate=Estimate(value=0.5, low=0.4, high=0.6),
        compute_ns=None,
        band=0.14,
        ranks=Range(least=ranks[0], most=ranks[1]),
        size_bytes=Range(least=1 << 16, most=1 << 22),
        qps=Range(least=1, most=1),
        algorithms=("ring",),
    )
    folder = lab_dir(lab)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / calibration.FILE).write_bytes(calibration.encode(kept))
    return kept


def test_predict_without_calibration_says_so_and_has_no_band(ring):
    result = called("predict", ring)
    assert result.exit_code == 0
    assert "modelled; not calibrated" in result.output
    assert "±" not in result.output
    assert "PASS" not in result.output


def test_predict_with_calibration_has_its_band_and_parameters(ring):
    stored()
    result = called("predict", ring)
    assert result.return_value is None or result.exit_code == 0
    expected_ms = 6 * (10 + (1 << 18) * 130e-6 / 0.5)
    assert f"{expected_ms:.0f} ms ±14%" in result.output
    assert "modelled; calibrated by 12 runs on soft (4 ranks, 64 KiB to 4 MiB)" in result.output


def test_predict_outside_the_calibration_has_no_band_and_returns_2(ring):
    stored(ranks=(2, 2))
    result = CliRunner().invoke(cli, ["--lab", "soft", "predict", ring], standalone_mode=False)
    assert result.return_value == 2
    assert "outside calibration: 4 ranks, calibrated to 2 ranks" in result.output
    assert "±" not in result.output


def test_predict_calibration_of_another_inventory_is_not_used(ring):
    stored(inventory="ab" * 32)
    assert "not calibrated" in called("predict", ring).output


def test_predict_over_several_schemes_compares_with_the_first(ring):
    document = json.loads(
        called("predict", ring, "--over", "fabric.routing=static-parity,e-ecmp", "--draws", "3", "--json").output
    )
    assert document["fidelity"] == "modelled"
    assert [point["routing"] for point in document["points"]] == ["static-parity", "e-ecmp"]
    assert [point["draws"] for point in document["points"]] == [1, 3]
    table = called("predict", ring, "--over", "fabric.routing=static-parity,e-ecmp").output.splitlines()
    assert table[1].split()[-1] == "1.00"


def test_predict_writes_no_verdict(ring, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    called("predict", ring)
    assert sorted(tmp_path.rglob("*")) == before


def test_predict_shows_bounds_and_judges_none(tmp_path):
    path = tmp_path / "bounded.toml"
    path.write_text(RING + '[[expect]]\nmetric = "wrong_elements"\nmax = 0\n')
    result = called("predict", str(path))
    assert "bound of [[expect]], modelled and not judged: wrong_elements max 0" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", "workload.sise=1MiB"), "did you mean workload.size?"),
        (("--over", "workload.size=1MiB", "--over", "workload.size=2MiB"), "is given twice"),
        (("--drain", "ctsw9"), "--drain ctsw9"),
        (("--preset", "llama3-24k"), "leave out EXPERIMENT"),
    ],
)
def test_predict_refuses_what_cannot_be(ring, words, message):
    error = called("predict", ring, *words).exception
    assert isinstance(error, FaultbedError)
    assert message in str(error)


def test_predict_without_an_experiment_is_refused():
    assert "name an experiment file" in str(called("predict").exception)


def test_predict_fault_without_an_effect_names_file_and_path(tmp_path):
    path = tmp_path / "forged.toml"
    path.write_text(
        RING
        + '[[faults]]\nkind = "packet.forge"\ntarget = "host1:rxe0"\nat = "1s"\nfor = "1s"\nset = { what = "nak" }\n'
    )
    error = called("predict", str(path)).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{path}: faults[0].kind: packet.forge declares no effect")


def test_predict_preset_compares_tapers():
    document = json.loads(
        called(
            "predict", "--preset", "llama3-24k", "--dp", "8", "--qps", "2", "--taper", "1,7", "--power", "--json"
        ).output
    )
    assert [point["taper"] for point in document["points"]] == [1, 7]
    assert all(point["least_s"] <= point["most_s"] for point in document["points"])
    dips = document["power"]["dips_mw"]
    assert dips["restart"] > dips["checkpoint"] > dips["collective"]


@pytest.mark.parametrize(("taper", "message"), [("x", "is no number"), ("nan", "is no number"), ("0.5", "must be 1")])
def test_predict_preset_refuses_an_impossible_taper(taper, message):
    assert message in str(called("predict", "--preset", "llama3-24k", "--taper", taper).exception)


def recorded(size_bytes, factor):
    """Return a synthetic run with the whole workload of a plan, whose twin takes `factor` times as long."""
    run = synthetic_run()
    workload = plan(fit(load(DEMO), soft_topology(), "soft"), inventory_digest="9f" * 32, version="0").workload

    def scaled(series):
        return msgspec.structs.replace(
            series,
            iterations=tuple(
                msgspec.structs.replace(
                    step,
                    start_ns=run.workload.t0_ns + round((step.start_ns - run.workload.t0_ns) * factor),
                    compute_ns=round(step.compute_ns * factor),
                    comm_ns=round(step.comm_ns * factor),
                    wait_ns=round(step.wait_ns * factor),
                )
                for step in series.iterations
            ),
        )

    return changed(
        run, workload={**workload, "size_bytes": size_bytes}, twin=tuple(scaled(series) for series in run.fault_free)
    )


def test_calibrate_from_twins_is_stored_and_used(tmp_path):
    folders = [
        str(finished(tmp_path / "runs", recorded(size, factor), name=f"r{size}").path)
        for size, factor in ((1 << 16, 0.4), (1 << 18, 0.5), (1 << 20, 0.9), (1 << 21, 1.5))
    ]
    result = called("calibrate", *folders)
    assert result.exit_code == 0, result.output
    assert "4 fault-free series, 4 to 4 ranks, 64 KiB to 2 MiB" in result.output
    kept = calibration.load(lab_dir("soft"), inventory="9f" * 32)
    assert kept is not None
    assert kept.compute_ns is not None
    assert all("(twin)" in source for source in kept.sources)


def test_calibrate_too_few_runs_is_refused(tmp_path):
    folder = str(finished(tmp_path / "runs", recorded(1 << 20, 1.0)).path)
    error = called("calibrate", folder).exception
    assert isinstance(error, UsageError)
    assert "a calibration needs at least 4" in str(error)


def test_report_shows_the_prediction_beside_the_measured_time():
    run = recorded(1 << 20, 1.0)
    (line,) = (item for item in predictions(run, observe(run)) if item.what.startswith("time of an iteration"))
    assert "not calibrated; without the 3 units of compute" in line.model
    assert "of the fault-free twin" in line.measured
    assert line.holds is None
    (line,) = (item for item in predictions(run, observe(run), stored()) if item.what.startswith("time of an"))
    assert "calibrated by 12 runs; 3 units of compute, calibrated without compute" in line.model
    assert "±" not in line.predicted


def test_congestion_prints_a_row_for_each_setting():
    document = json.loads(called("congestion", "--flows", "2,3", "--pmax", "0.01,0.1", "--for", "2ms", "--json").output)
    assert [(row["settings"]["flows"], row["settings"]["pmax"]) for row in document["outcomes"]] == [
        (2, 0.01),
        (2, 0.1),
        (3, 0.01),
        (3, 0.1),
    ]
    assert "victim" in called("congestion", "--flows", "2", "--for", "1ms", "--xoff", "50kB").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--flows", "x"), "--flows x"),
        (("--flows", ","), "give at least one value"),
        (("--kmin", "300kB"), "must be below kmax"),
        (("--pmax", "nan"), "pmax must be above 0"),
        (("--flows", ",".join(map(str, range(1, 300)))), "299 settings, of at most 256"),
        (("--check", str(HOUSE / "inventory" / "soft.yml")), "no QoS profile"),
    ],
)
def test_congestion_refuses_what_cannot_be(words, message):
    error = called("congestion", "--for", "1ms", *words).exception
    assert isinstance(error, FaultbedError)
    assert message in str(error)


def test_congestion_check_says_what_it_did_not_check():
    result = called("congestion", "--check", str(HOUSE / "inventory" / "rack-h100.example.yml"))
    assert "0 findings; not checked: headroom" in result.output
