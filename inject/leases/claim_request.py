"""What a holder claims on its target, in the form that holders of other sessions compare and name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from faultbed.testbed.tenancy.lab_lease import who

if TYPE_CHECKING:
    from faultbed.inject.leases.leased import Leased

__all__ = ["claim_of"]


def claim_of(planned: Leased, paths: Iterable[tuple[Sequence[str], str]], *, session: str) -> dict[str, Any]:
    """Return the claim of a fault or a routing scheme.

    Args:
        planned: the fault or the scheme.
        paths: each resource as (path, name for people); a path claims everything below it.
        session: id of this session; two claims of one session never conflict.
    """
    return {
        "paths": [{"path": list(path), "thing": resource} for path, resource in paths],
        "session": session,
        "kind": planned.kind,
        "target": planned.target_text,
        "fault": planned.id,
        "controller": f"{who()}, process {os.getpid()}",
        "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }
