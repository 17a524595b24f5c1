"""Report what machines of a rack lack for faults: tools, firmware settings, containers, releases. Pure.

A lab that only measures needs none of these. A missing one is reported as *not looked at*, with the kinds of faults
that need it; `faultbed faults --here` has the details of each target. Only a Python before 3.9 is reported as wrong,
because no part of faultbed runs with it. Not yet run on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Host, Switch
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.rack_formats import keeps_up, key_values

__all__ = ["OLDEST_PYTHON", "problems", "undetermined"]

OLDEST_PYTHON = (3, 9)
OLDEST_SONIC = 202205
"""The first release with ACL status in STATE_DB, which shows whether the ASIC has a rule (sonic-swss, aclorch.cpp)."""
_HASH_SONIC = 202311
_TOOLS = {
    "mlxlink": "needed for link.down, link.flap and rnic.reset of RNICs, and for link quality; install mstflint",
    "mlxconfig": "needed for link.down, link.flap and rnic.reset of RNICs; install mstflint",
    "nvidia-smi": "needed for faults of GPUs; install NVIDIA's driver",
    "dcgmi": "needed for gpu.xid, gpu.ecc, gpu.row-remap and gpu.overheat; install DCGM",
}
_GPU_TOOLS = ("nvidia-smi", "dcgmi")
_RELEASE = re.compile(r"\b(20\d{4})\b")


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each machine whose Python is too old."""
    for name, values in _reported_abilities(inventory, state):
        version = _version(values.get("python", ""))
        if version is not None and version < OLDEST_PYTHON:
            yield name, values["python"], "3.9 or later (SONiC 202111)"


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for each missing tool or setting; `why` says what cannot be checked or done without it."""
    for name, values in _reported_abilities(inventory, state):
        if _version(values.get("python", "")) is None:
            yield name, "it does not report its version of Python"
    for host in inventory.topology.hosts:
        yield from _of_host(host, state[host.name])
    for switch in inventory.topology.switches:
        if switch.nos == "sonic":
            yield from _of_sonic(switch, key_values(state[switch.name].raw.get("able", "")))


def _reported_abilities(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, Mapping[str, str]]]:
    topology = inventory.topology
    for name in (*topology.host_by_name, *topology.switch_by_name):
        yield name, key_values(state[name].raw.get("able", ""))


def _of_host(host: Host, facts: Facts) -> Iterator[tuple[str, str]]:
    values = key_values(facts.raw.get("able", ""))
    for tool, use in _TOOLS.items():
        if (tool in _GPU_TOOLS and not host.gpus) or f"tool {tool}" in values or not values:
            continue
        yield host.name, f"no {tool}: {use}"
    lockdown = values.get("lockdown", "")
    if lockdown and "[none]" not in lockdown:
        yield host.name, f"the kernel is locked down ({lockdown}), so mlxlink and setpci need MFT's signed driver"
    for rnic in host.rnics:
        where, raw = f"{host.name}:{rnic.name}", facts.raw.get(f"keep-up {rnic.name}", "")
        if keeps_up(raw) is True:
            yield where, "its firmware keeps the port up (KEEP_ETH_LINK_UP); target link.down at the switch port"
        if "DCBX mode: Firmware controlled" in facts.raw.get(f"qos {rnic.name}", ""):
            yield where, "its firmware controls DCBX and may override PFC and trust; run `mlnx_qos -i DEV -d os`"


def _of_sonic(switch: Switch, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    release = _RELEASE.search(values.get("release", ""))
    if release is None:
        yield (
            switch.name,
            f"it does not report its release ({values.get('release', 'nothing')}); 202205 or later is needed",
        )
    elif int(release[1]) < OLDEST_SONIC:
        yield switch.name, f"SONiC {release[1]} reports no ACL status; link.oneway and packet.drop need 202205"
    elif int(release[1]) < _HASH_SONIC:
        yield switch.name, f"SONiC {release[1]}: switch.hash-policy needs 202311"
    if values.get("asic", "") not in ("broadcom", "mellanox"):
        yield switch.name, f"ASIC {values.get('asic') or 'unknown'} may not shape a port; link.rate is refused there"
    for stage in ("INGRESS", "EGRESS"):
        if "PACKET_ACTION" not in values.get(f"acl {stage}", ""):
            yield (
                switch.name,
                f"no ACL drops at {stage.lower()}; link.oneway and packet.drop are refused in that direction",
            )
    if values.get("bgp restart", "") not in ("enabled", "disabled"):
        yield switch.name, "auto_restart of its bgp container cannot be set; switch.bgp-kill is refused"


def _version(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
