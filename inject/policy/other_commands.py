"""Faults of other commands of this controller, whose effects are no evidence for the faults of this one.

Commands by hand in several shells may hold different parts of one lab at a time. The audit log records what each of
them arms and clears, with its session. Only its end is read: faults that began long ago are over. A fault of a command
that was killed is over, too: this command has waited for its lease and compared the lab before it began.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from inject.fault_plan import FaultSpec, PlannedFault, plan
from testbed.errors import FaultbedError
from testbed.tenancy import audit_log
from testbed.tenancy.lab_lease import is_dead

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["acted_since", "faults_of_others"]


def faults_of_others(lab: Lab, *, session: str, since_ns: int, tail_s: float) -> list[tuple[PlannedFault, bool]]:
    """Return the faults of other commands that may have moved counters since a controller time.

    The second part of each says whether it is over.

    Args:
        lab: the lab.
        session: this command's own session.
        since_ns: CLOCK_MONOTONIC of this machine.
        tail_s: how long counters may move after a fault has ended.
    """
    now_s = time.time()
    since_s = now_s - (time.monotonic_ns() - since_ns) / 1e9
    faults = []
    entries = audit_log.latest(lab.state_dir)
    for fields, end_s, is_recorded in acted_since(entries, session=session, since_s=since_s - tail_s):
        if not is_recorded and is_dead(str(fields.get("process", ""))):
            continue
        is_over = is_recorded or end_s < now_s
        spec = FaultSpec(kind=fields["kind"], target=fields["target"], for_s=fields["for_s"], params=fields["params"])
        with contextlib.suppress(FaultbedError, TypeError):  # of another inventory, or another version
            faults.append((plan(spec, lab.topology, lab_kind=lab.kind), is_over))
    return faults


def acted_since(
    entries: Iterable[Mapping[str, Any]], *, session: str, since_s: float
) -> list[tuple[Mapping[str, Any], float, bool]]:
    """Return the record of each fault of another session that was on after `since_s`, with its end. Pure.

    The last part says whether the end is recorded; otherwise it is the planned one, which a killed command may not have
    reached. Times are seconds since 1970. Records without a session are of an older version, and are left out.
    """
    ends: dict[tuple[str, str], tuple[Mapping[str, Any], float, bool]] = {}
    for entry in entries:
        try:
            key, at_s = (str(entry["session"]), str(entry["id"])), datetime.fromisoformat(entry["at"]).timestamp()
            if entry["event"] == "arming":
                ends[key] = (entry, at_s + float(entry["for_s"]) + audit_log.UNSEEN_S, False)
            elif key in ends and entry["event"] in ("cleared", "not cleared", "not armed"):
                ends[key] = (ends[key][0], at_s, entry["event"] != "not cleared")
        except (KeyError, TypeError, ValueError):
            continue
    return [
        (entry, end_s, is_recorded)
        for (other, _), (entry, end_s, is_recorded) in ends.items()
        if other != session and end_s > since_s
    ]
