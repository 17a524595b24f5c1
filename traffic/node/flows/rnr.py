"""An RNIC's counters of peers that were not ready to receive (RNR), under the names that its driver uses.

rdma_rxe: `rcvd_rnr_err` and `retry_rnr_exceeded_err` (drivers/infiniband/sw/rxe/rxe_hw_counters.c). mlx5:
`rnr_nak_retry_err` and `req_rnr_retries_exceeded` (not yet run on hardware). The counters belong to the whole RNIC, so
they include its other traffic.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["RnrCount"]

SYSFS = "/sys/class/infiniband"
NAMES = {
    "naks": ("rcvd_rnr_err", "rnr_nak_retry_err"),
    "exceeded": ("retry_rnr_exceeded_err", "req_rnr_retries_exceeded"),
}


class RnrCount:
    """Growth of the RNR counters since `begin`."""

    def __init__(self, rnic: str) -> None:
        self.folder = f"{SYSFS}/{rnic}/ports/1/hw_counters"
        self.before: dict[str, tuple[str, int]] = {}

    def begin(self) -> None:
        """Record the current values as the reference."""
        self.before = self._read()

    def growth(self) -> dict[str, Any]:
        """Return `counter` (its name) and `count` (its growth) for each kind of counter that this RNIC has."""
        return {
            kind: {"counter": name, "count": value - self.before[kind][1]}
            for kind, (name, value) in self._read().items()
            if kind in self.before
        }

    def _read(self) -> dict[str, tuple[str, int]]:
        counters = {}
        for kind, names in NAMES.items():
            for name in names:
                try:
                    with open(f"{self.folder}/{name}", encoding="ascii") as file:
                        counters[kind] = name, int(file.read())
                except OSError:  # another driver's name
                    continue
        return counters
