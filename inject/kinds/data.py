"""Silent data corruption, which no checksum of the network detects."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Example, Trait, described
from faultbed.inject.kinds.packet import FILTERS

__all__ = ["KINDS"]

KINDS = (
    described(
        name="data.corrupt",
        summary="one bit of the last element of a data packet is flipped and the ICRC is recomputed: only a check of "
        "the payload detects it",
        binding={"port": "unit", "rnic": "unit"},
        params=tuple(param for param in FILTERS if param.name in ("share", "every", "psn", "round", "qp")),
        fidelity={"soft": "emulated"},
        armed_by="the nftables table and its hook, and the device that the packets are taken from, read back",
        must_move="InECT1Pkts of the receiver's IP layer (changed packets are marked with ECT(1)), and "
        "duplicate_request of the target RNIC: the receiver gets the changed packet and its retransmission. "
        "wrong_elements shows the effect on the payload",
        must_not_move="rxe send_err",
        reversible=True,
        traits=frozenset({Trait.ONE_HOP, Trait.MARKS_ECT1, Trait.NEEDS_SELECTION}),
        may_fail=("workload", "wrong_elements", "wrong_bytes"),
        example=Example(target="host1:rxe0", params={"every": 50}),
        colour="#ff006e",
    ),
)
