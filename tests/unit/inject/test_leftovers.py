"""Possible leftovers of every kind of fault are facts of the fingerprint; a new kind must declare its facts here."""

from __future__ import annotations

import ast
import inspect

import pytest
from planned_faults import SAMPLES, SOFT
from rack_actuator_cases import CASES, HOPS, LINUX, RACK

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.rack import MECHANISMS
from faultbed.inject.node.actuator import ACTUATORS
from faultbed.testbed.node import settings, state
from faultbed.testbed.node.gpu import health
from faultbed.testbed.observe import fingerprint

# A child of the holder does the work, so its leftover is a process of that program.
CHILD = ("program",)
LEFTOVERS = {
    "background": CHILD,
    "bgp_reset": ("daemon", "route"),
    "burst": CHILD,
    "cgroup": ("cpu.max",),
    "clock_step": ("clock",),
    "detour": ("link", "qdisc", "filter", "nft table"),
    "disk": ("disk",),
    "forge": CHILD,
    "frr": ("frr",),
    "gpu_heat": ("gpu-health", "cpu.max", "unit"),
    "gpu_memory": ("gpu-health",),
    "gpu_neighbour": ("process",),
    "gpu_rows": ("gpu-health",),
    "hog": ("process", "processes"),
    "hop": ("nft table",),
    "late_receives": ("receives",),
    "limit": ("cpu.max", "processes"),
    "link": ("link",),
    "memory": CHILD,
    "mtu": ("link",),
    "pause": CHILD,
    "process": ("daemon", "stopped", "program"),
    "qmp": ("link", "revert"),
    "reboot": ("link", "daemon", "netns"),
    "rnic_address": ("address", "gid", "route"),
    "rnic_remove": ("rdma", "gid"),
    "rnic_reset": ("link", "route", "rdma"),
    "scheme": ("rule", "route", "nexthop", "nft table"),
    "service": ("unit", "cpu.max"),
    "steer": ("rule", "route"),
    "sysctl": ("sysctl",),
    "tamper": ("link", "nft table", "program"),
    "vm_reset": ("rdma", "revert"),
}
# The fault only writes a log line, so nothing can be left.
# The driver's own values replace injected ones in DCGM's cache.
NOTHING = {"xid", "gpu.xid"}
CACHED = {"gpu.ecc", "gpu.row-remap", "gpu.overheat"}
# Only mlxlink reads the sampling point, a second for each port. The stored revert reads it back, and the receipt
# compares the link's error rates with those before.
FIRMWARE = {"link.fec"}
# On a rack the target's own commands act, so facts are listed by kind.
BY_COMMAND = {
    "link.down": ("link",),
    "link.flap": ("link",),
    "link.oneway": ("config_db",),
    "link.rate": ("config_db",),
    "link.mtu": ("link", "config_db"),
    "packet.drop": ("config_db",),
    "switch.bgp-kill": ("frr",),
    "switch.freeze": ("frr",),
    "switch.withdraw": ("frr",),
    "switch.hash-policy": ("config_db",),
    "gpu.throttle": ("gpu",),
    "gpu.power-cap": ("gpu",),
    "gpu.lost": ("gpu",),
    "rnic.reset": ("link", "rdma"),
    "rnic.remove": ("link", "rdma", "gid"),
}


def facts_made():
    """Return the first words of the subjects of all facts that the code can produce."""
    actual = set()
    for module in (state, settings, fingerprint, health):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                actual.add(str(node.values[0].value).strip())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                actual.add(node.value)
    return actual


def made_from(fault):
    """Return the facts in which a planned fault's leftovers would be visible; None if undeclared."""
    actuator = fault.request["actuator"]
    if actuator in NOTHING or fault.kind in NOTHING or (actuator == "commands" and fault.kind in CACHED | FIRMWARE):
        return ("nothing to leave",)
    return BY_COMMAND.get(fault.kind) if actuator == "commands" else LEFTOVERS.get(actuator)


def planned():
    """Return each kind as planned on a soft lab, on a rack, and at a rack's Linux switches."""
    for kind, (target, params) in SAMPLES.items():
        yield plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), SOFT, lab_kind="soft")
    for topology, cases in ((RACK, CASES), (LINUX, [case[:3] for case in HOPS])):
        for kind, target, params in cases:
            if kind in CATALOGUE:
                yield plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), topology, lab_kind="rack")


def test_leftovers_are_declared_by_every_actuator():
    assert LEFTOVERS.keys() | {"xid", "commands"} == ACTUATORS.keys()


def test_leftovers_of_every_kind_are_in_the_fingerprint():
    faults = list(planned())
    assert {fault.kind for fault in faults} == CATALOGUE.keys(), "a kind has no sample"
    assert {fault.kind for fault in faults if fault.lab_kind == "rack"} == MECHANISMS.keys() & CATALOGUE.keys()
    assert [f"{fault.kind} on a {fault.lab_kind}" for fault in faults if not made_from(fault)] == []


@pytest.mark.parametrize(
    "subject", sorted({fact for facts in (*LEFTOVERS.values(), *BY_COMMAND.values()) for fact in facts})
)
def test_leftover_facts_are_all_produced(subject):
    assert subject in facts_made()
