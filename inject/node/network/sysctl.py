"""A kernel setting of one network namespace: a file below /proc/sys/net, where each process sees its own namespace."""

from __future__ import annotations

from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.inside import unless_gone

__all__ = ["SysctlActuator"]


class SysctlActuator(Actuator):
    """Writes `value` to /proc/sys/net/`path` in `netns`; `normal` is provisioning's value."""

    loss_check_s = 0.2

    def __init__(self, *, netns: str | None, path: str, value: str, normal: str) -> None:
        self._netns, self._file, self._value, self._normal = netns, f"/proc/sys/net/{path}", value, normal

    def prepare(self) -> dict[str, Any]:
        """Refuse a setting that does not have provisioning's value."""
        enter_netns(self._netns)
        state = self.read()
        if state["value"] != self._normal:
            raise Refused(
                f"{self._file} is {state['value']}, not {self._normal}, and no fault set it; run `faultbed reset`"
            )
        return state

    def revert_script(self) -> str:
        inner = f"echo {self._normal} > {self._file} && grep -qx {self._normal} {self._file}"
        # nsenter, because `ip netns exec` mounts a sysfs of its own first.
        enter = f"nsenter --net=/run/netns/{self._netns} " if self._netns else ""
        return unless_gone(self._netns, f"{enter}sh -c '{inner}'")

    def on(self) -> None:
        self._write(self._value)

    def off(self) -> None:
        self._write(self._normal)

    def read(self) -> dict[str, Any]:
        with open(self._file, encoding="ascii") as file:  # noqa: PTH123 - start-up time
            value = file.read().strip()
        return {"applied": value == self._value, "netns": self._netns, "value": value}

    def _write(self, value: str) -> None:
        with open(self._file, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
