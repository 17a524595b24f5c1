"""What decides on a packet's way besides routes and rules: settings of ECMP, and the link addresses of next hops.

The kernel does not report a change of a setting (net/ipv4/sysctl_net_ipv4.c calls notifiers of the kernel alone), so
the settings are read at intervals: a change that is put back between two readings is not seen. The kernel reports every
change of a neighbour entry (RTNLGRP_NEIGH).
"""

from __future__ import annotations

import contextlib
import os
import socket

from faultbed.testbed.node.routing.deviations import FOREIGN, SETTING, Deviation, DeviationLog

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

    from faultbed.testbed.node.routing.kernel import Neighbour

__all__ = ["LARGEST_GAP_NS", "LOOK_S", "NeighbourWatch", "SettingWatch"]

LOOK_S = 0.5
"""Time between two readings of the settings."""
LARGEST_GAP_NS = 3_000_000_000
"""A longer time between two readings is recorded as not watched."""
_SETTINGS = ("fib_multipath_hash_policy", "fib_multipath_hash_fields", "fib_multipath_use_neigh")
_PERMANENT = 0x80


class SettingWatch:
    """Reads the settings of ECMP in the network namespace in which it is made, and records when they differed.

    A deviation lasts from the last reading without it to the first one without it again.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._log = DeviationLog()
        self._first: dict[str, str] = {}
        self._looked_ns = 0
        for name in _SETTINGS:
            with contextlib.suppress(FileNotFoundError):  # of a later kernel
                # An open file stays that of its namespace.
                self._files[name] = os.open(f"/proc/sys/net/ipv4/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def begin(self, now_ns: int) -> None:
        """Note the settings that are expected from now on."""
        self._first, self._looked_ns = self._read(), now_ns

    def look(self, now_ns: int) -> None:
        """Compare the settings with the expected ones."""
        before_ns, self._looked_ns = self._looked_ns, now_ns
        if now_ns - before_ns > LARGEST_GAP_NS:
            seconds = (now_ns - before_ns) / 1e9
            self._log.not_watched(before_ns, now_ns, f"the settings of ECMP were not read for {seconds:.1f} s")
        present = {
            name: Deviation(SETTING, f"net.ipv4.{name} was {value}, not {self._first.get(name)}")
            for name, value in self._read().items()
            if value != self._first.get(name)
        }
        self._log.update(before_ns, now_ns, present)

    def report(self) -> list[dict[str, Any]]:
        """Return the deviations as plain data."""
        return self._log.report()

    def close(self) -> None:
        """Close the files of the settings."""
        for file in self._files.values():
            os.close(file)

    def _read(self) -> dict[str, str]:
        values = {}
        for name, file in self._files.items():
            try:
                values[name] = os.pread(file, 64, 0).decode().strip()
            except OSError as error:
                values[name] = f"unreadable ({error})"
        return values


class NeighbourWatch:
    """Records when the neighbour entry of a next hop had another link address than when it was first known.

    Args:
        name_of: the ports that are watched, by interface index.
    """

    def __init__(self, name_of: Mapping[int, str]) -> None:
        self._name_of = name_of
        self._known: dict[tuple[int, bytes], bytes] = {}
        self._permanent: set[tuple[int, bytes]] = set()
        self._present: dict[str, Deviation] = {}
        self._log = DeviationLog()

    def begin(self, entries: Iterable[Neighbour]) -> None:
        """Note the entries that are expected from now on."""
        for entry in entries:
            if entry.index in self._name_of and entry.link_address:
                self._known[entry.key] = entry.link_address
                if entry.state & _PERMANENT:
                    self._permanent.add(entry.key)

    def changed(self, entry: Neighbour, before_ns: int, now_ns: int) -> None:
        """Compare an entry that the kernel has reported between two times: its messages do not say when.

        An entry that has no link address yet, or is deleted, decides nothing. A first address cannot be wrong, because
        nothing says which one is right.
        """
        if entry.index not in self._name_of or not entry.link_address or entry.is_deleted:
            return
        known, subject = self._known.setdefault(entry.key, entry.link_address), f"neighbour {entry.key}"
        self._present.pop(subject, None)
        if entry.link_address != known:
            what = f"{self._text(entry.key)} led to {entry.link_address.hex(':')}, not to {known.hex(':')}"
            self._present[subject] = Deviation(FOREIGN, what)
        self._log.update(before_ns, now_ns, self._present)

    def compare(
        self, entries: Iterable[Neighbour], used: Collection[tuple[int, bytes]], before_ns: int, now_ns: int
    ) -> None:
        """Compare all entries as in `changed`. `used` are the next hops of usable routes.

        A permanent entry of one of these must be there.
        """
        present = {entry.key: entry for entry in entries}
        for entry in present.values():
            self.changed(entry, before_ns, now_ns)
        for key in self._permanent:
            subject = f"no neighbour {key}"
            self._present.pop(subject, None)
            if key in used and key not in present:
                self._present[subject] = Deviation(FOREIGN, f"{self._text(key)} was gone")
        self._log.update(before_ns, now_ns, self._present)

    def report(self) -> list[dict[str, Any]]:
        """Return the deviations as plain data."""
        return self._log.report()

    def _text(self, key: tuple[int, bytes]) -> str:
        index, address = key
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6  # noqa: PLR2004 (bytes of an IPv4 address)
        return f"the neighbour entry of {socket.inet_ntop(family, address)} on {self._name_of[index]}"
