"""What a real GPU and its driver answered on a GPU day (tests/lab/gpu_day.sh), through everything that reads it. Pure.

`tests/data/gpu-day` has the files of that day as the script wrote them, without what identifies the machine; each names
GPU, driver and command. The alarms within `straggler.json` are those of the detector of that day.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
from house import DATA, HOUSE

from faultbed.harness.record import power_file
from faultbed.testbed.preflight.rack_formats import gpu_wrong, gpus

FOLDER = DATA / "gpu-day"
TRACES = sorted(path.name for path in FOLDER.glob("power-*.parquet"))


@pytest.fixture
def programs(monkeypatch):
    """Import the programs of the GPU day, which have the comparisons."""
    monkeypatch.syspath_prepend(str(HOUSE / "tests/lab/gpu_day"))
    monkeypatch.setattr(sys, "argv", ["gpu_day"])
    import machine
    import readers
    import square_wave
    import straggler

    return {"machine": machine, "readers": readers, "square_wave": square_wave, "straggler": straggler}


def recorded(name):
    return json.loads((FOLDER / name).read_text())


def test_gpu_day_is_of_a_real_gpu():
    assert recorded("readers.json")["about"]["measurement"] == "yes"


def test_gpu_day_data_does_not_identify_the_machine(programs):
    identity = re.compile(rb"GPU-[0-9a-f]{8}-|(Serial Number|UUID|PDI|GUID) *: (?!removed|N/A)|/tmp/|/home/")
    files = sorted(FOLDER.iterdir())
    assert len(files) >= 6
    assert not [path.name for path in files if identity.search(path.read_bytes())]
    made = "  Serial Number : 1234\n  GPU UUID : GPU-01234567-89ab-cdef\n  GPU PDI : 0x12\n  Bus : 0x00\n"
    assert programs["machine"].anonymous(made) == (
        "  Serial Number : removed\n  GPU UUID : removed\n  GPU PDI : removed\n  Bus : 0x00\n"
    )
    assert programs["machine"].anonymous("(UUID: GPU-01234567-89ab-cdef)\nMEM : 1") == "(UUID: removed\nMEM : 1"


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_nvml_readers_agree_with_nvidia_smi(state, programs):
    differing = [words for words, agrees in programs["readers"].compare(recorded("readers.json")[state]) if not agrees]
    assert not differing


def test_nvml_report_of_a_real_gpu_is_decoded():
    reported = gpus(json.dumps(recorded("machine-before.json")["look"]))
    assert reported.why is None
    assert [gpu_wrong(gpu) for gpu in reported.gpus] == [[]]


@pytest.mark.parametrize("kind", ["gpu.throttle", "gpu.power-cap"])
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_readback_of_a_real_gpu_is_not_taken_for_the_fault(kind, state):
    read = recorded("plans.json")["plans"][kind][state]["reading"]
    assert (read["applied"], read["said"].partition(" ")[0]) == (False, "free")


@pytest.mark.parametrize("strength", ["whole", "burst"])
def test_slowed_rank_of_a_real_gpu_is_named(strength, programs):
    day = recorded("straggler.json")
    rows, healthy = day["results"][strength]["rows_ns"], day["healthy"]
    alarms = programs["straggler"].detected(rows, healthy)
    assert [(alarm["rank"], alarm["delay"] >= 1) for alarm in alarms] == [(programs["straggler"].SLOW_RANK, True)]
    assert programs["straggler"].is_right(programs["straggler"].judged(rows, healthy, len(rows) - 1), rows)


@pytest.mark.parametrize("name", TRACES)
def test_power_dips_of_a_real_gpu_are_ordered(name, programs):
    samples, spans, _ = power_file.read(FOLDER / name)
    result = programs["square_wave"].calibrated(samples, spans, "instant_mw")
    assert result["ordered"] == [True] * programs["square_wave"].CYCLES
    assert abs(result["energy_error"]) <= 0.1
