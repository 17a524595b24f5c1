"""The bench of tapers: the share expected from a lab's rates, and when a measured share is decided."""

from __future__ import annotations

import pytest

from bench.rows import MISSED, OPEN, REACHED
from bench.throughput.taper import row_of, share_of_taper
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventory_named


def zones_with(taper, folder):
    text = inventory_named("soft-zones").read_text()
    assert text.count("taper: 2.8") == 1
    path = folder / "zones.yml"
    path.write_text(
        text.replace("taper: 2.8", f"taper: {taper}").replace("faultbed_name: soft-zones", "faultbed_name: z")
    )
    return lab_inventory.load(path)


@pytest.mark.parametrize("taper", [1, 2.8, 7])
def test_share_is_one_over_the_taper_of_the_inventory(tmp_path, taper):
    assert share_of_taper(zones_with(taper, tmp_path)) == pytest.approx(1 / taper, rel=1e-3)


def test_lab_without_rates_is_refused_by_name():
    with pytest.raises(LabError, match="the spines of soft-3rack have no rates"):
        share_of_taper(lab_inventory.load(inventory_named("soft-3rack")))


@pytest.mark.parametrize(
    ("ratios", "decision"),
    [([0.36, 0.35, 0.36, 0.35], REACHED), ([0.30, 0.30, 0.31, 0.30], MISSED), ([0.30, 0.42, 0.33, 0.38], OPEN)],
)
def test_row_is_decided_only_by_a_whole_interval(ratios, decision):
    assert row_of(ratios, 0.357)[-1] == decision
