"""How often hosts have booted since somebody first looked: a witness that only a reboot moves.

The kernel gives each boot an id (/proc/sys/kernel/random/boot_id, Documentation/admin-guide/sysctl/kernel.rst), and
counts the time since it (/proc/uptime); a new id counts with an uptime that began after the first look.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.errors import CommandFailed

if TYPE_CHECKING:
    from testbed.lab import Lab
    from testbed.remote.remote_node import Node

__all__ = ["COUNTER", "Boot", "Boots", "boot_of"]

COUNTER = "boots"
_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/uptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One boot of a machine: its id, and for how long it has lasted."""

    id: str
    up_s: float


def boot_of(node: Node, *, timeout_s: float = 20.0) -> Boot:
    """The boot that a machine is in.

    Raises:
        Unreachable: it does not answer.
        CommandFailed: it could not tell, or not in time.
    """
    words = node.run(["cat", *_FILES], timeout_s=timeout_s).stdout.split()
    if len(words) != 3:  # noqa: PLR2004 - an id, and the two numbers of /proc/uptime
        raise CommandFailed(f"{node.name}: not a boot id and an uptime: {' '.join(words)[:80]!r}")
    return Boot(id=words[0], up_s=float(words[1]))


class Boots:
    """Counts the boots of some hosts, as a counter `boots` of each, from 0 at the first look."""

    def __init__(self, lab: Lab, hosts: Collection[str]) -> None:
        self._lab, self._hosts = lab, tuple(hosts)
        self._first: dict[str, tuple[str, float]] = {}

    def read(self) -> dict[str, dict[str, int]]:
        """One more look.

        Raises:
            Unreachable: a host does not answer.
            CommandFailed: it could not tell, or not in time.
        """
        found = {}
        for host in self._hosts:
            began_s = time.monotonic()
            seen = boot_of(self._lab.node(host))
            first, first_s = self._first.setdefault(host, (seen.id, began_s))
            new = seen.id != first and seen.up_s <= time.monotonic() - first_s
            found[host] = {COUNTER: int(new)}
        return found
