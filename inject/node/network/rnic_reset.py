"""An RNIC that is reset (its interface goes down and up) or removed (its RDMA device is deleted and recreated).

When an interface goes down, the kernel keeps its addresses and drops its IPv4 routes (net/ipv4/fib_frontend.c,
fib_disable_ip). These are stored before the change.
"""

from __future__ import annotations

import json
import os
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import run
from faultbed.inject.node.network.interface import LinkActuator

__all__ = ["RnicRemoveActuator", "RnicResetActuator", "routes_of"]

_INFINIBAND = "/sys/class/infiniband"


def routes_of(device: str) -> list[str]:
    """Return the IPv4 routes of an interface that the kernel does not restore by itself, as `ip route` takes them."""
    routes = []
    for route in json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all", "dev", device]) or "[]"):
        # The listing for one `dev` omits it; the kernel's own routes come back with the address.
        if route.get("protocol") == "kernel" or route.get("type", "unicast") != "unicast":
            continue
        words = [route["dst"], f"dev {device}", f"table {route.get('table', 'main')}"]
        words += [f"via {route['gateway']}"] if "gateway" in route else [f"scope {route.get('scope', 'link')}"]
        words += [
            f"{name} {route[key]}"
            for name, key in (("proto", "protocol"), ("metric", "metric"), ("src", "prefsrc"))
            if key in route
        ]
        words += [f"{name} {value}" for metrics in route.get("metrics", ()) for name, value in metrics.items()]
        words += ["onlink"] if "onlink" in route.get("flags", ()) else []
        routes.append(" ".join(words))
    return routes


class RnicResetActuator(LinkActuator):
    """Takes an interface of this host down, and brings it up with its previous routes."""

    def __init__(self, *, device: str) -> None:
        super().__init__(netns=None, device=device)
        self._routes: list[str] = []

    def prepare(self) -> dict[str, Any]:
        """Refuse what `LinkActuator` refuses, and store the routes that the kernel does not restore by itself."""
        state = super().prepare()
        self._routes = routes_of(self._device)
        return state

    def revert_script(self) -> str:
        """Return a script that brings the interface up and restores its routes."""
        routes = "".join(f" && ip route replace {route}" for route in self._routes)
        return f"{super().revert_script()}{routes}"

    def off(self) -> None:
        """Bring the interface up, and restore its routes in one process."""
        super().off()
        if self._routes:
            run(["ip", "-batch", "-"], stdin="".join(f"route replace {route}\n" for route in self._routes))


class RnicRemoveActuator(Actuator):
    """Deletes the soft RDMA device `rnic` of `netdev`, and recreates it."""

    loss_check_s = 0.2

    def __init__(self, *, rnic: str, netdev: str) -> None:
        self._rnic, self._netdev = rnic, netdev

    def prepare(self) -> dict[str, Any]:
        """Refuse a device that does not exist, or that a process has open.

        rxe has no `disassociate_ucontext`, so that the kernel would wait for the last user, without a deadline
        (drivers/infiniband/core/uverbs_main.c, ib_uverbs_remove_one).
        """
        state = self.read()
        if state["applied"]:
            raise Refused(f"there is no {self._rnic} on {self._netdev}; run `faultbed reset`")
        if users := self._users():
            raise Refused(
                f"{self._rnic} is in use by process {users[0]}, and the kernel removes no soft RNIC in use; end the "
                "job first, or use rnic.reset or link.down"
            )
        return state

    def revert_script(self) -> str:
        """Return a script that creates the device, unless it exists."""
        create = f"rdma link add {self._rnic} type rxe netdev {self._netdev}"
        return f"[ -e {_INFINIBAND}/{self._rnic} ] || {create}"

    def on(self) -> None:
        run(["rdma", "link", "delete", self._rnic])

    def off(self) -> None:
        if self.read()["applied"]:
            run(["rdma", "link", "add", self._rnic, "type", "rxe", "netdev", self._netdev])

    def read(self) -> dict[str, Any]:
        """Report the device's interface, if it exists."""
        try:
            with open(f"{_INFINIBAND}/{self._rnic}/parent", encoding="ascii") as parent:  # noqa: PTH123 - start-up time
                below = parent.read().strip()
        except FileNotFoundError:
            below = None
        return {"applied": below != self._netdev, "rnic": self._rnic, "netdev": self._netdev, "on": below}

    def _users(self) -> list[int]:
        """Return the processes that have the device's user verbs open."""
        device = next(
            (
                f"/dev/infiniband/{name}"
                for name in os.listdir("/sys/class/infiniband_verbs")  # noqa: PTH208 - start-up time
                if name.startswith("uverbs") and _line(f"/sys/class/infiniband_verbs/{name}/ibdev") == self._rnic
            ),
            None,
        )
        users = []
        for entry in os.listdir("/proc"):  # noqa: PTH208
            if entry.isdigit():
                try:
                    files = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]  # noqa: PTH115, PTH208
                except OSError:
                    continue
                users += [int(entry)] if device in files else []
        return users


def _line(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return file.read().strip()
