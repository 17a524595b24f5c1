"""An RNIC that is reset (its interface goes down and comes back) or removed (its RDMA device is deleted and made anew).

What the kernel forgets when an interface goes down, its routes of IPv4, is written down before
(net/ipv4/fib_frontend.c, fib_disable_ip); addresses stay.
"""

from __future__ import annotations

import json
import os
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run
from inject.node.network.interface import LinkActuator

__all__ = ["RnicRemoveActuator", "RnicResetActuator"]

_INFINIBAND = "/sys/class/infiniband"


class RnicResetActuator(LinkActuator):
    """Takes an interface of this host down; brings it up with the routes that it had."""

    def __init__(self, *, device: str) -> None:
        super().__init__(netns=None, device=device)
        self._routes: list[str] = []

    def prepare(self) -> dict[str, Any]:
        """As for any link; and write down the routes that the kernel does not make by itself."""
        seen = super().prepare()
        listed = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all", "dev", self._device]) or "[]")
        for route in listed:
            # With `dev` asked for it is not said; what the kernel makes itself comes back with the address.
            if route.get("protocol") == "kernel" or route.get("type", "unicast") != "unicast":
                continue
            words = [route["dst"], f"dev {self._device}", f"table {route.get('table', 'main')}"]
            words += [f"via {route['gateway']}"] if "gateway" in route else [f"scope {route.get('scope', 'link')}"]
            words += [
                f"{name} {route[key]}" for name, key in (("proto", "protocol"), ("metric", "metric")) if key in route
            ]
            self._routes.append(" ".join(words))
        return seen

    def revert_script(self) -> str:
        """Up, and the routes again."""
        routes = "".join(f" && ip route replace {route}" for route in self._routes)
        return f"{super().revert_script()}{routes}"

    def off(self) -> None:
        """Up, and the routes again, in one process."""
        super().off()
        if self._routes:
            run(["ip", "-batch", "-"], stdin="".join(f"route replace {route}\n" for route in self._routes))


class RnicRemoveActuator:
    """Deletes the soft RDMA device `rnic` of `netdev` and makes it again."""

    poll_s = None

    def __init__(self, *, rnic: str, netdev: str) -> None:
        self._rnic, self._netdev = rnic, netdev

    def prepare(self) -> dict[str, Any]:
        """Refuse a device that is not there, or that a process has open: rxe cannot take it away from one.

        Without `disassociate_ucontext` the kernel waits for the last user, for ever if need be
        (drivers/infiniband/core/uverbs_main.c, ib_uverbs_remove_one).
        """
        seen = self.read()
        if seen["applied"]:
            raise Refused(f"there is no {self._rnic} on {self._netdev}: run `faultbed reset`")
        if users := self._users():
            raise Refused(
                f"{self._rnic} is in use by process {users[0]}: the kernel does not take a soft RNIC away from a "
                "process; end the job first, or take rnic.reset or link.down"
            )
        return seen

    def revert_script(self) -> str:
        """Make it, unless it is there."""
        made = f"rdma link add {self._rnic} type rxe netdev {self._netdev}"
        return f"[ -e {_INFINIBAND}/{self._rnic} ] || {made}"

    def on(self) -> None:
        """Delete it."""
        run(["rdma", "link", "delete", self._rnic])

    def off(self) -> None:
        """Make it."""
        if self.read()["applied"]:
            run(["rdma", "link", "add", self._rnic, "type", "rxe", "netdev", self._netdev])

    def read(self) -> dict[str, Any]:
        """What it is on, if it is there."""
        try:
            with open(f"{_INFINIBAND}/{self._rnic}/parent", encoding="ascii") as parent:  # noqa: PTH123 - start-up time
                below = parent.read().strip()
        except FileNotFoundError:
            below = None
        return {"applied": below != self._netdev, "rnic": self._rnic, "netdev": self._netdev, "on": below}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _users(self) -> list[int]:
        """Processes that have its user verbs open, by their descriptors."""
        device = next(
            (
                f"/dev/infiniband/{name}"
                for name in os.listdir("/sys/class/infiniband_verbs")  # noqa: PTH208 - start-up time
                if name.startswith("uverbs") and _line(f"/sys/class/infiniband_verbs/{name}/ibdev") == self._rnic
            ),
            None,
        )
        found = []
        for entry in os.listdir("/proc"):  # noqa: PTH208
            if entry.isdigit():
                try:
                    files = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]  # noqa: PTH115, PTH208
                except OSError:
                    continue
                found += [int(entry)] if device in files else []
        return found


def _line(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return file.read().strip()
