"""Fault kinds of RNICs: reset, or removal and recreation."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Example, Trait, described

__all__ = ["KINDS"]

_RESET = described(
    name="rnic.reset",
    summary="the RNIC's interface goes down in its host and comes back with its routes, as when a driver resets it",
    binding={"rnic": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="interface flags read back in the host",
    must_move="link_downed of the RNIC",
    must_not_move="send_err of every other host's RNIC",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.CARRIER}),
    may_fail=("workload",),
    example=Example(target="host1:rxe0"),
    colour="#6a4c93",
)

_REMOVE = described(
    name="rnic.remove",
    summary="the RDMA device is deleted, and recreated when the fault ends; a device in use is refused",
    binding={"rnic": "unit"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="the device is no longer in /sys/class/infiniband, as the holder and the counters read it",
    must_move="no counter; proof is that the RNIC's counters are gone while the fault is on, read independently of the "
    "holder",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.BUS_RESCAN, Trait.CARRIER}),
    may_fail=("workload",),
    example=Example(target="host1:rxe0"),
    colour="#1982c4",
)

KINDS = (_RESET, _REMOVE)
