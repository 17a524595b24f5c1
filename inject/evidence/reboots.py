"""A counter of host reboots since the first reading: a witness that only a reboot moves.

The kernel gives each boot an id (/proc/sys/kernel/random/boot_id, Documentation/admin-guide/sysctl/kernel.rst) and
counts the time since boot (/proc/uptime). A new id counts as a reboot if the uptime began after the first reading.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultbed.testbed.errors import CommandFailed

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.remote.remote_node import Node

__all__ = ["COUNTER", "Boot", "Boots", "boot_of"]

COUNTER = "boots"
_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/uptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One boot of a machine: its id, and the seconds since it began."""

    id: str
    up_s: float


def boot_of(node: Node, *, timeout_s: float = 20.0) -> Boot:
    """Return the current boot of a machine.

    Raises:
        Unreachable: the machine does not answer.
        CommandFailed: its files could not be read, or not by the deadline.
    """
    words = node.run(["cat", *_FILES], timeout_s=timeout_s).stdout.split()
    if len(words) != 3:  # noqa: PLR2004 - an id, and the two numbers of /proc/uptime
        raise CommandFailed(f"{node.name}: expected a boot id and an uptime, got {' '.join(words)[:80]!r}")
    return Boot(id=words[0], up_s=float(words[1]))


class Boots:
    """Counts the reboots of some hosts as a counter `boots` of each: 0 at the first reading, 1 after a reboot."""

    def __init__(self, lab: Lab, hosts: Collection[str]) -> None:
        self._lab, self._hosts = lab, tuple(hosts)
        self._first: dict[str, tuple[str, float]] = {}

    def read(self) -> dict[str, dict[str, int]]:
        """Read the counter of every host.

        Raises:
            Unreachable: a host does not answer.
            CommandFailed: its files could not be read, or not by the deadline.
        """
        counts = {}
        for host in self._hosts:
            began_s = time.monotonic()
            boot = boot_of(self._lab.node(host))
            first, first_s = self._first.setdefault(host, (boot.id, began_s))
            is_new = boot.id != first and boot.up_s <= time.monotonic() - first_s
            counts[host] = {COUNTER: int(is_new)}
        return counts
