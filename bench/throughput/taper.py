"""Part `taper` of the bench: goodput across zones over goodput in zones, which should be 1 / taper.

Each seed draws two permutations of all RNICs, one to other racks of the same zone and one to the other zone, and the
numbers of the queue pairs, which determine the paths. The two permutations run one after the other, so a slower machine
affects both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

from bench.rows import Row, decided
from faultbed.harness.confidence import LEVEL, Interval, student
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.flows.permutations import Tier, permutation

__all__ = ["SEEDS", "measure", "row_of", "share_of_taper"]

SEEDS = 10
SECONDS = 12.0
TOLERANCE = 0.1
PATIENT = QpParams(timeout=20)
"""4.3 s: on an uplink that ECMP gave twice its share, the last packet waits for seconds."""
QPS = 16
MESSAGE_BYTES = 8192
"""One such message per queue pair keeps every link busy, and no message waits as long as an ACK timeout."""


def measure(lab: Lab, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the row of a lab whose spines have a taper.

    Raises:
        LabError: the lab's ports have no rates, or flows failed.
    """
    expected = share_of_taper(lab.inventory_model)
    ratios = []
    for seed in range(1, SEEDS + 1):
        inside, across = (_goodput_bps(lab, tier, seed) for tier in ("zone", "fabric"))
        ratios.append(across / inside)
        progress(
            f"seed {seed} of {SEEDS}: across zones {across / 1e6:.1f} Mb/s, in zones {inside / 1e6:.1f}: "
            f"{ratios[-1]:.3f}; 1 / taper is {expected:.3f}"
        )
    yield row_of(ratios, expected)


def share_of_taper(inventory: Inventory) -> float:
    """Return 1 / taper of the spines, from the rates of their ports.

    Raises:
        LabError: ports of the spines have no rates.
    """
    roles = {switch.name: switch.role for switch in inventory.topology.switches}
    up = down = 0
    for spine in (name for name, role in roles.items() if role == "ctsw"):
        for port, shape in inventory.shapes.get(spine, {}).items():
            up += (shape.rate_bps or 0) * (roles.get(port) == "atsw")
            down += (shape.rate_bps or 0) * (roles.get(port) == "rtsw")
    if not up or not down:
        raise LabError(f"bench taper: the spines of {inventory.name} have no rates; take a lab such as soft-zones")
    return up / down


def row_of(ratios: Sequence[float], expected: float) -> Row:
    """Return a row about one ratio per seed: the whole interval of their mean must be within 10 % of `expected`."""
    middle = fmean(ratios)
    reach = student(len(ratios) - 1) * stdev(ratios) / math.sqrt(len(ratios))
    interval = Interval(
        low=middle - reach, high=middle + reach, method=f"Student's t of {len(ratios)} seeds", level=LEVEL
    )
    return (
        f"goodput across zones / in zones, {len(ratios)} seeds, 1 / taper = {expected:.3f}",
        f"{middle:.3f}",
        f"{min(ratios):.3f}..{max(ratios):.3f}, mean {interval.low:.3f}..{interval.high:.3f}",
        f"{expected * (1 - TOLERANCE):.3f}..{expected * (1 + TOLERANCE):.3f}",
        decided(interval, least=expected * (1 - TOLERANCE), most=expected * (1 + TOLERANCE)),
    )


def _goodput_bps(lab: Lab, tier: Tier, seed: int) -> float:
    specs = [
        FlowSpec(src=src, dst=dst, message_bytes=MESSAGE_BYTES, qps=QPS, depth=1, duration_s=SECONDS, qp=PATIENT)
        for src, dst in permutation(lab.topology, tier, seed=seed, number=0)
    ]
    result = flow_run.start_all(lab, specs).wait(SECONDS + 90)
    if result.outcome != "completed":
        raise LabError(f"bench taper: flows across the tier {tier} ended as {result.outcome} ({result.where})")
    return result.goodput_bps
