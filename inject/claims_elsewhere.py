"""Claims where a fault's holder does not look: beside QEMU for a fault in a guest of a soft lab, and the reverse.

A host that is frozen or rebooted from beside QEMU takes every fault inside it along. Each session claims at its own
place first and looks at the other one then, so that of two at the same moment at least one is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inject.channels import revert_dir
from inject.node.actuator import Refused
from inject.node.claim import conflict, held_by, refuse_conflicts
from inject.node.holder import REVERT_DIR
from testbed.errors import FaultError

if TYPE_CHECKING:
    from inject.fault_plan import PlannedFault
    from testbed.lab import Lab

__all__ = ["refuse_elsewhere"]

_WHOLE = 2
"""Length of the path of a whole host."""


def refuse_elsewhere(lab: Lab, planned: PlannedFault, claim: Mapping[str, Any], *, where: str) -> None:
    """Refuse a fault that another session's fault at the other place would undo, or be undone by.

    Args:
        lab: the lab. On a rack every fault is held on its target, and nothing is looked at.
        planned: the fault, which has been claimed at its own place.
        claim: what it claims (`Injector.claim_of`).
        where: what messages call the fault.

    Raises:
        FaultError: it is refused; the message names the other fault.
        LabError: the guest does not tell.
    """
    if planned.lab_kind != "soft":
        return
    if not planned.place.local:
        try:
            refuse_conflicts(str(revert_dir(lab)), dict(claim))
        except Refused as error:
            raise FaultError(f"{where}: {error}") from None
    elif any(len(each["path"]) <= _WHOLE for each in claim["paths"]):
        script = f"cat {REVERT_DIR}/*.claim 2>/dev/null; true"
        said = lab.node(planned.target.node).run(["sh", "-c", script], timeout_s=30.0).stdout
        for line in said.splitlines():
            with contextlib.suppress(ValueError):
                other = json.loads(line)
                if other.get("session") != claim["session"] and (thing := conflict(other, dict(claim))):
                    raise FaultError(f"{where}: {thing} {held_by(other)}")
