"""Host faults of a rack lab that the kernel or our own programs carry out, as in a soft lab.

Some are missing: holding a terabyte of memory takes minutes, a VM's reset has no counterpart but the BMC, and the
control groups that limit our programs are made by a soft lab's provisioning.

The witnesses are those of hardware RNICs. An mlx5 without a posted receive counts `out_of_buffer`; the sender that gets
the RNR NAK counts `rnr_nak_retry_err` (drivers/infiniband/hw/mlx5/counters.c). Not yet run on hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from faultbed.inject.kinds.kind import Fidelity
from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Witness
from faultbed.inject.mechanisms.rack.rack_mechanism import RackMechanism, hardware_counter
from faultbed.inject.mechanisms.soft import congestion, host, storage
from faultbed.testbed.observe.counters import MLX5

__all__ = ["BY_KIND", "MECHANISMS"]

_LATE = RackMechanism(
    kind="congestion.late-receives",
    fidelity="real",
    by="a file that our traffic engine reads, as in a soft lab; out_of_buffer of the host's RNICs must move, too",
)
_BY_KERNEL: Mapping[str, Fidelity] = {
    "congestion.background": "real",
    "host.cpu-steal": "emulated",
    "host.clock-step": "real",
    "host.disk-full": "real",
    "host.rank-kill": "real",
    "host.rank-hang": "real",
    "storage.stall": "emulated",
    "storage.burst": "emulated",
}
MECHANISMS = (
    _LATE,
    *(
        RackMechanism(kind=kind, fidelity=level, by="the kernel, as in a soft lab")
        for kind, level in _BY_KERNEL.items()
    ),
)

_SOFT = {**congestion.BY_KIND, **host.BY_KIND, **storage.BY_KIND}


def _as_soft(request: Request) -> Mechanism:
    return _on_hardware(_SOFT[request.spec.kind](request))


def _late(request: Request) -> Mechanism:
    mechanism, node = _as_soft(request), request.target.node
    own = tuple(f"{node}/{rnic.name}.{MLX5['send_rnr_err']}" for rnic in request.topology.host_by_name[node].rnics)
    return dataclasses.replace(mechanism, must_move=(*mechanism.must_move, Witness(any_of=own)))


def _on_hardware(mechanism: Mechanism) -> Mechanism:
    witnesses = tuple(
        Witness(any_of=tuple(hardware_counter(key) for key in witness.any_of), at_least=witness.at_least)
        for witness in mechanism.must_move
    )
    # `send_err` counts rxe's own egress; hardware has no such counter.
    return dataclasses.replace(mechanism, must_move=witnesses, must_not_move=())


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    (_LATE.kind, "host"): _late,
    **{(kind, "rnic" if kind == "congestion.background" else "host"): _as_soft for kind in _BY_KERNEL},
}
