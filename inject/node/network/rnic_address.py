"""An RNIC's address that is removed and given again, while its link stays up.

The GIDs of an RNIC follow the addresses of its interface (drivers/infiniband/core/roce_gid_mgmt.c). A GID that a queue
pair still uses keeps its slot until the last user is gone, so that it comes back at another index (core/cache.c,
`put_gid_entry`). With the last address of an interface the kernel drops its IPv4 routes (net/ipv4/fib_frontend.c).
"""

# Start-up time decides a holder's speed: no pathlib.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import run
from faultbed.inject.node.management import management_interfaces
from faultbed.inject.node.network.rnic_reset import routes_of
from faultbed.testbed.node.kernel_files import gid_of
from faultbed.testbed.node.netlink import Netlink, attributes

__all__ = ["RnicAddressActuator"]

_INFINIBAND = "/sys/class/infiniband"
_RTM_GETADDR, _IFA_LOCAL = 22, 2  # linux/rtnetlink.h, linux/if_addr.h
_SETTLE_S = 3.0
"""The kernel changes the GID table in a work queue, after the address."""


class RnicAddressActuator(Actuator):
    """Removes the IPv4 address of `netdev`, the interface of the RDMA device `rnic`, and adds it again."""

    loss_check_s = 0.2
    patience_s = 2 * _SETTLE_S

    def __init__(self, *, rnic: str, netdev: str, address: str) -> None:
        self._rnic, self._netdev, self._address = rnic, netdev, address
        self._ip = address.partition("/")[0]
        self._gid = gid_of(self._ip)
        self._words = ""
        self._routes: list[str] = []
        self._entries: list[int] = []
        self._route: Netlink | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse the management interface, an address that is not there, and one that is not the only one."""
        if self._netdev in management_interfaces():
            raise Refused(f"{self._netdev} carries the management connection and is never a target; choose another")
        listed = json.loads(run(["ip", "-j", "-4", "address", "show", "dev", self._netdev]) or "[]")
        known = [info for link in listed for info in link.get("addr_info", ())]
        texts = [f"{info['local']}/{info['prefixlen']}" for info in known]
        if texts != [self._address]:
            raise Refused(
                f"{self._netdev} has the addresses {', '.join(texts) or 'none'}, and this fault needs {self._address} "
                "alone; correct the inventory, or choose another RNIC"
            )
        self._words = _words(known[0], self._netdev)
        self._routes = routes_of(self._netdev)
        self._route = Netlink(socket.NETLINK_ROUTE)
        self._entries = self._gid_entries()
        if not self._entries:
            raise Refused(f"{self._rnic} has no GID of {self._ip}; run `faultbed preflight`")
        return self.read()

    def revert_script(self) -> str:
        """Return a script that adds the address, unless it exists, and its routes."""
        there = f"ip -4 address show dev {self._netdev} to {self._ip}/32 | grep -q ."
        routes = "".join(f" && ip route replace {route}" for route in self._routes)
        return f"({there} || ip address add {self._words}){routes}"

    def on(self) -> None:
        run(["ip", "address", "delete", self._address, "dev", self._netdev])
        self._wait(lambda: not self._valid(self._entries))

    def off(self) -> None:
        """Add the address with its routes in one process, and wait until its GID is back, at whatever index."""
        lines = [] if self._has_address() else [f"address add {self._words}"]
        lines += [f"route replace {route}" for route in self._routes]
        if lines:
            run(["ip", "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))

        def is_back() -> bool:
            self._entries = self._valid(self._entries) or self._gid_entries()
            return bool(self._entries)

        if not self._wait(is_back):
            raise OSError(f"the GID of {self._ip} has not come back at {self._rnic} within {_SETTLE_S:g} s")

    def read(self) -> dict[str, Any]:
        """Report the address and the entries of its GID; `applied` while both are gone."""
        has_address, entries = self._has_address(), self._valid(self._entries)
        return {
            "applied": not has_address and not entries,
            "rnic": self._rnic,
            "netdev": self._netdev,
            "address": self._address if has_address else None,
            "gid_entries": entries,
        }

    def close(self) -> None:
        if self._route is not None:
            self._route.close()

    def _has_address(self) -> bool:
        if self._route is None:
            raise Refused("not prepared")
        index, wanted = socket.if_nametoindex(self._netdev), socket.inet_aton(self._ip)
        request = struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0)
        return any(
            struct.unpack_from("=4xI", body)[0] == index and attributes(body[8:]).get(_IFA_LOCAL) == wanted
            for _, body in self._route.dump(_RTM_GETADDR, request)
        )

    def _gid_entries(self) -> list[int]:
        """Return the indexes of the GID in the whole table, which may have a thousand entries."""
        return self._valid(sorted(map(int, os.listdir(f"{_INFINIBAND}/{self._rnic}/ports/1/gids"))))

    def _valid(self, entries: list[int]) -> list[int]:
        valid = []
        for index in entries:
            # An entry that is being removed reads as zeros (core/sysfs.c, show_port_gid).
            with (
                contextlib.suppress(OSError),
                open(f"{_INFINIBAND}/{self._rnic}/ports/1/gids/{index}", encoding="ascii") as file,
            ):
                if file.read().strip() == self._gid:
                    valid.append(index)
        return valid

    @staticmethod
    def _wait(holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _SETTLE_S
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _words(info: dict[str, Any], netdev: str) -> str:
    """Return the arguments of `ip address add` that make an address again, from its entry in `ip -j address`."""
    if "address" in info:  # the other end of a point-to-point address; `local` is ours
        raise Refused(f"{info['local']} is a point-to-point address; choose another RNIC")
    words = [f"{info['local']}/{info['prefixlen']}", f"dev {netdev}"]
    words += [f"broadcast {info['broadcast']}"] if "broadcast" in info else []
    words += [f"scope {info['scope']}"] if "scope" in info else []
    words += [f"label {info['label']}"] if info.get("label", netdev) != netdev else []
    words += [f"metric {info['metric']}"] if "metric" in info else []
    words += ["noprefixroute"] if info.get("noprefixroute") else []
    return " ".join(words)
