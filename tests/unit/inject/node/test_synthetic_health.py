"""Memory errors, row remapping and heat of a soft GPU: registers, events, and how the GPU reacts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planned_faults import assert_shell, soft
from waiting import until

from faultbed.inject.node.actuator import Refused, make
from faultbed.inject.node.gpu import synthetic_health
from faultbed.inject.node.mutant import Mutant
from faultbed.testbed.errors import UsageError
from faultbed.testbed.node import counts
from faultbed.testbed.node.gpu import health
from faultbed.testbed.node.gpu.health import IDLE_C, FaultyMemory, Health

GPU = "host1/gpu0."
GPU_PROGRAM = """
import sys
from faultbed.testbed.node.gpu import health
health.FOLDER = sys.argv[1]
from faultbed.traffic.node import softgpu
softgpu.serve(sys.argv[2])
"""


@pytest.fixture
def registers(tmp_path, monkeypatch):
    """Return the health registers of gpu0 in a separate folder, and the list of XIDs that faults write."""
    monkeypatch.setattr(health, "FOLDER", str(tmp_path / "health"))
    written = []
    monkeypatch.setattr(synthetic_health, "write_event", lambda gpu, xid: written.append((gpu, xid)))
    monkeypatch.setattr(synthetic_health, "require_log", lambda: None)
    return Health("gpu0"), written


def actuator(kind, **params):
    request = soft(kind, "host1:gpu0", for_s=4.0, **params).request
    return make(request["actuator"], dict(request["args"]))


def moved(before, after):
    """Return the changes that a watcher reports."""
    return {name: value - before[name] for name, value in after.items() if value != before[name]}


@pytest.mark.parametrize(
    ("kind", "params", "while_on", "ever", "xids"),
    [
        ("gpu.ecc", {"error": "corrected", "count": 5}, {"ecc_corrected": 5}, {"ecc_corrected_total": 5}, []),
        ("gpu.ecc", {"error": "high-rate", "count": 9}, {"ecc_corrected": 9}, {"ecc_corrected_total": 9}, [92]),
        ("gpu.ecc", {"error": "contained"}, {"ecc_uncorrected": 1}, {"ecc_uncorrected_total": 1}, [94]),
        ("gpu.ecc", {"error": "uncontained"}, {"ecc_uncorrected": 1}, {"ecc_uncorrected_total": 1}, [95]),
        ("gpu.row-remap", {}, {"remap_pending": 1}, {"remapped_rows": 1}, [63]),
        ("gpu.row-remap", {"state": "failed"}, {"remap_failed": 1}, {}, [64]),
        ("gpu.overheat", {"celsius": 80}, {"temp_c": 80 - IDLE_C}, {}, []),
    ],
)
def test_gpu_fault_sets_registers_that_a_reset_clears_and_totals_that_stay(
    registers, kind, params, while_on, ever, xids
):
    gpu, written = registers
    fault, before = actuator(kind, **params), gpu.counts()
    assert fault.prepare()["applied"] is False
    fault.on()
    assert fault.read() == {**fault.read(), "applied": True, "gpu": "gpu0"}
    assert moved(before, gpu.counts()) == {**while_on, **ever}
    assert [xid for _, xid in written] == xids
    assert health.facts(), "a leftover must be visible in the fingerprint"
    fault.off()
    assert fault.read()["applied"] is False
    assert moved(before, gpu.counts()) == ever
    assert health.facts() == []


@pytest.mark.parametrize(
    ("kind", "params"), [("gpu.ecc", {}), ("gpu.row-remap", {}), ("gpu.overheat", {"celsius": 70})]
)
def test_gpu_registers_of_another_fault_are_refused_and_the_stored_revert_alone_resets(registers, kind, params):
    gpu, _ = registers
    before = gpu.counts()
    fault = actuator(kind, **params)
    fault.prepare()
    script = fault.revert_script()
    assert_shell(script)
    fault.on()
    with pytest.raises(Refused, match="heal"):
        actuator(kind, **params).prepare()
    for _ in range(2):
        assert subprocess.run(["sh"], input=script, text=True, check=False, timeout=20).returncode == 0
    assert not moved(before, gpu.counts()).keys() - {"ecc_uncorrected_total", "remapped_rows"}


@pytest.mark.parametrize("how", ["noop", "lie"])
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        *(("gpu.ecc", {"error": error}) for error in ("corrected", "high-rate", "contained", "uncontained")),
        *(("gpu.row-remap", {"state": state}) for state in ("pending", "failed")),
        ("gpu.overheat", {"celsius": 80}),
    ],
)
def test_gpu_fault_without_action_moves_none_of_its_witnesses(registers, kind, params, how):
    """Every kind has a witness or a state that only its action changes, so that its receipt has doubts without it."""
    gpu, written = registers
    planned = soft(kind, "host1:gpu0", for_s=4.0, **params)
    fault, before = Mutant(make(planned.request["actuator"], dict(planned.request["args"])), how), gpu.counts()
    fault.prepare()
    fault.on()
    values = {f"{GPU}{name}": value for name, value in gpu.counts().items()}
    assert all(values.get(key) != value for key, value in planned.mechanism.while_on)
    assert planned.mechanism.while_on or planned.mechanism.must_move
    assert (moved(before, gpu.counts()), written) == ({}, [])


def test_gpu_errors_at_a_rate_are_counted_and_reported_once_if_corrected(registers):
    gpu, written = registers
    fault = actuator("gpu.ecc", error="high-rate", count=2, rate=10)
    fault.prepare()
    fault.on()
    fault.tick(time.monotonic_ns() + 1_000_000_000)
    assert 11 <= fault.hits() == gpu.counts()["ecc_corrected"] <= 13
    assert written == [("gpu0", 92)]


@pytest.mark.parametrize(
    ("celsius", "effect", "witnesses"),
    [
        (88, None, set()),
        (89, "CgroupActuator", {"nr_throttled", "thermal_slowdown_us"}),
        (94, "CgroupActuator", {"nr_throttled", "thermal_slowdown_us"}),
        (95, "ServiceActuator", {"xids"}),
    ],
)
def test_gpu_heat_acts_from_its_thresholds_on(registers, celsius, effect, witnesses):
    """Below the slowdown threshold nothing happens; from the shutdown threshold on the GPU is lost."""
    fault = actuator("gpu.overheat", celsius=celsius)
    assert type(fault._effect).__name__ == (effect or "NoneType")
    planned = soft("gpu.overheat", "host1:gpu0", for_s=4.0, celsius=celsius)
    assert {key.rpartition(".")[2] for each in planned.mechanism.must_move for key in each.any_of} == witnesses
    assert (f"{GPU}nr_throttled" in planned.mechanism.must_not_move) is (effect is None)
    assert dict(planned.mechanism.while_on).get(f"{GPU}quota_us", -1) == (None if celsius >= 95 else -1)


def test_gpu_heat_counts_its_slowdown_and_limits_the_cgroup(registers, tmp_path):
    gpu, _ = registers
    group = tmp_path / "cgroup"
    group.mkdir()
    for name, text in {"cpu.max": "max 100000", "cgroup.procs": "1", "cpu.stat": "nr_throttled 0"}.items():
        (group / name).write_text(text)
    args = {"gpu": "gpu0", "celsius": 92, "unit": "x", "cgroup": str(group), "slow": "5000 10000"}
    fault = make("gpu_heat", args)
    fault.prepare()
    fault.on()
    assert (group / "cpu.max").read_text() == "5000 10000"
    until(lambda: gpu.counts()["thermal_slowdown_us"] > 0)
    fault.off()
    assert (group / "cpu.max").read_text() == "max 100000"
    total = gpu.counts()["thermal_slowdown_us"]
    assert total > 0
    time.sleep(0.01)
    assert gpu.counts()["thermal_slowdown_us"] == total


def test_gpu_heat_of_a_killed_holder_is_reverted_with_its_limit(registers, tmp_path):
    """PID 1 runs the stored script when every other process is dead: both temperature and limit are restored."""
    gpu, _ = registers
    group = tmp_path / "cgroup"
    group.mkdir()
    for name, text in {"cpu.max": "max 100000", "cgroup.procs": "1", "cpu.stat": "nr_throttled 0"}.items():
        (group / name).write_text(text)
    fault = make("gpu_heat", {"gpu": "gpu0", "celsius": 92, "unit": "x", "cgroup": str(group), "slow": "5000 10000"})
    fault.prepare()
    script = fault.revert_script()
    assert_shell(script)
    fault.on()
    for _ in range(2):
        assert subprocess.run(["sh"], input=script, text=True, check=False, timeout=20).returncode == 0
        assert (group / "cpu.max").read_text() == "max 100000\n"
        assert gpu.counts()["temp_c"] == IDLE_C
    gpu.set("heat", temp_c=92)
    (group / "cpu.max").unlink()
    assert subprocess.run(["sh"], input=script, text=True, check=False, timeout=20).returncode == 0, "the group is gone"
    assert health.facts() == []


def test_gpu_heat_below_idle_is_refused():
    with pytest.raises(UsageError, match="46"):
        soft("gpu.overheat", "host1:gpu0", celsius=40)


def test_soft_gpu_registers_are_read_by_the_watcher(registers, tmp_path, monkeypatch):
    gpu, _ = registers
    unit = tmp_path / "slice" / "faultbed-gpu0.service"
    unit.mkdir(parents=True)
    for name, text in {"cpu.max": "max 100000", "cgroup.procs": "", "cpu.stat": "nr_throttled 0"}.items():
        (unit / name).write_text(text)
    monkeypatch.setattr(counts, "_SLICE", str(tmp_path / "slice"))
    gpu.set("rows", remap_pending=1)
    values = dict(counts._machine())
    assert (values["gpu0.remap_pending"], values["gpu0.ecc_uncorrected"], values["gpu0.temp_c"]) == (1, 0, IDLE_C)


def test_soft_gpu_registers_are_sampled_once_they_have_changed(registers, tmp_path, monkeypatch):
    gpu, _ = registers
    unit = tmp_path / "slice" / "faultbed-gpu0.service"
    unit.mkdir(parents=True)
    for name, text in {"cpu.max": "max 100000", "cgroup.procs": "", "cpu.stat": "nr_throttled 0"}.items():
        (unit / name).write_text(text)
    monkeypatch.setattr(counts, "_SLICE", str(tmp_path / "slice"))
    place = counts.Place(None)
    try:
        place.read()
        samples = [place.sample().get("gpu0.temp_c") for _ in range(2)]
        gpu.set("heat", temp_c=91)
        samples += [place.sample().get("gpu0.temp_c") for _ in range(2)]
        gpu.reset("heat")
        samples += [place.sample().get("gpu0.temp_c") for _ in range(2)]
    finally:
        place.close()
    assert samples == [None, None, 91, None, IDLE_C, None]


def test_contained_error_ends_one_program_and_an_uncontained_one_all_until_the_reset(registers):
    gpu, _ = registers
    memory = FaultyMemory(gpu)
    assert memory.failure() is None
    gpu.set("memory", ecc_corrected=1000, error="high-rate")
    assert memory.failure() is None
    gpu.reset("memory")
    gpu.set("memory", ecc_uncorrected=1, error="contained")
    assert "XID 94" in memory.failure()
    assert memory.failure() is None
    gpu.set("memory", ecc_uncorrected=2)
    assert "XID 94" in memory.failure()
    assert FaultyMemory(gpu).failure() is None, "a GPU that starts again has not met the error before it"
    gpu.reset("memory")
    gpu.set("memory", ecc_uncorrected=1, error="uncontained")
    assert "XID 95" in memory.failure()
    assert "XID 95" in memory.failure()
    gpu.reset("memory")
    assert memory.failure() is None


def test_soft_gpu_answers_a_program_with_its_uncorrected_error(registers, tmp_path):
    """The real program: work is refused while the error is uncontained, and done after the reset."""
    gpu, _ = registers
    path = str(tmp_path / "gpu0.sock")
    process = subprocess.Popen([sys.executable, "-c", GPU_PROGRAM, health.FOLDER, path])
    try:
        until(lambda: Path(path).exists(), within_s=60)
        time.sleep(0.1)  # between bind and listen
        with connect(path) as client:
            assert ask(client)["units"] == 1
            gpu.set("memory", ecc_uncorrected=1, error="uncontained")
            assert [ask(client)["error"][:23] for _ in range(2)] == ["uncorrectable ECC error"] * 2
            gpu.reset("memory")
            assert ask(client)["units"] == 1
    finally:
        process.kill()
        process.wait()


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    client.connect(path)
    return client


def ask(client):
    client.sendall(b'{"units": 1}\n')
    return json.loads(client.makefile().readline())
