"""GPUs by NVML: faultbed's reader and the real nvidia-ml-py, over a stand-in for the driver's library."""

import json

import pynvml
import pytest
from nvml_library import Card, Library, install

from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.node.watch import Watch
from faultbed.testbed.observe.counters import STATES
from faultbed.testbed.preflight.rack_formats import Gpu, gpu_wrong, gpus


def test_nvml_healthy_gpu_is_decoded_and_closed(monkeypatch, tmp_path):
    library = install(monkeypatch, tmp_path, [Card(), Card(bus="00000000:2B:00.0", pids=[7])])
    reported = gpus(json.dumps(Watch().gpus({})))
    assert (reported.driver, reported.why, len(reported.gpus)) == ("550.54.15", None, 2)
    assert reported.gpus[1] == Gpu(
        index=1,
        bus_id="00000000:2b:00.0",
        vbios="96.00.74.00.01",
        persistence=True,
        ecc=True,
        ecc_corrected=0,
        ecc_uncorrected=0,
        remapped_rows=0,
        remap_pending=False,
        remap_failed=False,
        temp_c=41,
        slowdown_c=89,
        shutdown_c=95,
        reasons=0,
        sm_mhz=1980,
        sm_max_mhz=1980,
        power_limit_w=700,
        pcie=(5, 16),
        pcie_max=(5, 16),
    )
    assert [gpu_wrong(gpu) for gpu in reported.gpus] == [[], []]
    assert library.opened == 0


def test_nvml_counters_and_states_of_gpus_are_decoded(monkeypatch, tmp_path):
    install(
        monkeypatch,
        tmp_path,
        [Card(reasons=0x6, sm_mhz=345, uncorrected=2, corrected=7, remapped=(3, 1, 1, 0), replays=5)],
    )
    assert dict(nvml.counts(None)) == {
        "gpu0.clocks_set": 1,
        "gpu0.power_capped": 1,
        "gpu0.sm_mhz": 345,
        "gpu0.ecc_corrected": 7,
        "gpu0.ecc_uncorrected": 2,
        "gpu0.ecc_corrected_total": 7,
        "gpu0.ecc_uncorrected_total": 2,
        "gpu0.remapped_rows": 1,
        "gpu0.remap_pending": 1,
        "gpu0.remap_failed": 0,
        "gpu0.temp_c": 41,
        "gpu0.slowdown_c": 89,
        "gpu0.shutdown_c": 95,
        "gpu0.pcie_replays": 5,
        "gpu0.power_capped_us": 5_000,
        "gpu0.thermal_slowdown_us": 3,
        "gpu0.power_brake_us": 0,
    }
    assert {"clocks_set", "power_capped", "sm_mhz", "neighbours"} <= STATES


@pytest.mark.parametrize(
    ("reasons", "sm_mhz", "is_set"),
    [
        (0x0, 1980, False),  # maximum clock
        (0x0, 1965, False),  # nearly the maximum
        (0x0, 1410, True),  # locked, at work and idle: no reason is reported
        (0x1, 345, False),  # idle
        (0x4, 1410, False),  # limited by power
        (0x20, 1410, False),  # limited by heat
        (0x2, 1410, True),  # application clocks
        (0x6, 1200, True),
        (0x0, None, False),
    ],
)
def test_nvml_clocks_set_by_a_user_are_detected(monkeypatch, tmp_path, reasons, sm_mhz, is_set):
    install(monkeypatch, tmp_path, [Card(reasons=reasons, sm_mhz=sm_mhz)])
    assert dict(nvml.counts(None))["gpu0.clocks_set"] == is_set
    assert gpus(json.dumps(nvml.look())).gpus[0].clocks_set == is_set


def test_nvml_unsupported_fields_are_left_out_and_not_zero(monkeypatch, tmp_path):
    nothing = dict.fromkeys(
        (
            *("reasons", "sm_mhz", "sm_max_mhz", "ecc", "uncorrected", "corrected", "replays", "remapped"),
            *("persistence", "limit_mw", "celsius", "limits_c"),
        )
    )
    install(monkeypatch, tmp_path, [Card(**nothing, held_ns={270: 4_000})])
    assert dict(nvml.counts(None)) == {"gpu0.thermal_slowdown_us": 4}
    (gpu,) = gpus(json.dumps(nvml.look())).gpus
    lacking = ("reasons", "sm_mhz", "sm_max_mhz", "ecc", "ecc_uncorrected", "remap_failed", "persistence")
    assert [getattr(gpu, name) for name in lacking] == [None] * len(lacking)
    assert gpu_wrong(gpu) == []


def test_nvml_temperature_thresholds_of_hopper_follow_from_its_margin(monkeypatch, tmp_path):
    """`nvidia-smi -q` shows these values for an H100: 33 °C, T.Limit 54, slowdown at -2, shutdown at -8."""
    install(monkeypatch, tmp_path, [Card(celsius=33, limits_c=None, margin_c=54, tlimits={193: -8, 194: -2})])
    values = dict(nvml.counts(None))
    assert [values[f"gpu0.{name}"] for name in ("temp_c", "slowdown_c", "shutdown_c")] == [33, 89, 95]


