"""Preflight compares every GPU's memory and temperature with the thresholds, on both kinds of lab."""

from __future__ import annotations

import json

import pytest
from rack_state import rack_state

from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.node import counts
from faultbed.testbed.node.gpu import health
from faultbed.testbed.node.watch import Watch
from faultbed.testbed.preflight.checks import run_checks, unchecked_parts
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.gpu_health_check import CHECK
from faultbed.testbed.preflight.rack_formats import gpus
from faultbed.testbed.shipped import inventories

RACK = lab_inventory.load(inventories() / "rack-h100.example.yml")
SOFT = lab_inventory.load(inventories() / "soft.yml")


def soft_state(monkeypatch, folder, **set_by_part):
    """Return the watchers' reports of a soft lab in which host2's GPU has these registers."""
    monkeypatch.setattr(health, "FOLDER", str(folder))
    healthy = json.dumps(health.look(["gpu0"]))
    for part, values in set_by_part.items():
        health.Health("gpu0").set(part, **values)
    state = {host.name: Facts(raw={"gpu": healthy}) for host in SOFT.topology.hosts}
    state["host2"].raw["gpu"] = json.dumps(health.look(["gpu0"]))
    return state


def wrong(inventory, state):
    return [(finding.where, finding.observed, finding.expected) for finding in run_checks(inventory, state, [CHECK])]


def test_gpu_health_of_healthy_gpus_is_right_on_both_kinds_of_lab(monkeypatch, tmp_path):
    for inventory, state in ((SOFT, soft_state(monkeypatch, tmp_path)), (RACK, rack_state())):
        assert wrong(inventory, state) == []
        assert unchecked_parts(inventory, state, [CHECK]) == []


@pytest.mark.parametrize(
    ("registers", "message", "do"),
    [
        ({"memory": {"ecc_uncorrected": 2}}, "drain: ecc_uncorrected is 2 (from 1 on)", "reset the GPU"),
        ({"rows": {"remap_pending": 1}}, "drain: remap_pending is 1 (from 1 on)", "remaps the row"),
        ({"rows": {"remap_failed": 1}}, "RMA: remap_failed is 1 (from 1 on)", "return the GPU"),
        ({"heat": {"temp_c": 89}}, "drain: temp_c is 89 (from 89 on)", "airflow"),
        ({"heat": {"temp_c": 96}}, "drain: temp_c is 96 (from 95 on)", "power-cycle"),
    ],
)
def test_gpu_health_breach_names_gpu_counter_threshold_and_remedy(monkeypatch, tmp_path, registers, message, do):
    ((where, actual, remedy),) = wrong(SOFT, soft_state(monkeypatch, tmp_path, **registers))
    assert where == "host2:gpu0"
    assert actual.startswith(message)
    assert do in remedy


def test_gpu_health_of_a_soft_host_comes_from_its_watcher(monkeypatch, tmp_path):
    """The real watcher reads a real folder of cgroups, and skips a GPU that is gone from it."""
    for name in ("gpu0", "gpu1"):
        (tmp_path / f"faultbed-{name}.service").mkdir()
    monkeypatch.setattr(counts, "_SLICE", str(tmp_path))
    state = soft_state(monkeypatch, tmp_path / "health", rows={"remap_failed": 1})
    answer = {"event": "gpus", "seq": 7, **Watch().gpus({})}
    state["host2"].raw["gpu"] = json.dumps(answer)
    assert [gpu.place for gpu in gpus(state["host2"].raw["gpu"]).gpus] == ["gpu0", "gpu1"]
    ((where, message, _),) = wrong(SOFT, state)
    assert (where, message.partition(":")[0]) == ("host2:gpu0", "RMA")
    for name in ("gpu0", "gpu1"):
        (tmp_path / f"faultbed-{name}.service").rmdir()
    state["host2"].raw["gpu"] = json.dumps(Watch().gpus({}))
    assert [unchecked.where for unchecked in unchecked_parts(SOFT, state, [CHECK])] == ["host2"]


@pytest.mark.parametrize("registers", [{"memory": {"ecc_corrected": 900}}, {"heat": {"temp_c": 88}}])
def test_gpu_health_below_the_thresholds_is_right(monkeypatch, tmp_path, registers):
    assert wrong(SOFT, soft_state(monkeypatch, tmp_path, **registers)) == []


def test_gpu_health_that_is_not_reported_is_not_looked_at(monkeypatch, tmp_path):
    state = soft_state(monkeypatch, tmp_path)
    state["host1"].raw["gpu"] = json.dumps({"driver": None, "why": None, "gpus": [{"index": 0, "temp_c": 95}]})
    state["host2"].raw["gpu"] = json.dumps({"driver": None, "why": "the GPU is gone", "gpus": []})
    assert wrong(SOFT, state) == []
    why_by_place = {unchecked.where: unchecked.why for unchecked in unchecked_parts(SOFT, state, [CHECK])}
    assert why_by_place.keys() == {"host1:gpu0", "host2"}
    assert "ecc_uncorrected" in why_by_place["host1:gpu0"]
    assert why_by_place["host2"] == "0 of 1 GPUs answer: the GPU is gone"


def test_gpu_health_of_a_rack_is_named_by_bus_address():
    state = rack_state()
    decoded = json.loads(state["host1"].raw["gpu"])
    decoded["gpus"][3] |= {"remap_failed": True, "remapped_rows": 512}
    state["host1"].raw["gpu"] = json.dumps(decoded)
    assert [message.partition(" is")[0] for _, message, _ in wrong(RACK, state)] == [
        "RMA: remapped_rows",
        "RMA: remap_failed",
    ]
    assert {where for where, _, _ in wrong(RACK, state)} == {"host1:gpu3 (00000000:19:00.0)"}
