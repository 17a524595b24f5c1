"""How kinds of faults are done on a rack lab: by the switch's own command line, vendors' tools, sysfs.

Pure, like `inject.aim`, whose place it takes for rack labs. Host `tc` and nftables never see a hardware RNIC's packets,
so only what has a real point there is here; every other kind is refused when it is planned. **Not yet run on
hardware**: commands and patterns follow the vendors' documentation, which each module names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.aim.shot import Request, Shot
from inject.rack import gpu, host, rnic, sonic
from inject.rack.way import Way
from testbed.errors import Unsupported

__all__ = ["WAYS", "Way", "take"]

WAYS: Mapping[str, Way] = {way.kind: way for way in (*sonic.WAYS, *rnic.WAYS, *host.WAYS, *gpu.WAYS, *sonic.BOTH)}
"""What each kind is worth on a rack lab, and how it is told; by name."""

_TAKE: Mapping[tuple[str, str], Callable[[Request], Shot]] = {
    **sonic.BY_KIND,
    **rnic.BY_KIND,
    **host.BY_KIND,
    **gpu.BY_KIND,
}


def take(request: Request) -> Shot:
    """Choose place, commands and witnesses for a fault on a rack lab.

    Raises:
        UsageError: parameters that do not go together.
        Unsupported: this kind, target or parameter has no way to be done there.
    """
    found = _TAKE.get((request.kind, request.target.kind))
    if found is None:
        fits = [target for kind, target in _TAKE if kind == request.kind]
        raise Unsupported(
            f"{request.where}: {request.kind} on a {request.target.kind} is not supported on this lab"
            + (f"; on a rack lab it fits: {', '.join(fits)}" if fits else "")
        )
    return found(request)
