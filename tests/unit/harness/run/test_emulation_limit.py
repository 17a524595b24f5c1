"""A soft lab whose load may exceed half of what its machine can forward gives INCONCLUSIVE."""

from __future__ import annotations

import time
from types import SimpleNamespace

import house
import msgspec
import pytest
from synthetic_run import changed, synthetic_run

from faultbed.harness import judge
from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode, load
from faultbed.harness.live import emulation_limit
from faultbed.harness.live.emulation_limit import Capacity, capacity_of
from faultbed.harness.parts.emulation.emulation_part import OfferedLoad
from faultbed.harness.parts.part import Planned
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.prepare.resolve import resolve
from faultbed.harness.verdict import Verdict
from faultbed.testbed.backends.soft import lab_state
from faultbed.testbed.backends.soft.lab_state import LabState
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.observe import cpu_speed

ZONES = lab_inventory.load(house.HOUSE / "inventory" / "soft-zones.yml")
SOFT = lab_inventory.load(house.HOUSE / "inventory" / "soft.yml")
EACH = 400e9 / 64000
"""Rate of a host's link in soft-zones, in bits/s."""


def planned(text, inventory=ZONES, more=""):
    """Return the load that the plan of an experiment says it offers; None: the plan says nothing."""
    content = f'name = "x"\n[workload]\n{text}{more}'.encode()
    plan = resolve(decode(content, source="x.toml"), content, inventory).plan
    load = run_plan.decode(run_plan.encode(plan)).fitted("emulation", OfferedLoad)
    return None if load is None else load.offered_bps


def test_offered_rate_is_the_smaller_sum_of_senders_and_receivers():
    names = [f"host{n}:rxe0" for n in (1, 2, 3, 4)]
    assert emulation_headroom.link_limit_bps(names, names, ZONES.topology, 64000) == pytest.approx(4 * EACH)
    assert emulation_headroom.link_limit_bps(names, names[:1], ZONES.topology, 64000) == pytest.approx(EACH), (
        "an incast has one receiver"
    )
    assert emulation_headroom.link_limit_bps(names, names, SOFT.topology, 64000) is None, "no link has a rate"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ('flow = "write"\npattern = "in-zone"\nduration = "5s"\n', 8),
        ('flow = "write"\npattern = "incast"\nduration = "5s"\n', 1),
        ('flow = "write"\nsrc = "host1:rxe0"\ndst = "host3:rxe0"\nduration = "5s"\n', 1),
        ('flow = "write"\npattern = "in-zone"\nrate = "1Mb/s"\nduration = "5s"\n', 8e6 / EACH),
        ('collective = "all-reduce"\nsize = "1MiB"\niterations = 3\n', 4),
    ],
)
def test_sent_rate_is_limited_by_links_or_pacing(text, links):
    assert planned(text) == pytest.approx(links * EACH)


@pytest.mark.parametrize(("rate", "offered_bps"), [('rate = "2Mb/s"', 3e6), ("", 2 * EACH)])
def test_sent_rate_includes_the_bystander(rate, offered_bps):
    """A bystander that is not paced sends as fast as its link goes, and so may the workload beside it."""
    flow = 'flow = "write"\nsrc = "host1:rxe0"\ndst = "host3:rxe0"\nrate = "1Mb/s"\nduration = "5s"\n'
    bystander = f'[bystander]\nsrc = "host2:rxe0"\ndst = "host4:rxe0"\n{rate}\n'
    assert planned(flow, more=bystander) == pytest.approx(offered_bps)


def test_sent_rate_of_a_lab_without_shapers_is_unknown():
    assert planned('flow = "write"\npattern = "incast"\nduration = "5s"\n', SOFT) is None


def judged(offered_bps=None, **fields):
    """Return the verdict of a run whose plan says what it offers; `fields` are those of its evidence."""
    experiment = fit(load(house.DEMO), SOFT.topology, "soft")
    run = changed(synthetic_run(), **fields)
    plan = run_plan.plan(experiment, inventory_digest="9f" * 32, version="0")
    if offered_bps is not None:
        plan = msgspec.structs.replace(plan, parts={"emulation": {"offered_bps": offered_bps}})
    return judge.judge(
        before=Planned(plan=plan, expectations=experiment.expectations), run=run, observed=observe(run)
    ).verdict


