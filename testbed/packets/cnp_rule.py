"""What the documentation of an RNIC says about the congestion notifications (CNP) that it sends as a receiver."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["CnpRule", "CnpScope"]

CnpScope = Literal["qp", "address", "port"]
"""What an RNIC limits the rate of CNPs by: each queue pair, each pair of addresses, or the port as a whole."""


class CnpRule(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver answers marked packets by a CNP, at most one in `interval_ns` for each `per`.

    RNICs differ in both (Lumina, SIGCOMM 2023, 6.3): for example 50 us in DCQCN's paper, 4 us on ConnectX.
    """

    interval_ns: int
    per: CnpScope = "qp"
