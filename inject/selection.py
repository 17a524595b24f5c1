"""Which packets a fault hits, decided by its seed before the lab is touched. Pure.

A share of packets is an exact choice, not a chance. Of every `period` packets that match the fault's filters at the
hop, the rule takes those at `positions`, counted from 0 when it is armed (nftables `numgen inc mod`, which starts at 0:
net/netfilter/nft_numgen.c, nft_ng_inc_init). The same seed and the same order of packets give the same packets. Where
the kernel itself draws (netem: loss in bursts, jitter), it gets the seed.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_POSITIONS", "MOST_SEED", "Selection", "by_netem", "by_share", "netem_seed"]

MOST_SEED = 2**31 - 1

MOST_POSITIONS = 1024
"""Highest number of positions in one period. An emulated switch still loads a rule with that many quickly."""
_LEAST_POSITIONS = MOST_POSITIONS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Packets chosen by a seed. `period` 0: netem draws. `spared`: all packets but those at `positions` are taken."""

    seed: int
    period: int = 0
    positions: tuple[int, ...] = ()
    spared: bool = False

    @property
    def share(self) -> float:
        """The share of packets that is taken; undefined (division by zero) if netem draws."""
        listed_share = len(self.positions) / self.period
        return 1 - listed_share if self.spared else listed_share

    def selected_among(self, packets: int) -> int:
        """Return how many of the first `packets` packets are taken, exactly."""
        periods, rest = divmod(packets, self.period)
        listed = periods * len(self.positions) + bisect.bisect_left(self.positions, rest)
        return packets - listed if self.spared else listed

    def takes(self, number: int) -> bool:
        """Return whether the packet with this number, counted from 0, is taken."""
        return self.selected_among(number + 1) > self.selected_among(number)

    def expression(self) -> str:
        """Return the nftables expression that matches the packets taken."""
        sign = "!= " if self.spared else ""
        return f"numgen inc mod {self.period} {sign}{{ {', '.join(map(str, self.positions))} }}"

    def __str__(self) -> str:
        """Return the sentence for receipts and plans."""
        if not self.period:
            return f"drawn by netem with seed {self.seed}"
        return f"selected by seed {self.seed}, period {self.period}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `plan.json` and receipts."""
        if not self.period:
            return {"seed": self.seed, "by": "netem"}
        return {"seed": self.seed, "by": "index", "period": self.period, "share": self.share}


@functools.lru_cache(maxsize=256)
def by_share(share: float, seed: int) -> Selection:
    """Draw the positions of a share of packets, 0 < share < 1.

    The period is as long as `MOST_POSITIONS` positions allow, so that it does not resonate with patterns of a workload.
    It is chosen to match the share as closely as possible: exactly for 0.1 or 0.0001, within 1 part in 300,000 in
    general, within 1 part in 1,000 at worst. Every set of positions is equally likely.
    """
    spared = share > 0.5  # noqa: PLR2004 - list the smaller part
    listed = 1 - share if spared else share
    counts = range(MOST_POSITIONS, _LEAST_POSITIONS, -1)
    count = min(
        counts, key=lambda listed_count: round(abs(listed_count / round(listed_count / listed) - listed) / listed, 12)
    )
    period = round(count / listed)
    positions: set[int] = set()
    number = 0
    while len(positions) < count:
        positions.add(_draw(seed, f"packets/{number}") % period)
        number += 1
    return Selection(seed=seed, period=period, positions=tuple(sorted(positions)), spared=spared)


def by_netem(seed: int) -> Selection:
    """Leave the draw to netem's own generator, with a seed derived from this one."""
    return Selection(seed=seed)


def netem_seed(seed: int) -> int:
    """Return the seed for netem: 63 bits, because its generator begins with small numbers after a small seed.

    Source: lib/random32.c, prandom_seed_state, which does not warm up.
    """
    return _draw(seed, "netem") >> 193


def _draw(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest(), "big")
