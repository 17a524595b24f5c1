"""Fault kinds of RNICs: reset, removal and recreation, loss of the address, and an error of a queue pair."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Example, Param, Trait, described

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

_ADDRESS = described(
    name="rnic.address",
    summary="the RNIC's address is removed and given again while its link stays up: its GID goes, and comes back at "
    "another index if a queue pair still used it",
    binding={"rnic": "unit"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="neither the interface's addresses nor the RNIC's GID table has it, as the holder reads them",
    must_move="no counter; proof is that the interface has no IPv4 address while the fault is on, read independently "
    "of the holder",
    must_not_move="carrier_changes of the RNIC's interface",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.ROUTES}),
    may_fail=("workload",),
    example=Example(target="host1:rxe0"),
    colour="#8ac926",
)

_QP_ERROR = described(
    name="rnic.qp-error",
    summary="a connected queue pair of the RNIC goes to the error state: a forged NAK with a fatal code answers one of "
    "its requests; it cannot be reverted, its program must make a new one",
    binding={"rnic": "fd"},
    params=(
        Param(
            name="qp",
            type="qpn",
            unit="",
            summary="its number; any: the first that gets an answer",
            default="any",
        ),
        Param(
            name="code",
            type="choice",
            unit="",
            summary="code of the NAK, and with it the status of the failed request",
            choices=("invalid-request", "remote-access", "remote-operational"),
            default="remote-operational",
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the socket at the RNIC's switch port, by the holder",
    must_move="qps_ended of the RNIC: connected queue pairs that are no longer connected; and InECT1Pkts of its host's "
    "IP layer (forged packets are marked with ECT(1))",
    must_not_move="qps_ended of the RNIC's neighbours in its host",
    reversible=False,
    traits=frozenset({Trait.MARKS_ECT1}),
    may_fail=("workload",),
    example=Example(target="host1:rxe0"),
    colour="#ca6702",
)

KINDS = (_RESET, _REMOVE, _ADDRESS, _QP_ERROR)
