"""How each kind of fault is carried out in a soft lab: place, holder request, commands and witnesses. Pure.

`resolve` is the only entry point. Each family of kinds is a module whose `BY_KIND` maps a kind to the function that
returns its mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import LateBinding, Mechanism, Place, Request, Step, Witness
from faultbed.inject.mechanisms.soft import congestion, data, gpu, host, link, packet, rnic, storage, switch

__all__ = ["LateBinding", "Mechanism", "Place", "Request", "Step", "Witness", "resolve"]

_BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
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


def resolve(request: Request) -> Mechanism:
    """Return the mechanism of a fault: place, commands and witnesses.

    Raises:
        UsageError: the parameters contradict each other.
        Unsupported: no machine of the lab carries this target.
    """
    return _BY_KIND[request.spec.kind](request)
