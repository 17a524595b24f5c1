"""With any inventory and policy, no accepted plan exceeds its policy or touches the management path."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_faults import planned_at
from samples import samples

from faultbed.inject.fault_plan import plan_all
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.safety import Forbidden
from faultbed.inject.strategies import schedules
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory import soft_presets
from faultbed.testbed.inventory.schema import SafetyVars
from faultbed.testbed.inventory.soft_presets import Preset
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import audit_log

RACK = inventory_module.load(inventories() / "rack-h100.example.yml")
MANAGEMENT = {"mgmt0", "lo", "eth0"}
"""Of guests (`mgmt0`) and of switches (`eth0`)."""


@pytest.fixture(scope="module")
def soft_labs(tmp_path_factory):
    """Load a soft lab of any size, once."""
    folder = tmp_path_factory.mktemp("labs")

    @cache
    def lab(racks, hosts, rnics, ctsws):
        name = f"soft-{racks}-{hosts}-{rnics}-{ctsws}"
        sized = Preset(
            name=name, summary="made up", racks=racks, hosts_per_rack=hosts, rnics_per_host=rnics, ctsws=ctsws
        )
        path = folder / f"{name}.yml"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(soft_presets, "PRESETS", {**soft_presets.PRESETS, name: sized})
            path.write_text(soft_presets.inventory_text(name))
        return inventory_module.load(path)

    return lab


def patterns(topology: Topology):
    names = sorted(topology.target_names())
    kinds = [f"{name.partition(':')[0]}*" for name in names]
    return st.lists(st.sampled_from(["*", *names, *kinds]), max_size=6)


limits = st.one_of(st.none(), st.integers(1, 3))


def policies(topology: Topology):
    return st.builds(
        SafetyVars,
        may_disrupt=patterns(topology),
        longest_fault_s=st.sampled_from([1.0, 3.0, 60.0]),
        irreversible=st.sampled_from(["never", "confirm", "allow"]),
        most_links=limits,
        most_hosts=limits,
        most_switches=limits,
        all_uplinks=st.sampled_from([None, "never", "allow"]),
        min_spacing_s=st.sampled_from([0.0, 0.5, 2.0, 10.0]),
    )


def accepted(specs, inventory):
    """Return the faults if the policy accepts them; None if it refuses."""
    faults = plan_all(specs, inventory.topology, lab_kind=inventory.kind)
    try:
        for fault in faults:
            safety.check(fault, inventory)
        blast_radius.check(faults, inventory)
        safety.check_spacing(faults, inventory)
    except Forbidden:
        return None
    return faults


def words_of(value):
    """Yield all strings in a request or a command, at any depth."""
    if isinstance(value, dict):
        return set().union(*(words_of(item) for item in value.items()), set())
    if isinstance(value, list | tuple):
        return set().union(*(words_of(item) for item in value), set())
    return set(str(value).replace(":", " ").replace("'", " ").split())


def hold(faults, inventory):
    """Check a policy by an independent implementation of its rules."""
    policy = inventory.safety
    unsaid = math.inf if inventory.kind == "soft" else 1
    for fault in faults:
        target = fault.target
        names = {target.text}
        if target.link is not None and target.kind == "port":
            a, b = target.link.a.node, target.link.b.node
            names |= {target.link.name, f"{a}:{b}", f"{b}:{a}"}
        assert any(fnmatchcase(name, pattern) for name in names for pattern in policy.may_disrupt)
        assert fault.spec.for_s <= policy.longest_fault_s
        if not CATALOGUE[fault.kind].reversible:
            assert policy.irreversible == "allow"
        assert (
            not words_of([dict(fault.request["args"]), [(step.do, step.undo) for step in fault.mechanism.steps]])
            & MANAGEMENT
        )
    for one, two in itertools.permutations(faults, 2):
        if one.spec.at_s <= two.spec.at_s and policy.min_spacing_s > 0:
            assert two.spec.at_s - one.ends_s >= policy.min_spacing_s
    for moment in {fault.spec.at_s for fault in faults}:
        now = [fault.target for fault in faults if fault.spec.at_s <= moment < fault.spec.at_s + fault.spec.for_s]
        links = {target.link.name for target in now if target.link is not None}
        hosts = {target.node for target in now if target.kind in ("host", "gpu")}
        switches = {target.node for target in now if target.kind == "switch"}
        assert len(links) <= (unsaid if policy.most_links is None else policy.most_links)
        assert len(hosts) <= (unsaid if policy.most_hosts is None else policy.most_hosts)
        assert len(switches) <= (unsaid if policy.most_switches is None else policy.most_switches)


FEW = st.sampled_from([(1, 2, 2, 1), (2, 2, 1, 2)])
"""Racks, hosts in each, RNICs of each, spines. Ansible reads an inventory in seconds, so unit tests have two."""
MANY = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


def check_one(data, soft_labs, sizes):
    base = soft_labs(*data.draw(sizes))
    inventory = replace(base, safety=data.draw(policies(base.topology)))
    specs = data.draw(schedules(base.topology, most=4))
    faults = accepted(specs, inventory)
    if faults is not None:
        hold(faults, inventory)
    return faults


@settings(max_examples=samples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_policy_bounds_hold_for_every_accepted_plan(data, soft_labs):
    check_one(data, soft_labs, FEW)


@pytest.mark.slow
@settings(
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_policy_bounds_hold_for_ten_thousand_accepted_plans(data, soft_labs):
    check_one(data, soft_labs, MANY)


def test_policy_accepts_some_plans_and_refuses_others(soft_labs):
    """The property above would also hold if everything were refused."""
    lab = soft_labs(2, 2, 1, 2)
    specs = [FaultSpec(kind="link.down", target=f"host{n}:rxe0", at_s=3.0 * n, for_s=1.0) for n in (1, 2)]

    def under(**policy):
        return accepted(specs, replace(lab, safety=SafetyVars(may_disrupt=["*"], **policy)))

    assert under() is not None
    assert under(min_spacing_s=2.0) is not None
    assert under(min_spacing_s=2.1) is None


def rack(**policy):
    return replace(RACK, safety=SafetyVars(may_disrupt=["*"], most_links=9, **policy))


def downs(*times):
    specs = [FaultSpec(kind="link.down", target=f"host1:mlx5_{n}", at_s=at, for_s=5.0) for n, at in enumerate(times)]
    return plan_all(specs, RACK.topology, lab_kind="rack")


def test_check_spacing_names_both_faults():
    safety.check_spacing(downs(0, 15), rack(min_spacing_s=10))
    with pytest.raises(Forbidden, match=r"mlx5_1: it would begin 9\.5 s after the end of link\.down on host1:mlx5_0"):
        safety.check_spacing(downs(0, 14.5), rack(min_spacing_s=10))
    with pytest.raises(Forbidden, match="before the end of"):
        safety.check_spacing(downs(0, 2), rack(min_spacing_s=10))
    safety.check_spacing(downs(0, 2), rack())


def test_check_spacing_includes_an_earlier_long_fault():
    long = plan_all(
        [
            FaultSpec(kind="link.down", target="host1:mlx5_0", at_s=0.0, for_s=50.0),
            FaultSpec(kind="link.down", target="host1:mlx5_1", at_s=10.0, for_s=5.0),
        ],
        RACK.topology,
        lab_kind="rack",
    )
    with pytest.raises(Forbidden, match="min_spacing_s"):
        safety.check_spacing(long, rack(min_spacing_s=1))


def test_injector_refuses_a_fault_too_soon_after_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr("faultbed.inject.leases.lease.Lease.begin", lambda _: None)
    monkeypatch.setattr("faultbed.inject.prepared_fault.PreparedFault.prepare_target", lambda _: {})
    inventory = rack(min_spacing_s=10)
    lab = SimpleNamespace(
        inventory_model=inventory, name="rack", state_dir=tmp_path / "state", topology=RACK.topology, reserved=("*",)
    )
    first, second = downs(0, 100)[0], planned_at(downs(0, 0)[1], 0.0)
    with Journal(tmp_path / "journal") as journal:
        injector = Injector(lab, journal)
        prepared = injector.prepare(first)
        with pytest.raises(Forbidden, match="before the end of"):
            injector.prepare(second)
        monkeypatch.setattr(type(prepared), "was_armed", True)
        injector.remove(prepared)
        with pytest.raises(Forbidden, match=r"after the end of link\.down on host1:mlx5_0"):
            injector.prepare(second)
        now = injector._ended[1]
        monkeypatch.setattr("faultbed.inject.injector.time.monotonic", lambda: now + 10.5)
        injector.prepare(second)


@pytest.mark.parametrize(
    ("lines", "now", "refused"),
    [
        ([("arming", "10:00:00"), ("cleared", "10:00:05")], "10:00:09", r"4 s after the end of link\.down on x"),
        ([("arming", "10:00:00"), ("cleared", "10:00:05")], "10:00:16", None),
        ([("arming", "10:00:00")], "10:00:09", "before the end of link.down on x"),
        ([("arming", "10:00:00")], "10:01:25", None),
        ([("arming", "10:00:00"), ("cleared", "10:30:00")], "10:00:09", "0 s after the end of"),
        ([("cleared", "10:00:05")], "10:00:09", None),
    ],
    ids=["too soon", "late enough", "still on", "killed long ago", "clock set back", "never armed"],
)
def test_injector_keeps_the_spacing_to_faults_of_other_commands(tmp_path, monkeypatch, lines, now, refused):
    """Consecutive `faultbed inject` commands have separate injectors, but must still keep the spacing."""
    monkeypatch.setattr("faultbed.inject.leases.lease.Lease.begin", lambda _: None)
    monkeypatch.setattr("faultbed.inject.prepared_fault.PreparedFault.prepare_target", lambda _: {})
    state = tmp_path / "state"
    state.mkdir()
    output = [
        {"at": f"2026-11-25T{at}+00:00", "event": event, "id": "a", "kind": "link.down", "target": "x", "for_s": 60.0}
        for event, at in lines
    ]
    audit_log.path_of(state).write_text("".join(f"{json.dumps(line)}\n" for line in output))
    clock = SimpleNamespace(
        now=lambda _: datetime.fromisoformat(f"2026-11-25T{now}+00:00"), fromisoformat=datetime.fromisoformat
    )
    monkeypatch.setattr(audit_log, "datetime", clock)
    inventory = rack(min_spacing_s=10)
    lab = SimpleNamespace(
        inventory_model=inventory, name="rack", state_dir=state, topology=RACK.topology, reserved=("*",)
    )  # fmt: skip
    with Journal(tmp_path / "journal") as journal:
        injector = Injector(lab, journal)
        if refused is None:
            injector.prepare(planned_at(downs(0)[0], 0.0))
        else:
            with pytest.raises(Forbidden, match=refused):
                injector.prepare(planned_at(downs(0)[0], 0.0))
