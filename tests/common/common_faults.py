"""One fault of each kind that a soft lab and a rack both have, on targets that the example of a rack allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and whether it needs the job of `test_kinds.py` beside it to have something to hit."""

    kind: str
    target: str
    for_s: float
    params: dict[str, Any] = field(default_factory=dict)
    under_job: bool = False
    on_rack: tuple[float, dict[str, Any]] | None = None
    """Length and parameters on a rack, whose tools take seconds (mlxlink waits 2 s, ACLs are counted once a second)."""

    def of(self, lab_kind: str) -> tuple[float, dict[str, Any]]:
        """Length and parameters on a kind of lab."""
        return self.on_rack if self.on_rack is not None and lab_kind == "rack" else (self.for_s, self.params)


# Where a state proves a fault (15 s), a second look has to fall into the window, and it is late on a starved machine.
CASES = {
    "link.down": Case(kind="link.down", target="host[0]:downlink[0]", for_s=1.5, under_job=True),
    "link.flap": Case(
        kind="link.flap",
        target="host[0]:rnic[1]",
        for_s=3.0,
        params={"period": "1.0s", "duty": 0.3},
        on_rack=(16.0, {"period": "8.0s", "duty": 0.5}),
    ),
    "link.flap of a switch port": Case(kind="link.flap", target="host[0]:downlink[0]", for_s=1.5, under_job=True),
    "link.oneway": Case(kind="link.oneway", target="host[1]:rnic[0]", for_s=1.5, under_job=True, on_rack=(4.0, {})),
    "link.rate": Case(kind="link.rate", target="host[1]:rnic[0]", for_s=2.0, params={"rate": "2Mb/s"}, under_job=True),
    "link.mtu": Case(kind="link.mtu", target="host[1]:rnic[0]", for_s=1.5, under_job=True),
    "host.clock-step": Case(kind="host.clock-step", target="host[1]", for_s=2.0, params={"step": "60s"}),
    "host.disk-full": Case(kind="host.disk-full", target="host[1]", for_s=2.0),
    "host.cpu-steal": Case(kind="host.cpu-steal", target="host[1]", for_s=2.0, params={"share": 0.5}, under_job=True),
    "host.rank-hang": Case(kind="host.rank-hang", target="host[1]", for_s=15.0, under_job=True),
    "storage.stall": Case(kind="storage.stall", target="host[1]", for_s=3.0, under_job=True),
    "storage.burst": Case(kind="storage.burst", target="host[1]", for_s=4.0, under_job=True),
    "rnic.reset": Case(kind="rnic.reset", target="host[1]:rnic[1]", for_s=1.5, on_rack=(4.0, {})),
    "rnic.address": Case(kind="rnic.address", target="host[1]:rnic[1]", for_s=5.0),
    "rnic.remove": Case(kind="rnic.remove", target="host[1]:rnic[1]", for_s=15.0),
    "gpu.throttle": Case(
        kind="gpu.throttle", target="host[1]:gpu[0]", for_s=3.0, params={"percent": 50}, under_job=True
    ),
    "gpu.noisy-neighbour": Case(
        kind="gpu.noisy-neighbour", target="host[1]:gpu[0]", for_s=3.0, params={"neighbours": 2}, under_job=True
    ),
    "gpu.lost": Case(kind="gpu.lost", target="host[0]:gpu[0]", for_s=15.0),
    "gpu.xid": Case(
        kind="gpu.xid", target="host[0]:gpu[0]", for_s=2.0, params={"xid": 63, "period": "0.5s", "count": 3}
    ),
    "gpu.ecc": Case(kind="gpu.ecc", target="host[0]:gpu[0]", for_s=2.0, params={"error": "corrected", "count": 3}),
    "gpu.row-remap": Case(kind="gpu.row-remap", target="host[0]:gpu[0]", for_s=15.0),
    "gpu.overheat": Case(kind="gpu.overheat", target="host[0]:gpu[0]", for_s=15.0, params={"celsius": 80}),
}
