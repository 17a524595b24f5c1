"""Predict how full the fullest link gets under each routing scheme as more and more links fail. Fidelity: modelled.

Traffic engineering that places whole flow keys is even as long as every link can get as many of them: with one dead
uplink of sixteen, sixteen keys leave some link with two. A hash of many queue pairs goes on sharing. Meta observed that
E-ECMP is the better of the two after several failures (Gangidi et al., "RDMA over Ethernet for Distributed AI Training
at Meta Scale", SIGCOMM 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from faultbed.harness.model.routing_prediction import JobTraffic, demands_of, flows_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.offered_load import Fabric, offered_load
from faultbed.testbed.routing.placement_of_flows import place
from faultbed.testbed.routing.schemes import Routing, scheme_named

__all__ = ["FailurePrediction", "better_from", "predict_failures"]

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePrediction:
    """How full the fullest link is with a number of failed uplinks.

    Attributes:
        failed: number of failed uplinks.
        orders: number of drawn sets of failed uplinks that leave every flow a path.
        fullest: by scheme, bytes of the fullest link over the least that any placement can have, the cut bound; the
            mean over these sets.
    """

    failed: int
    orders: int
    fullest: Mapping[str, float] = field(default_factory=dict)


def predict_failures(
    topology: Topology,
    ranks: Sequence[str],
    traffic: JobTraffic,
    schemes: Mapping[str, Routing],
    *,
    most: int,
    draws: int = 50,
    seed: int = 1,
) -> tuple[FailurePrediction, ...]:
    """Predict the fullest link for 0 to `most` failed uplinks, the same drawn failures for every scheme.

    Args:
        topology: the lab.
        ranks: RNICs in rank order, each once.
        traffic: the traffic of the job.
        schemes: parameters by the scheme's name; those of `te` are computed from the traffic and the failed links.
        most: largest number of failed uplinks; it ends earlier if no drawn set leaves every flow a path.
        draws: number of drawn orders in which uplinks fail, each with queue pair numbers of its own.
        seed: seed of the draws.

    Raises:
        UsageError: no such scheme, or a collective without algorithm; or the job sends nothing between racks.
    """
    rng = np.random.default_rng(seed)
    names = sorted({link.name for link in topology.uplinks})
    ratios: list[dict[str, list[float]]] = [{name: [] for name in schemes} for _ in range(most + 1)]
    for _ in range(draws):
        order, flows = rng.permutation(names), flows_of(traffic, ranks, rng)
        for count in range(min(most, len(names)) + 1):
            failed = frozenset(order[:count].tolist())
            try:
                placement = place(topology, demands_of(flows), failed=failed)
                loads = {
                    name: offered_load(
                        Fabric.of(
                            topology,
                            scheme_named(name),
                            replace(routing, uplinks=placement.uplink) if scheme_named(name).is_placed else routing,
                            failed=failed,
                        ),
                        flows,
                    )
                    for name, routing in schemes.items()
                }
            except UsageError:
                if not count:
                    raise
                break  # some flow has no path with these failures, nor with more
            if not placement.bound_bytes:
                raise UsageError(
                    "--failures: these flows stay inside racks, so no uplink carries them; name other --rank"
                )
            for name, load in loads.items():
                ratios[count][name].append(max(load.values()) / placement.bound_bytes)
    return tuple(
        FailurePrediction(
            failed=count,
            orders=len(next(iter(of_scheme.values()))),
            fullest={name: float(np.mean(values)) for name, values in of_scheme.items()},
        )
        for count, of_scheme in enumerate(ratios)
        if all(of_scheme.values())
    )


def better_from(predictions: Sequence[FailurePrediction], better: str, than: str) -> int | None:
    """Return from how many failures on one scheme's fullest link is less full than another's; None: from none on."""
    first = None
    for prediction in predictions:
        is_better = prediction.fullest[better] < prediction.fullest[than] * (1 - _ROUNDING)
        first = (prediction.failed if first is None else first) if is_better else None
    return first
