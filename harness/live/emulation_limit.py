"""Capacity of a soft lab's emulation, which a run compares with the load that the lab's shaped links allow.

A soft lab enforces its links' rates with shapers. If the sum of these rates exceeds what the machine can forward, a
run measures the machine. Its capacity is measured once for each lab and machine: the shapers are deleted, every RNIC
sends for some seconds, and the lab returns to its snapshot. A recorded capacity is worth as much as the machine is now:
it is scaled by the speed of all CPUs, measured before each run, over their speed when it was recorded. A run whose
RNICs may send more than half of the capacity is INCONCLUSIVE (`faultbed.harness.analysis.links.emulation_headroom`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from faultbed.harness.analysis.links.emulation_headroom import exceeds_headroom
from faultbed.harness.live.measured_flows import run_flows
from faultbed.testbed.backends.soft.lab_state import read_state
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.cpu_speed import hash_rate
from faultbed.testbed.tenancy import durable
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.flows.matrix import pairs

__all__ = ["FILE", "Capacity", "NotMeasured", "capacity_of", "measure"]

FILE = "emulation.json"
_SECONDS = 8.0
_SHAPE: Mapping[str, Any] = MappingProxyType({
    "qps": 16, "depth": 1, "message_bytes": 16 << 10, "qp": QpParams(timeout=18),
})  # fmt: skip
"""Shape of each flow. So few packets are in flight that a queue without a shaper (1,000 packets) drops none."""
_NOT_KNOWN = "the emulation's capacity is unknown: {why}; repeat the run on a quiet machine"
_CPUINFO = Path("/proc/cpuinfo")
Progress = Callable[[str], None]


class NotMeasured(LabError):
    """The emulation's capacity could not be measured: nothing was carried, or a flow failed."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """`emulation.json` of a lab: its emulation's capacity.

    `carried_bps` is the payload rate of `flows` flows together, in bits/s, without shapers. `key` is a digest of the
    conditions: the inventory, the number and model of CPUs, the accelerator, and the lab's snapshot key (image, QEMU,
    playbooks). `hash_rate` is the speed of all CPUs just before, in bytes/s (`faultbed.testbed.observe.cpu_speed`).
    """

    key: str
    flows: int
    carried_bps: float
    hash_rate: float


def capacity_of(lab: Lab, offered_bps: float, to_snapshot: Callable[[], None], progress: Progress) -> Capacity:
    """Return the capacity of a lab's emulation: from its file, scaled to the machine's present speed, or measured now.

    It is measured again if the scaled capacity is too small for the load: the machine may have been busy with other
    work when it was recorded, or may be so now.

    Args:
        lab: a soft lab in its snapshot's state, reserved for this run.
        offered_bps: how much the workload may send.
        to_snapshot: restores the lab's snapshot.
        progress: called with each progress line.

    Raises:
        NotMeasured: a flow failed, or nothing was carried. The lab is in its snapshot's state again.
        LabError: the lab cannot be reached, or its snapshot cannot be restored.
    """
    path, key = lab_dir(lab.name) / FILE, _key(lab)
    known, speed = _read(path, key), hash_rate()
    if known is not None:
        scaled_bps = known.carried_bps * min(1.0, speed / known.hash_rate)
        if not exceeds_headroom(offered_bps, scaled_bps):
            return msgspec.structs.replace(known, carried_bps=scaled_bps)
    progress("measuring the emulation's capacity without shapers")
    try:
        measured = measure(lab, key, speed)
    finally:
        to_snapshot()
    progress(f"{measured.flows} flows got {measured.carried_bps / 1e6:.0f} Mb/s through without shapers")
    durable.replace(path, msgspec.json.encode(measured))
    return measured


def measure(lab: Lab, key: str, speed: float) -> Capacity:
    """Delete the shapers, and let every RNIC send. The caller must restore the lab's snapshot afterwards.

    `speed` is the present `hash_rate` of the machine.

    Raises:
        NotMeasured: a flow failed, or nothing was carried.
    """
    for switch, ports in lab.inventory_model.shapes.items():
        lines = "".join(f"qdisc del dev {port} root\n" for port in ports)
        lab.node(switch).run(["tc", "-batch", "-"], stdin=lines)
    ends = pairs("permutation", lab.topology.rnic_names)
    specs = [FlowSpec(src=src, dst=dst, **_SHAPE, duration_s=_SECONDS) for src, dst in ends]
    try:
        result, _ = run_flows(lab, specs)
    except LabError as error:
        raise NotMeasured(_NOT_KNOWN.format(why=error)) from error
    if not result.goodput_bps:
        raise NotMeasured(_NOT_KNOWN.format(why=f"nothing came through in {_SECONDS:g} s"))
    return Capacity(key=key, flows=len(specs), carried_bps=result.goodput_bps, hash_rate=speed)


def _key(lab: Lab) -> str:
    state = read_state(lab_dir(lab.name))
    words = os.cpu_count(), _cpu_model(), lab.accelerator, state.key if state else None
    return hashlib.sha256("/".join(map(str, (lab.inventory_model.digest, *words))).encode()).hexdigest()


def _cpu_model() -> str:
    """Return the model of this machine's CPUs; their architecture where the kernel gives no model name."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def _read(path: Path, key: str) -> Capacity | None:
    """Return the recorded capacity; None: there is no readable record, or other conditions hold now."""
    try:
        recorded = msgspec.json.decode(path.read_bytes(), type=Capacity)
    except (OSError, msgspec.MsgspecError):
        return None
    return recorded if recorded.key == key and recorded.hash_rate > 0 else None
