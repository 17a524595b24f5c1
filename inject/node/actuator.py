"""What the holder asks of the thing that really changes something: look, act, undo, read back, count."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from testbed.node.netns import enter

__all__ = ["Actuator", "Refused", "enter_netns", "make"]


class Refused(Exception):
    """The target is not as it must be before a change: foreign state, no capability, or a protected interface."""


class Actuator(Protocol):
    """One way to act. Methods may raise OSError or Refused; none may leave a half-done change that `read` misses.

    Five more that some have: `aim(qp, psn, ahead)` before arming, for what is only known then; `lay()` when armed, for
    what takes long and hurts nobody, so that `on` comes at its moment (`off` undoes both); `tick(now_ns)` while on;
    `files`, descriptors of which `tick` is called as soon as one is readable;
    `wait_with(alive)` first of all, where `prepare`, `lay` or `off` may take longer than a holder may be silent.
    """

    @property
    def poll_s(self) -> float | None:
        """How often `hits` is worth asking while the fault is on; None when edges are the count."""

    def prepare(self) -> dict[str, Any]:
        """Check capability and ownership, remember what was there. Changes nothing."""

    def revert_script(self) -> str:
        """POSIX shell that brings back what `prepare` saw, any number of times, and fails unless it reads back so."""

    def on(self) -> None:
        """Make the fault be."""

    def off(self) -> None:
        """Make it not be."""

    def read(self) -> dict[str, Any]:
        """What is really there; `applied` says whether the fault is on."""

    def hits(self) -> int | None:
        """How often it has hit so far, over all `on` phases; None when edges are the count."""

    def close(self) -> None:
        """Let go of sockets, after `off`."""


_ACTUATORS = {
    "background": ("network.background", "BackgroundActuator"),
    "bgp_reset": ("network.frr", "BgpResetActuator"),
    "clock_step": ("machine.clockstep", "ClockStepActuator"),
    "burst": ("machine.burst", "BurstActuator"),
    "cgroup": ("machine.cgroup", "CgroupActuator"),
    "commands": ("commands", "CommandsActuator"),
    "detour": ("network.detour", "DetourActuator"),
    "disk": ("machine.disk", "DiskActuator"),
    "late_receives": ("network.latereceives", "LateReceivesActuator"),
    "forge": ("network.forge", "ForgeActuator"),
    "frr": ("network.frr", "FrrActuator"),
    "gpu_neighbour": ("machine.gpuneighbour", "GpuNeighbourActuator"),
    "hog": ("machine.hog", "HogActuator"),
    "hop": ("network.packet_rules", "HopActuator"),
    "link": ("network.interface", "LinkActuator"),
    "memory": ("machine.memory", "MemoryActuator"),
    "mtu": ("network.interface", "MtuActuator"),
    "process": ("machine.process", "ProcessActuator"),
    "qmp": ("qmp", "QmpActuator"),
    "limit": ("machine.limit", "LimitActuator"),
    "reboot": ("machine.reboot", "RebootActuator"),
    "rnic_remove": ("network.rnic_reset", "RnicRemoveActuator"),
    "rnic_reset": ("network.rnic_reset", "RnicResetActuator"),
    "scheme": ("network.scheme", "SchemeActuator"),
    "service": ("machine.service", "ServiceActuator"),
    "vm_reset": ("machine.vmreset", "VmResetActuator"),
    "tamper": ("network.tamper", "TamperActuator"),
    "steer": ("network.steer", "SteerActuator"),
    "sysctl": ("network.sysctl", "SysctlActuator"),
    "xid": ("machine.xid_event", "XidActuator"),
}


def make(name: str, args: dict[str, Any]) -> Actuator:
    """The actuator of that name. Imports only what it needs: start-up is what a holder's speed is made of."""
    if name not in _ACTUATORS:
        raise Refused(f"this holder knows no actuator {name!r}: node code and controller differ; provision again")
    module, kind = _ACTUATORS[name]
    actuator: Actuator = getattr(importlib.import_module(f"inject.node.{module}"), kind)(**args)
    return actuator


def enter_netns(netns: str | None) -> None:
    """Move this process into a named network namespace, if one is named; sockets opened from now on belong to it."""
    if netns is None:
        return
    try:
        enter(netns)
    except FileNotFoundError:
        raise Refused(f"there is no network namespace {netns} here: is the lab provisioned?") from None
    except OSError as error:
        raise Refused(str(error)) from None
