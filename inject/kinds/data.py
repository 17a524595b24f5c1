"""Data: silently wrong, as no checksum of the network will tell."""

from __future__ import annotations

from inject.kinds.kind import described
from inject.kinds.packet import FILTERS

__all__ = ["KINDS"]

KINDS = (
    described(
        name="data.corrupt",
        summary="one bit of the last element in a data packet is another one, and the ICRC made anew: only who checks "
        "the payload can tell",
        binding={"port": "unit", "rnic": "unit"},
        params=tuple(param for param in FILTERS if param.name in ("share", "every", "psn", "round", "qp")),
        fidelity={"soft": "emulated"},
        armed_by="the nftables table and its hook, and the device that the packets are taken from, listed back",
        must_move="InECT1Pkts of the receiver's IP layer (changed packets are dyed with ECT(1)), and duplicate_request "
        "of the target RNIC: the packet sent again came second. What the payload has become is for wrong_elements",
        must_not_move="rxe send_err",
        reversible=True,
        colour="#ff006e",
    ),
)
