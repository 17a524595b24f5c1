"""How each kind of fault is done in a soft lab: the place, the holder's request, the commands, the witnesses.

Pure. `take` is the only entrance; each family of kinds is a module with its own `BY_KIND`, a new kind is one more
function there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Learn, Place, Request, Shot, Step, Witness
from inject.mechanisms.soft import congestion, data, gpu, host, link, packet, rnic, storage, switch

__all__ = ["Learn", "Place", "Request", "Shot", "Step", "Witness", "take"]

_BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    **link.BY_KIND,
    **packet.BY_KIND,
    **data.BY_KIND,
    **congestion.BY_KIND,
    **switch.BY_KIND,
    **rnic.BY_KIND,
    **host.BY_KIND,
    **gpu.BY_KIND,
    **storage.BY_KIND,
}


def take(request: Request) -> Shot:
    """Choose place, commands and witnesses for a fault.

    Raises:
        UsageError: parameters that do not go together.
        Unsupported: nothing carries this target.
    """
    return _BY_KIND[request.kind](request)
