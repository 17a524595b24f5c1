"""Split the time of a collective's operations into the parts that the engines measure. Pure.

The parts are those of `faultbed.traffic.node.ranks.parts_clock`. They are taken from the rank that enters an operation
last, as in `faultbed.traffic.engine.traffic_metrics.operation_times_ns`, because it does not wait for others to begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.traffic.engine.run_results import Iteration
from faultbed.traffic.node.ranks.parts_clock import PARTS

__all__ = ["PARTS", "LatencySplit", "latency_split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySplit:
    """Mean ns of each of `PARTS` over the operations of a run, and the number of operations."""

    operations: int
    parts_ns: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in their sum."""
        total = sum(self.parts_ns.values())
        return {name: part_ns / total if total else 0.0 for name, part_ns in self.parts_ns.items()}

    def __str__(self) -> str:
        parts = (f"{name} {self.parts_ns[name] / 1e3:.0f} us ({share:.0%})" for name, share in self.shares.items())
        return ", ".join(parts)


def latency_split(per_rank: Sequence[Sequence[Iteration]]) -> LatencySplit | None:
    """Return the split of the operations that every rank has finished.

    None: there is no such operation, or an engine did not report its parts.
    """
    by_index = [{item.index: item for item in rank} for rank in per_rank]
    common = set(by_index[0]).intersection(*by_index[1:]) if by_index else set()
    last_in = [min((rank[index] for rank in by_index), key=lambda item: item.comm_ns) for index in sorted(common)]
    if not last_in or not all(len(item.split_ns) == len(PARTS) for item in last_in):
        return None
    sums = [sum(column) for column in zip(*(item.split_ns for item in last_in), strict=True)]
    means = {name: total / len(last_in) for name, total in zip(PARTS, sums, strict=True)}
    return LatencySplit(operations=len(last_in), parts_ns=means)
