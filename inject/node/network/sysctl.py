"""A kernel setting of one network namespace: a file below /proc/sys/net, which shows the opener's namespace."""

from __future__ import annotations

from typing import Any

from inject.node.actuator import Refused, enter_netns
from inject.node.inside import unless_gone

__all__ = ["SysctlActuator"]


class SysctlActuator:
    """Writes `value` to /proc/sys/net/`path` in `netns`; `normal` is what provisioning has set."""

    poll_s = None

    def __init__(self, *, netns: str | None, path: str, value: str, normal: str) -> None:
        self._netns, self._file, self._value, self._normal = netns, f"/proc/sys/net/{path}", value, normal

    def prepare(self) -> dict[str, Any]:
        """Refuse a value that provisioning did not set."""
        enter_netns(self._netns)
        seen = self.read()
        if seen["value"] != self._normal:
            raise Refused(f"{self._file} is {seen['value']}, not {self._normal}, and not by us: run `faultbed reset`")
        return seen

    def revert_script(self) -> str:
        """Write the normal value back."""
        inner = f"echo {self._normal} > {self._file} && grep -qx {self._normal} {self._file}"
        # nsenter, not `ip netns exec`: that mounts a sysfs of its own for one line.
        enter = f"nsenter --net=/run/netns/{self._netns} " if self._netns else ""
        return unless_gone(self._netns, f"{enter}sh -c '{inner}'")

    def on(self) -> None:
        """The other value."""
        self._write(self._value)

    def off(self) -> None:
        """The normal value."""
        self._write(self._normal)

    def read(self) -> dict[str, Any]:
        """What it is now."""
        with open(self._file, encoding="ascii") as file:  # noqa: PTH123 - start-up time
            value = file.read().strip()
        return {"applied": value == self._value, "netns": self._netns, "value": value}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _write(self, value: str) -> None:
        with open(self._file, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
