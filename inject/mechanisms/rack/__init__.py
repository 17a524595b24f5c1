"""How kinds of faults are done on a rack lab: by the switch's own command line, vendors' tools, sysfs.

Pure, like `inject.mechanisms.soft`, whose place it takes for rack labs. Host `tc` and nftables never see a hardware
RNIC's packets, so only what has a real point there is here; every other kind is refused when it is planned. Where a
switch is a Linux machine that forwards in its kernel, that is what a soft lab has (`inject.mechanisms.rack.linux`).
**Not yet run on hardware**: commands and patterns follow the vendors' documentation, which each module names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Request, Shot
from inject.mechanisms.rack import gpu, host, linux, rnic, sonic
from inject.mechanisms.rack.rack_mechanism import Way
from testbed.errors import Unsupported

__all__ = ["WAYS", "Way", "take"]


def _ways() -> dict[str, Way]:
    """Every way by its kind; what has two is told with both, and is worth what the first is."""
    found: dict[str, Way] = {}
    for way in (*sonic.WAYS, *rnic.WAYS, *host.WAYS, *gpu.WAYS, *sonic.BOTH, *linux.WAYS):
        known = found.get(way.kind)
        found[way.kind] = way if known is None else dataclasses.replace(known, by=f"{known.by}; {way.by}")
    return found


WAYS: Mapping[str, Way] = _ways()
"""What each kind is worth on a rack lab, and how it is told; by name."""

_Table = Mapping[tuple[str, str], Callable[[Request], Shot]]
_AT_HOST: _Table = {**rnic.BY_KIND, **host.BY_KIND, **gpu.BY_KIND}
_AT_SWITCH: _Table = sonic.BY_KIND


def take(request: Request) -> Shot:
    """Choose place, commands and witnesses for a fault on a rack lab.

    Raises:
        UsageError: parameters that do not go together.
        Unsupported: this kind, target or parameter has no way to be done there.
    """
    key = (request.kind, request.target.kind)
    if key not in _AT_HOST and linux.is_linux(request):
        return linux.take(request)
    found = _AT_HOST.get(key) or _AT_SWITCH.get(key)
    if found is None:
        fits = [target for kind, target in (*_AT_SWITCH, *_AT_HOST) if kind == request.kind]
        on_linux = WAYS[request.kind].by if request.kind in WAYS else ""
        raise Unsupported(
            f"{request.where}: {request.kind} on a {request.target.kind} is not supported on this lab"
            + (f"; on a rack lab it fits: {', '.join(fits)}" if fits else f"; it takes {on_linux}" if on_linux else "")
        )
    return found(request)
