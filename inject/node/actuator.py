"""The base class of actuators, which change something on a node, and the registry of all of them."""

from __future__ import annotations

import importlib
from typing import Any

from faultbed.testbed.node.netns import enter

__all__ = ["ACTUATORS", "Actuator", "Refused", "enter_netns", "make"]


class Refused(Exception):
    """The target must not be changed: it has foreign state, lacks a capability, or is a protected interface."""


class Actuator:
    """One mechanism on a node. Methods may raise OSError or Refused; `read` reports every half-done change.

    Order of calls: `prepare`, `bind`, `set_up`, then `on` and `off` at each edge. `close` is called only where the
    process lives on (`faultbed.inject.node.probe`, tests): a holder's sockets close with its process. `poll_s` is how
    often `hits` is read while the fault is on; None: the edges are the hits. `patience_s` is how much longer than
    usual a change may take.
    """

    poll_s: float | None = None
    patience_s: float = 0.0
    uses_set_up = False
    """Whether `set_up` changes something, so that `off` must follow even without `on`."""
    loss_check_s: float | None = None
    """Interval of `is_lost` calls while the fault is on; None: only at its end. Set it only if a call is cheap."""
    loss_unknown_why: str | None = None
    """Reason for the receipt why `is_lost` cannot know whether something else has ended the fault; None: it can."""
    was_lost = False
    """Set by `off` if it reads the state together with its change, because a separate read would take too long."""

    @property
    def files(self) -> list[int]:
        """File descriptors. While the fault is on, `tick` is also called as soon as one of them is readable."""
        return []

    def prepare(self) -> dict[str, Any]:
        """Check capability and ownership, and store the present state. Changes nothing."""
        raise NotImplementedError

    def revert_script(self) -> str:
        """Return a POSIX shell script that restores and verifies the stored state; it may run any number of times."""
        raise NotImplementedError

    def bind(self, *, qp: int | None, psn: int | None, ahead: int | None) -> None:
        """Fill in values that are known only when the fault is armed: a QP, and a PSN or how far it is ahead."""

    def set_up(self) -> None:
        """Do the slow part of arming, which has no effect yet, so that `on` is quick. `off` undoes both."""

    def on(self) -> None:
        """Turn the fault on."""
        raise NotImplementedError

    def update(self, **_args: Any) -> None:
        """Change what is on. Only a routing scheme whose controller places flows can be changed.

        Raises:
            Refused: this change stays as it was made.
        """
        raise Refused("it cannot be changed while it is on")

    def off(self) -> None:
        """Turn the fault off."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> None:
        """Follow the course of a fault that varies over time; called at every poll while the fault is on."""

    def read(self) -> dict[str, Any]:
        """Return the present state; `applied` says whether the fault is on."""
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Return whether something else has ended the fault; called before `off` while the fault should be on.

        An actuator that cannot know sets `loss_unknown_why`.
        """
        return not self.read()["applied"]

    def hits(self) -> int | None:
        """Return the number of hits so far, over all `on` phases; None if edges are the hits."""
        return None

    def passed(self) -> int | None:
        """Return the number of packets from which the fault has chosen its share so far; None if it takes no share."""
        return None

    def close(self) -> None:
        """Release sockets, after `off`."""


ACTUATORS = {
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
    "gpu_heat": ("gpu.synthetic_health", "GpuHeatActuator"),
    "gpu_memory": ("gpu.synthetic_health", "GpuMemoryActuator"),
    "gpu_neighbour": ("gpu.gpuneighbour", "GpuNeighbourActuator"),
    "gpu_rows": ("gpu.synthetic_health", "GpuRowsActuator"),
    "hog": ("machine.hog", "HogActuator"),
    "hop": ("network.packet_rules", "HopActuator"),
    "link": ("network.interface", "LinkActuator"),
    "memory": ("machine.memory", "MemoryActuator"),
    "mtu": ("network.interface", "MtuActuator"),
    "pause": ("network.pause_frames", "PauseActuator"),
    "process": ("machine.process", "ProcessActuator"),
    "qmp": ("qmp", "QmpActuator"),
    "limit": ("machine.limit", "LimitActuator"),
    "reboot": ("machine.reboot", "RebootActuator"),
    "rnic_address": ("network.rnic_address", "RnicAddressActuator"),
    "rnic_remove": ("network.rnic_reset", "RnicRemoveActuator"),
    "rnic_reset": ("network.rnic_reset", "RnicResetActuator"),
    "scheme": ("network.scheme", "SchemeActuator"),
    "service": ("machine.service", "ServiceActuator"),
    "vm_reset": ("machine.vmreset", "VmResetActuator"),
    "tamper": ("network.tamper", "TamperActuator"),
    "steer": ("network.steer", "SteerActuator"),
    "sysctl": ("network.sysctl", "SysctlActuator"),
    "xid": ("gpu.xid_event", "XidActuator"),
}


def make(name: str, args: dict[str, Any]) -> Actuator:
    """Return the actuator of that name. Only its module is imported, because a holder must start quickly.

    Raises:
        Refused: there is no such actuator.
        TypeError: `args` do not fit it.
    """
    if name not in ACTUATORS:
        raise Refused(
            f"unknown actuator {name!r}: node code and controller have different versions; run `faultbed up` again"
        )
    module, kind = ACTUATORS[name]
    actuator: Actuator = getattr(importlib.import_module(f"faultbed.inject.node.{module}"), kind)(**args)
    return actuator


def enter_netns(netns: str | None) -> None:
    """Move this process into a network namespace, if `netns` is not None. Sockets opened later belong to it.

    Raises:
        Refused: there is no such namespace, or it cannot be entered.
    """
    if netns is None:
        return
    try:
        enter(netns)
    except FileNotFoundError:
        raise Refused(f"there is no network namespace {netns} here; provision the lab") from None
    except OSError as error:
        raise Refused(str(error)) from None
