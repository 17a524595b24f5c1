"""Messages of kernels and switch daemons of a lab's machines, kept when a reboot ends a watcher."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["KernelMessages"]


class KernelMessages:
    """Messages that no call of `take` has returned yet, and the last record read of each kernel. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, list[str]] = {}
        self._read_up_to: dict[str, dict[str, Any]] = {}

    def keep(self, machine: str, message: Mapping[str, Any]) -> None:
        """Keep the messages of a watcher's event or answer (`faultbed.testbed.node.watch`)."""
        with self._lock:
            self._messages.setdefault(machine, []).extend(message["messages"])
            self._read_up_to[machine] = {name: message[name] for name in ("boot", "after", "files")}

    def read_up_to(self, machine: str) -> dict[str, Any]:
        """Return the fields of a request for what comes next: the boot, its last record, files; empty at first."""
        with self._lock:
            return dict(self._read_up_to.get(machine, {}))

    def take(self, machine: str) -> list[str]:
        """Return the messages since the last call."""
        with self._lock:
            return self._messages.pop(machine, [])

    def forget(self) -> None:
        """Forget the last record read of each kernel, because a restored snapshot has records with older numbers."""
        with self._lock:
            self._read_up_to.clear()
