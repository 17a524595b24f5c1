"""Faults of other commands of this controller, whose effects are no evidence for the faults of this one.

Commands in several shells may inject faults into different parts of one lab at the same time. The audit log records
what each command arms and clears, with its session. The whole log is read, because a fault may be on for hours while
thousands of others come and go. A fault of a command that was killed before this one began is over: this command has
waited for its lease to expire and compared the lab. A fault of a command that is killed later counts until its window
and its lease are over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.tenancy import audit_log
from faultbed.testbed.tenancy.lab_lease import is_dead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from faultbed.testbed.lab import Lab

__all__ = ["FaultsOfOthers"]

_FORGOTTEN_S = 3600.0
"""Time after its end from which a fault is forgotten when a command begins. Counters are read for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """Record of a fault in the audit log: the line before it was armed, and the line about its end if there is one."""

    armed: Mapping[str, Any]
    ended: Mapping[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether its end is recorded, and was successful."""
        return self.ended is not None and self.ended["event"] != "not cleared"

    @property
    def ago_s(self) -> float:
        """Seconds since its end, negative if it has not ended: without a record, after the lease of its controller."""
        if self.ended is not None:
            return audit_log.age_s(self.ended)
        return audit_log.age_s(self.armed) - float(self.armed["for_s"]) - audit_log.UNSEEN_S


class FaultsOfOthers:
    """Faults of the other commands on a lab, by the audit log. Thread-safe; reads each line of the log once.

    Args:
        lab: the lab.
        session: the session of this command, whose own faults are left out.
    """

    def __init__(self, lab: Lab, *, session: str) -> None:
        self._lab, self._session = lab, session
        self._log = audit_log.LogReader(lab.state_dir)
        self._records: dict[tuple[str, str], _Record] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget the faults that are over, among them those of commands that are dead now."""
        with self._lock:
            self._read_log()
            self._records = {
                key: record
                for key, record in self._records.items()
                if record.ago_s < _FORGOTTEN_S and (record.is_over or not is_dead(str(record.armed.get("process", ""))))
            }

    def since(self, since_ns: int, *, tail_s: float) -> list[tuple[PlannedFault, bool]]:
        """Return the faults that may have moved counters since a controller time, and whether each is over.

        Args:
            since_ns: CLOCK_MONOTONIC of this machine.
            tail_s: how long counters may move after a fault has ended.
        """
        within_s = (time.monotonic_ns() - since_ns) / 1e9 + tail_s
        with self._lock:
            self._read_log()
            records = [record for record in self._records.values() if record.ago_s < within_s]
        faults = []
        for record in records:
            fields = record.armed
            with contextlib.suppress(FaultbedError, KeyError, TypeError):  # of another inventory, or another version
                spec = FaultSpec(
                    kind=fields["kind"], target=fields["target"], for_s=fields["for_s"], params=fields["params"]
                )
                planned = plan(spec, self._lab.topology, lab_kind=self._lab.kind)
                faults.append((planned, record.is_over or record.ago_s > 0))
        return faults

    def _read_log(self) -> None:
        """Add the new lines of the log. Lines without a session are from an older version, and are left out."""
        for entry in self._log.new_entries():
            try:
                key = str(entry["session"]), str(entry["id"])
                if key[0] == self._session:
                    continue
                if entry["event"] == "arming":
                    record = _Record(armed=entry)
                elif key in self._records and entry["event"] in ("cleared", "not cleared", "not armed"):
                    record = replace(self._records[key], ended=entry)
                else:
                    continue
                _ = record.ago_s  # a line without a time is left out
            except (KeyError, TypeError, ValueError):
                continue
            self._records[key] = record