def test_run_beyond_half_the_emulation_limit_is_inconclusive_with_both_numbers():
    output = judged(offered_bps=60e6, carried_bps=117e6)
    check = next(check for check in output.checks if check.name == "emulation")
    assert (output.verdict, check.verdict) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert (check.observed, check.bound) == (60.0, 58.5)
    assert "the workload may send 60 Mb/s; the emulation forwards 117 Mb/s in total" in check.detail
    assert "faultbed_rate_scale" in check.detail


def test_run_without_a_measurement_of_the_emulation_is_inconclusive():
    output = judged(offered_bps=50e6, carried_bps=None)
    check = next(check for check in output.checks if check.name == "emulation")
    assert (output.verdict, check.verdict, check.bound) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, None)
    assert "could not be measured" in check.detail


def test_run_whose_evidence_of_the_emulation_is_lost_is_inconclusive():
    """The claim vanished with its evidence, and the run passed."""
    output = judged(offered_bps=50e6, emulation=None)
    check = next(check for check in output.checks if check.name == "emulation")
    assert (output.verdict, check.verdict, check.detail) == (
        Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, "nothing is known about it",
    )  # fmt: skip


def test_run_within_half_the_emulation_limit_passes():
    assert judged(offered_bps=50e6, carried_bps=117e6).verdict is Verdict.PASS
    assert "emulation" not in {check.name for check in judged().checks}
    assert not emulation_headroom.exceeds_headroom(50e6, 100e6), "just half of it is not beyond"


class World:
    """Records what `capacity_of` does to a lab, in order. `limits` are the results of its measurements in turn."""

    def __init__(self, monkeypatch, tmp_path, *limits):
        self.did = []
        self.found = list(limits)
        self.speed = 2e9
        monkeypatch.setattr(emulation_limit, "hash_rate", lambda: self.speed)
        monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
        monkeypatch.setattr(emulation_limit, "measure", self.measure)
        self.lab = SimpleNamespace(name="soft-zones", inventory_model=ZONES, accelerator="tcg")

    def measure(self, lab, key, speed):
        self.did.append("measure")
        bps = self.found.pop(0)
        if bps is None:
            raise emulation_limit.NotMeasured("a flow failed")
        return Capacity(key=key, flows=8, carried_bps=bps, hash_rate=speed)

    def __call__(self, offered, lab=None):
        return capacity_of(lab or self.lab, offered, lambda: self.did.append("reset"), lambda _: None).carried_bps


def test_emulation_limit_is_measured_once_and_the_lab_is_reset(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, 117e6)
    assert world(50e6) == world(30e6) == 117e6
    assert world.did == ["measure", "reset"]


def test_emulation_limit_exceeded_is_measured_again(monkeypatch, tmp_path):
    """The machine may have been busy meanwhile. One slow minute must not make all later runs INCONCLUSIVE."""
    world = World(monkeypatch, tmp_path, 60e6, 117e6)
    assert (world(50e6), world(50e6), world(50e6)) == (60e6, 117e6, 117e6)
    assert world.did == ["measure", "reset"] * 2


def test_emulation_limit_recorded_on_a_quiet_machine_is_measured_again_on_a_busy_one(monkeypatch, tmp_path):
    """400 Mb/s of a quiet night were believed at noon, when the machine forwarded 60 Mb/s: PASS."""
    world = World(monkeypatch, tmp_path, 400e6, 60e6)
    assert world(150e6) == 400e6
    world.speed = 0.5e9
    assert world(150e6) == 60e6
    assert emulation_headroom.exceeds_headroom(150e6, 60e6)


