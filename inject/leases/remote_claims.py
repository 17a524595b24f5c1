"""Check a fault's claim at the other place where holders run: in the guest, or beside QEMU on the controller's machine.

Freezing or rebooting a host from beside QEMU affects every fault inside it. Each session claims at its own place first
and then checks the other one. If two sessions claim at the same moment, at least one of them is therefore refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faultbed.inject.leases.channels import revert_dir
from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.claim import conflict, holder_of, refuse_conflicts
from faultbed.inject.node.holder import REVERT_DIR
from faultbed.testbed.errors import FaultError
from faultbed.testbed.model.lab_kind import traits_of

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.lab import Lab

__all__ = ["refuse_remote_conflicts"]

_WHOLE_HOST = 2
"""Length of the path of a whole host."""
_CLAIMS = f"""\
cd {REVERT_DIR} 2>/dev/null || exit 0
for f in *.revert *.claim; do
  [ -e "$f" ] || continue
  stem=${{f%.*}} left=no content=
  [ "$f" != "$stem.claim" ] || [ ! -e "$stem.revert" ] || continue
  [ ! -e "$stem.revert" ] || left=yes
  {{ read -r content <"$stem.claim"; }} 2>/dev/null
  printf '%s\\t%s\\t%s\\n' "$f" "$left" "$content"
done
"""
"""Prints a line for each fault in a guest: one of its files, whether it has a stored revert, and its claim's content.

A claim without a stored revert may be incomplete: its holder is still writing it, or failed to."""


def refuse_remote_conflicts(lab: Lab, planned: PlannedFault, claim: Mapping[str, Any], *, where: str) -> None:
    """Refuse a fault that conflicts with another session's fault whose holder runs at the other place.

    Args:
        lab: the lab. On a rack every holder runs on its target, and there is no other place.
        planned: the fault, already claimed at its own place.
        claim: its claim (`Injector.claim_of`).
        where: how error messages name the fault.

    Raises:
        FaultError: it is refused; the message names the other fault.
        LabError: the guest does not answer.
    """
    if not traits_of(planned.lab_kind).is_emulated:
        return
    if not planned.place.local:
        try:
            refuse_conflicts(str(revert_dir(lab)), dict(claim))
        except Refused as error:
            raise FaultError(f"{where}: {error}") from None
    elif any(len(claimed["path"]) <= _WHOLE_HOST for claimed in claim["paths"]):
        output = lab.node(planned.target.node).run(["sh", "-c", _CLAIMS], timeout_s=30.0).stdout
        for line in output.splitlines():
            path, is_left, content = line.split("\t", 2)
            other = _decoded(content)
            if not other and is_left == "yes":
                raise FaultError(
                    f"{where}: the claim {path} on {planned.target.node} does not name what its fault changes; "
                    "run `faultbed heal`"
                )
            if other.get("session") != claim["session"] and (resource := conflict(other, dict(claim))):
                raise FaultError(f"{where}: {resource} {holder_of(other)}")


def _decoded(content: str) -> dict[str, Any]:
    """Return a claim's content; empty if it is damaged."""
    with contextlib.suppress(ValueError):
        fields = json.loads(content)
        return fields if isinstance(fields, dict) else {}
    return {}
