"""Faults of switches and their control plane."""

from __future__ import annotations

from typing import Any

from faultbed.inject.kinds.effect import CUT, NO_UPLINKS, always
from faultbed.inject.kinds.kind import Example, FaultKind, Trait, described

__all__ = ["KINDS"]

_SESSIONS = "new TCP connections (ActiveOpens, PassiveOpens) at its BGP neighbours"


def _switch(name: str, summary: str, *, tried: tuple[str, ...] = ("soft",), **rest: Any) -> FaultKind:
    return described(
        name=f"switch.{name}",
        summary=summary,
        binding={"switch": "unit"},
        params=(),
        fidelity={"soft": rest.pop("fidelity", "real")},
        must_not_move=rest.pop("must_not_move", "rxe send_err"),
        reversible=True,
        tried=tried,
        **rest,
    )


KINDS = (
    _switch(
        "bgp-kill",
        "SIGKILL of the BGP daemon; it restarts when the fault ends",
        armed_by="the daemon's process is gone, by its pid file",
        must_move=_SESSIONS,
        traits=frozenset({Trait.ROUTES}),
        example=Example(target="rtsw1"),
        colour="#264653",
        effect=always(NO_UPLINKS),  # the kernel closes its sessions, and the neighbours withdraw its routes
    ),
    _switch(
        "bgp-reset",
        "every BGP session is closed (clear bgp *) and reconnects on its own",
        armed_by="connectionsDropped of bgpd has risen",
        must_move=_SESSIONS,
        traits=frozenset({Trait.ROUTES}),
        example=Example(target="ctsw1"),
        colour="#287271",
    ),
    _switch(
        "freeze",
        "the control plane hangs (SIGSTOP of bgpd and zebra) while packets are still forwarded",
        armed_by="the daemons' states in /proc",
        must_move=_SESSIONS,
        traits=frozenset({Trait.ROUTES}),
        example=Example(target="ctsw1"),
        colour="#1d3557",
    ),
    _switch(
        "withdraw",
        "the switch no longer announces its prefixes; its hosts become unreachable for other racks",
        armed_by="the line of bgpd's running configuration",
        must_move="InNoRoutes of another switch, or retransmissions at an RNIC",
        traits=frozenset({Trait.ROUTES}),
        example=Example(target="rtsw1"),
        colour="#6d597a",
    ),
    _switch(
        "hash-policy",
        "ECMP hashes addresses only: all queue pairs of a pair of RNICs take one uplink",
        armed_by="the sysctl, read back by the holder and by the counters",
        must_move="packets sent on the switch's uplinks meanwhile",
        traits=frozenset({Trait.KEEPS_UPLINKS, Trait.ROUTES}),
        example=Example(target="rtsw1"),
        colour="#8d99ae",
    ),
    _switch(
        "reboot",
        "the switch reboots: its routing daemons are killed, every port is down for the window, then both come back",
        fidelity="emulated",
        armed_by="the daemons' processes are gone and the flags of every port are down",
        must_move="carrier_down_count of the other end of an uplink",
        traits=frozenset({Trait.WHOLE_TARGET, Trait.CARRIER, Trait.ROUTES}),
        example=Example(target="ctsw1"),
        colour="#4a4e69",
        effect=always(CUT),
    ),
    _switch(
        "drain",
        "maintenance: the switch asks its neighbours to prefer others (BGP graceful shutdown, RFC 8326)",
        armed_by="the line of bgpd's running configuration",
        must_move="packets on its neighbours' other uplinks; none of their routes shares its load with it",
        must_not_move="rxe send_err, and InNoRoutes of every switch: a drain makes no black hole",
        traits=frozenset({Trait.ROUTES}),
        example=Example(target="ctsw1"),
        colour="#9a8c98",
        effect=always(NO_UPLINKS),
    ),
)
