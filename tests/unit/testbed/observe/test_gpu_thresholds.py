"""The table of GPU thresholds: readings and events for which a GPU is watched, drained or returned to the vendor."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.node.gpu.health import Health
from faultbed.testbed.node.gpu.xid import XIDS as INJECTED
from faultbed.testbed.node.gpu.xid import event
from faultbed.testbed.observe.gpu_thresholds import READINGS, XIDS, breaches, markdown, severest, xid_breaches

HEALTHY = Health("gpu0").counts()
PAGE = Path(__file__).parents[4] / "docs" / "gpu-thresholds.md"


def worst(**readings):
    return severest(one.action for one in breaches({**HEALTHY, **readings}))


def test_threshold_readings_are_those_that_gpus_report():
    named = {row.reading for row in READINGS} | {row.at_least for row in READINGS if isinstance(row.at_least, str)}
    assert named <= HEALTHY.keys()
    assert set(INJECTED.values()) <= XIDS.keys(), "an event that a fault writes has a threshold"
    assert breaches(HEALTHY) == ()


@pytest.mark.parametrize(
    ("readings", "action"),
    [
        ({"ecc_corrected": 10_000}, "watch"),
        ({"ecc_uncorrected": 1}, "drain"),
        ({"remap_pending": 1}, "drain"),
        ({"remap_failed": 1}, "RMA"),
        ({"remapped_rows": 511}, "watch"),
        ({"remapped_rows": 512}, "RMA"),
        ({"temp_c": 88}, "watch"),
        ({"temp_c": 89}, "drain"),
        ({"temp_c": 60, "slowdown_c": 55}, "drain"),
        ({"temp_c": 200, "slowdown_c": None, "shutdown_c": None}, "watch"),
        ({"ecc_uncorrected": None}, "watch"),
        ({"ecc_uncorrected": 1, "remap_failed": 1}, "RMA"),
    ],
)
def test_threshold_decides_from_its_value_on(readings, action):
    assert worst(**readings) == action


@pytest.mark.parametrize(("xid", "action"), [(92, "watch"), (63, "drain"), (64, "RMA"), (95, "drain"), (79, "drain")])
def test_threshold_of_an_event_names_number_and_count(xid, action):
    (breach,) = xid_breaches({xid: 3, 13: 5, 48: 0})
    assert breach.action == action
    assert breach.text.startswith(f"{action}: XID {xid}, 3 times: ")


@given(st.fixed_dictionaries({name: st.integers(0, 600) for name in HEALTHY}))
def test_threshold_breaches_come_with_the_severest_first_and_once_for_each_reading(readings):
    actual = breaches(readings)
    assert [one.action for one in actual] == sorted((one.action for one in actual), key=["RMA", "drain", "watch"].index)
    names = [one.text.split()[1] for one in actual]
    assert len(names) == len(set(names))


def test_threshold_page_is_up_to_date():
    """Regenerate it with `python -m faultbed.testbed.observe.gpu_thresholds > docs/gpu-thresholds.md`."""
    assert PAGE.read_text() == markdown()


@pytest.mark.parametrize("xid", [46, 62, 110, 119, 120, 140, 143, *range(144, 151), 154, 155, 158, 167, 171, 172])
def test_threshold_of_a_fatal_event_drains(xid):
    (breach,) = xid_breaches({xid: 1})
    assert breach.action == "drain"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3 NVRM: Xid (PCI:0000:c8:00 GPU-I:05): 94, pid=7, Contained: SM", ("0000:c8:00", 94)),
        ("3 NVRM: Xid (PCI:0000:c8:00 GPU-I:05 GPU-CI:00): 43, pid=7", ("0000:c8:00", 43)),
        ("3 NVRM: Xid (PCI:gpu0): 79, x", ("gpu0", 79)),
        (
            "NVRM: Xid (PCI:0000:c8:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            ("0000:c8:00", 154),
        ),
        (
            "NVRM: Xid (PCI:0000:c8:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            None,
        ),
        ("3 NVRM: Xid (PCI:0000:c8:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004)", ("0000:c8:00", 149)),
        ("3 NVRM: Xid (PCI:0000:c8:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 08 (0x004)", None),
        ("6 NVRM: loading", None),
    ],
)
def test_xid_event_names_the_gpu_and_leaves_out_what_calls_for_nothing(line, expected):
    assert event(line) == expected
