"""Faults of other commands of this controller, whose effects are no evidence for the faults of this one.

Commands in several shells may inject faults into different parts of one lab at the same time. The audit log records
what each command arms and clears, with its session. Only the log's last entries are read, because older faults are
over. A fault of a command that was killed before this one began is over, too: this command has waited for its lease to
expire and compared the lab. A fault of a command that is killed later counts until its window and its lease are over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faultbed.inject.fault_plan import FaultSpec, PlannedFault, plan
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.tenancy import audit_log
from faultbed.testbed.tenancy.lab_lease import is_dead

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["acted_within", "dead_processes", "faults_of_others"]


def dead_processes(state_dir: Path) -> frozenset[str]:
    """Return the dead processes in the audit log's last entries: their faults ended before this command began."""
    processes = {str(entry.get("process", "")) for entry in audit_log.latest(state_dir)}
    return frozenset(process for process in processes if is_dead(process))


def faults_of_others(
    lab: Lab, *, session: str, since_ns: int, tail_s: float, ended: Collection[str] = ()
) -> list[tuple[PlannedFault, bool]]:
    """Return the faults of other commands that may have moved counters since a controller time.

    Each is returned with a flag that says whether it is over.

    Args:
        lab: the lab.
        session: this command's own session.
        since_ns: CLOCK_MONOTONIC of this machine.
        tail_s: how long counters may move after a fault has ended.
        ended: processes that were dead when this command began (`dead_processes`).
    """
    within_s = (time.monotonic_ns() - since_ns) / 1e9 + tail_s
    faults = []
    entries = audit_log.latest(lab.state_dir)
    for fields, ago_s, is_recorded in acted_within(entries, session=session, within_s=within_s):
        if not is_recorded and fields.get("process") in ended:
            continue
        is_over = is_recorded or ago_s > 0
        spec = FaultSpec(kind=fields["kind"], target=fields["target"], for_s=fields["for_s"], params=fields["params"])
        with contextlib.suppress(FaultbedError, TypeError):  # of another inventory, or another version
            faults.append((plan(spec, lab.topology, lab_kind=lab.kind), is_over))
    return faults


def acted_within(
    entries: Iterable[Mapping[str, Any]],
    *,
    session: str,
    within_s: float,
    age_s: Callable[[Mapping[str, Any]], float] = audit_log.age_s,
) -> list[tuple[Mapping[str, Any], float, bool]]:
    """Return the record of each fault of another session that was on less than `within_s` ago.

    Each entry is (record, seconds since the fault's end, whether that end is recorded). The seconds are negative if the
    fault has not ended. An end that is not recorded is the planned one plus the lease of a dead controller. `age_s`
    returns how long ago a record was written. Records without a session are from an older version, and are left out.
    """
    ends: dict[tuple[str, str], tuple[Mapping[str, Any], float, bool]] = {}
    for entry in entries:
        try:
            key, ago_s = (str(entry["session"]), str(entry["id"])), age_s(entry)
            if entry["event"] == "arming":
                ends[key] = (entry, ago_s - float(entry["for_s"]) - audit_log.UNSEEN_S, False)
            elif key in ends and entry["event"] in ("cleared", "not cleared", "not armed"):
                ends[key] = (ends[key][0], ago_s, entry["event"] != "not cleared")
        except (KeyError, TypeError, ValueError):
            continue
    return [
        (entry, ago_s, is_recorded)
        for (other, _), (entry, ago_s, is_recorded) in ends.items()
        if other != session and ago_s < within_s
    ]