def test_nvml_neighbours_are_our_processes_on_their_gpu(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, [Card(pids=[103]), Card(bus="00000000:2B:00.0", pids=[101, 102, 105])])
    actual = {name: value for name, value in nvml.counts({"101", "102", "104"}.__contains__) if "neighbours" in name}
    assert actual == {"gpu0.neighbours": 0, "gpu1.neighbours": 2}
    assert nvml.computing("0000:2b:00.0") == {101, 102, 105}
    assert nvml.computing("0000:19:00.0") == {103}


def test_nvml_lost_gpu_hides_no_other(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, [Card(lost=True), Card(bus="00000000:2B:00.0")])
    lost, well = gpus(json.dumps(nvml.look())).gpus
    assert gpu_wrong(lost) == [("does not answer: NVML: GPU is lost", "an answer")]
    assert (well.index, gpu_wrong(well)) == (1, [])
    assert {name.partition(".")[0] for name, _ in nvml.counts(None)} == {"gpu1"}


def test_nvml_older_name_of_the_clock_reasons_is_supported(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, [Card(reasons=0x2)])
    was = Library.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.delattr(Library, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(Library, "nvmlDeviceGetCurrentClocksThrottleReasons", was, raising=False)
    assert dict(nvml.counts(None))["gpu0.clocks_set"] == 1


def test_nvml_reports_a_missing_driver_without_an_import(monkeypatch):
    monkeypatch.setattr(nvml, "_DRIVER", "/nowhere/version")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # makes an import fail
    assert nvml.look() == {
        "driver": None,
        "why": "no NVIDIA driver is loaded (/nowhere/version does not exist)",
        "gpus": [],
    }
    assert list(nvml.counts(None)) == []
    with pytest.raises(nvml.NoNvml, match="no NVIDIA driver"):
        nvml.compute_mode("0000:19:00.0")


def test_nvml_version_mismatch_is_reported(monkeypatch, tmp_path):
    library = install(monkeypatch, tmp_path, [Card()])
    library.init_rc = 18
    assert nvml.look()["why"] == "NVML: RM has detected an NVML/RM version mismatch."
    assert list(nvml.counts(None)) == []


def test_nvml_power_is_sampled_and_nvml_closed(monkeypatch, tmp_path):
    library = install(
        monkeypatch, tmp_path, [Card(), Card(bus="00000000:2B:00.0", power_mw={186: 412_345}, celsius=None)]
    )
    samples = nvml.power_samples("0000:2b:00.0", 0.001)
    first, second = next(samples), next(samples)
    assert second["t_ns"] > first.pop("t_ns")
    assert first == {
        "instant_mw": 412_345,
        "average_mw": None,
        "energy_mj": 1_000_000,
        "sm_mhz": 1980,
        "reasons": 0,
        "temp_c": None,
    }
    assert library.opened == 1
    samples.close()
    assert library.opened == 0
    with pytest.raises(nvml.NoNvml):
        next(nvml.power_samples("0000:ff:00.0", 0.02))


@pytest.mark.parametrize(
    ("mode", "name"), [(0, "Default"), (2, "Prohibited"), (3, "Exclusive_Process"), (9, "number 9")]
)
def test_nvml_compute_mode_is_named(monkeypatch, tmp_path, mode, name):
    install(monkeypatch, tmp_path, [Card(), Card(bus="00000000:2B:00.0", mode=mode)])
    assert nvml.compute_mode("0000:2b:00.0") == name
    with pytest.raises(nvml.NoNvml):
        nvml.compute_mode("0000:ff:00.0")


def test_nvml_is_closed_after_every_failure(monkeypatch, tmp_path):
    """The driver does not release a GPU that any process has open."""
    library = install(monkeypatch, tmp_path, [Card()])
    monkeypatch.setattr(library, "nvmlDeviceGetCount_v2", lambda _count: 999)
    assert nvml.look()["gpus"] == []
    for part in (nvml.counts(None),):
        assert list(part) == []
    with pytest.raises(nvml.NoNvml):
        nvml.computing("0000:ff:00.0")
    assert library.opened == 0


def test_nvml_constants_match_nvidia_ml_py():
    """The constants are copied so that a machine without a GPU need not import 8,000 lines."""
    assert (pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_FI_DEV_POWER_INSTANT) == (nvml._AVERAGE_MW, nvml._INSTANT_MW)
    assert pynvml.nvmlClocksEventReasonApplicationsClocksSetting == nvml._APPLICATIONS
    assert pynvml.nvmlClocksEventReasonSwPowerCap == nvml._POWER
    reasons = {name.removeprefix("NVML_FI_DEV_CLOCKS_EVENT_REASON_"): getattr(pynvml, name) for name in dir(pynvml)}
    assert {
        "power_capped_us": (reasons["SW_POWER_CAP"],),
        "thermal_slowdown_us": (reasons["SW_THERM_SLOWDOWN"], reasons["HW_THERM_SLOWDOWN"]),
        "power_brake_us": (reasons["HW_POWER_BRAKE_SLOWDOWN"],),
    } == nvml._HELD_NS
    assert (nvml._SM, nvml._UNCORRECTED, nvml._VOLATILE) == (
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    assert (nvml._UNSIGNED_INT, nvml._UNSIGNED_LONG, nvml._UNSIGNED_LONG_LONG) == (
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
    )
    assert nvml._MODES[pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS] == "Exclusive_Process"