def test_emulation_limit_is_worth_as_much_as_the_machine_is_now(monkeypatch, tmp_path):
    """A machine that is a little slower now, with room to spare, is not measured again, and gains nothing by noise."""
    world = World(monkeypatch, tmp_path, 400e6)
    assert world(100e6) == 400e6
    world.speed = 1.5e9
    assert world(100e6) == pytest.approx(300e6)
    world.speed = 2.2e9
    assert world(100e6) == 400e6
    assert world.did == ["measure", "reset"]


def test_emulation_limit_recorded_without_a_speed_does_not_count(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, 400e6, 60e6)
    world(150e6)
    (path,) = tmp_path.rglob(emulation_limit.FILE)
    recorded = msgspec.json.decode(path.read_bytes())
    for broken in ({"hash_rate": 0.0}, {"hash_rate": None}):
        path.write_bytes(msgspec.json.encode({**recorded, **broken}))
        world.found = [60e6]
        assert world(150e6) == 60e6


def test_hash_rate_counts_the_bytes_that_all_cpus_hash(monkeypatch):
    """Two CPUs that need at least 2 ms for each MiB hash at most 1 GiB/s together."""
    monkeypatch.setattr(cpu_speed.os, "cpu_count", lambda: 2)
    slow = SimpleNamespace(sha256=lambda _: SimpleNamespace(digest=lambda: time.sleep(0.002)))
    monkeypatch.setattr(cpu_speed, "hashlib", slow)
    assert 0 < cpu_speed.hash_rate(0.1) <= 2 * (1 << 20) / 0.002


def test_emulation_limit_of_a_different_machine_or_inventory_is_ignored(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, 117e6, 400e6)
    world(50e6)
    assert world(50e6, replace_lab(world.lab, accelerator="kvm")) == 400e6


def replace_lab(lab, **fields):
    return SimpleNamespace(**{**vars(lab), **fields})


def test_emulation_limit_failed_measurement_resets_the_lab(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, None)
    with pytest.raises(emulation_limit.NotMeasured):
        world(50e6)
    assert world.did == ["measure", "reset"]


def test_emulation_limit_key_depends_on_the_rates(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, 117e6, 90e6)
    world(50e6)
    other = tmp_path / "other.yml"
    other.write_text(ZONES.path.read_text().replace("64000", "32000"))
    assert world(40e6, replace_lab(world.lab, inventory_model=lab_inventory.load(other))) == 90e6


@pytest.mark.parametrize("offered", [float("nan"), -1.0, float("inf")])
def test_load_that_is_no_number_exceeds_the_headroom(offered):
    assert emulation_headroom.exceeds_headroom(offered, 100e6)
    assert emulation_headroom.exceeds_headroom(1e6, float("nan"))


def record_state(tmp_path, key):
    folder = tmp_path / "labs" / "soft-zones"
    folder.mkdir(parents=True, exist_ok=True)
    state = LabState(inventory=str(ZONES.path), key=key, accelerator="tcg", image="9f", vms={}, ready=True)
    lab_state.write(folder / "state.json", state)


def test_emulation_limit_of_another_image_does_not_count(monkeypatch, tmp_path):
    """The snapshot key covers the image and QEMU, which decide how much the machine can forward."""
    record_state(tmp_path, "made-of-one-image")
    world = World(monkeypatch, tmp_path, 117e6, 90e6)
    assert world(40e6) == world(40e6) == 117e6
    record_state(tmp_path, "made-of-another-image")
    assert world(40e6) == 90e6


def test_emulation_limit_of_another_cpu_does_not_count(monkeypatch, tmp_path):
    """A home folder may move to another machine, whose CPUs may be slower although there are as many."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(emulation_limit, "_CPUINFO", cpuinfo)
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Xeon 1\ncpu MHz\t: 2100.0\n")
    world = World(monkeypatch, tmp_path, 117e6, 90e6, 30e6)
    assert world(40e6) == 117e6
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Xeon 1\ncpu MHz\t: 3400.0\n")
    assert world(40e6) == 117e6, "the clock of a CPU changes all the time"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Xeon 2\ncpu MHz\t: 2100.0\n")
    assert world(40e6) == 90e6
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert world(10e6) == 30e6, "no model name"
