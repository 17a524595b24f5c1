"""How each kind of fault is carried out on a rack lab: the switch's command line, vendors' tools, sysfs.

Pure, like `faultbed.inject.mechanisms.soft`, which it replaces on rack labs. Host `tc` and nftables never see a
hardware RNIC's packets. A kind is therefore here only if a device on the packets' path can carry it out; planning
refuses every other kind. A switch that is a Linux machine and forwards in its kernel uses the soft lab's mechanisms
(`faultbed.inject.mechanisms.rack.linux`). **Not yet run on hardware**: commands and patterns follow the vendors'
documentation, which each module names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import Mechanism, Request
from faultbed.inject.mechanisms.rack import gpu, host, linux, pfc_storm, rnic, sonic
from faultbed.inject.mechanisms.rack.rack_mechanism import RackMechanism
from faultbed.testbed.errors import Unsupported
from faultbed.testbed.inventory.rules.unsupported_parts import UnsupportedPart, unsupported

__all__ = ["MECHANISMS", "RackMechanism", "resolve"]


def _by_kind() -> dict[str, RackMechanism]:
    """Map each fault kind to its rack mechanism. A kind with two lists both; the first one sets its fidelity."""
    by_kind: dict[str, RackMechanism] = {}
    for mechanism in (
        *sonic.MECHANISMS,
        *rnic.MECHANISMS,
        *host.MECHANISMS,
        *gpu.MECHANISMS,
        *pfc_storm.MECHANISMS,
        *sonic.LINK_MECHANISMS,
        *linux.MECHANISMS,
    ):
        first = by_kind.get(mechanism.kind)
        by_kind[mechanism.kind] = (
            mechanism if first is None else dataclasses.replace(first, by=f"{first.by}; {mechanism.by}")
        )
    return by_kind


MECHANISMS: Mapping[str, RackMechanism] = _by_kind()
"""The rack mechanism of each kind that has one, by kind."""

_Table = Mapping[tuple[str, str], Callable[[Request], Mechanism]]
_AT_HOST: _Table = {**rnic.BY_KIND, **host.BY_KIND, **gpu.BY_KIND, **pfc_storm.BY_KIND}
_AT_SWITCH: _Table = sonic.BY_KIND


def _unsupported_part(request: Request) -> UnsupportedPart | None:
    """Return why faultbed does not drive the part that carries out this fault; None: it does, or is not known."""
    target, key = request.target, (request.spec.kind, request.target.kind)
    if key in _AT_SWITCH and key not in _AT_HOST:
        return None
    if target.rnic is not None:
        return unsupported("RNIC", target.rnic.driver, target.rnic.name)
    return unsupported("GPU", target.gpu.kind) if target.gpu is not None else None


def resolve(request: Request) -> Mechanism:
    """Return the mechanism of a fault on a rack lab: place, commands and witnesses.

    Raises:
        UsageError: the parameters contradict each other.
        Unsupported: no mechanism fits this kind, target or parameter.
    """
    key = (request.spec.kind, request.target.kind)
    if row := _unsupported_part(request):
        raise Unsupported(
            f"{request.where}: {request.spec.kind} is not supported on this lab: {request.target.text} is {row.name}, "
            f"and faultbed does not support {row.missing}; {row.works}"
        )
    if key not in _AT_HOST and linux.is_linux(request):
        return linux.resolve(request)
    mechanism = _AT_HOST.get(key) or _AT_SWITCH.get(key)
    if mechanism is None:
        fits = [target for kind, target in (*_AT_SWITCH, *_AT_HOST) if kind == request.spec.kind]
        by = MECHANISMS[request.spec.kind].by if request.spec.kind in MECHANISMS else ""
        raise Unsupported(
            f"{request.where}: {request.spec.kind} on a {request.target.kind} is not supported on this lab"
            + (f"; on a rack lab its targets are: {', '.join(fits)}" if fits else f"; it needs {by}" if by else "")
        )
    return mechanism(request)
