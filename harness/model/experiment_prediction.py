"""Predict an experiment without running it: time of an iteration, time of the whole job, and the busiest link. Pure.

All numbers are modelled, and no verdict uses them. The effect of a fault begins and ends with its window. Times of
routing convergence, retransmission timers and restarts are not included.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.workload_file import Flow
from faultbed.harness.model.fault_effects import FabricState, effect_of, state_of
from faultbed.harness.model.step_times import IterationCost, Paths, StepParameters, iteration_cost
from faultbed.harness.model.workload_traffic import (
    MOST_FLOWS,
    RankTraffic,
    demands_of_workload,
    drawn_paths,
    drawn_queue_pair,
    rank_traffic,
)
from faultbed.inject.kinds.effect import Effect
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.link_arrays import LinkArrays, Path, link_arrays, path_of_flow
from faultbed.testbed.routing.live_placement import place_on_live_links
from faultbed.testbed.routing.max_min import Floats, link_rates, max_min_rates, merged
from faultbed.testbed.routing.offered_load import uplink_mmr
from faultbed.testbed.routing.schemes import Routing, scheme_named
from faultbed.traffic.engine.engine_client import FabricModel
from faultbed.traffic.schedules import cost

__all__ = ["DEFAULT_SCHEME", "Draw", "ExperimentPrediction", "Phase", "default_parameters", "lab_arrays", "predict"]

DEFAULT_SCHEME = "ecmp"
"""Routing scheme of an experiment that names none: BGP's ECMP."""
DRAWS = 20
_IN_FLIGHT = 64
"""Outstanding packets of a queue pair: the maximum of rxe (rxe_param.h, RXE_INFLIGHT_SKBS_PER_QP_HIGH)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Median, 5th and 95th percentile over random draws of queue pair numbers; all equal if nothing is drawn."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The workload while a certain set of faults is on.

    Attributes:
        faults: names of the faults that are on; empty: none.
        iteration_s: time of an iteration; None for flows.
        goodput_bps: payload that all flows together deliver, in bits per second; None for collectives and jobs.
        worst_link: the busiest direction, the sender first; empty: no link has a known capacity.
        worst_share: utilisation of that direction while data are transferred, 0 to 1.
        mmr: maximum over mean of the bytes on a switch's uplinks; the largest over all switches that have a choice.
    """

    faults: tuple[str, ...]
    iteration_s: Draw | None
    goodput_bps: Draw | None
    worst_link: str
    worst_share: float
    mmr: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPrediction:
    """A predicted experiment.

    Attributes:
        routing: name of the routing scheme.
        ranks: number of ranks or flows.
        size_bytes: bytes of one collective, or of all phases of an iteration together; for flows, of a message.
        draws: number of random draws of queue pair numbers.
        phases: the workload without faults, then one phase for each set of faults that are on together.
        job_s: time of all iterations with the faults in their windows; None if the workload ends by its duration.
        fault_free_s: time of all iterations without faults; None as for `job_s`.
        unknown: sentences about effects that the numbers do not include.
    """

    routing: str
    ranks: int
    size_bytes: int
    draws: int
    phases: tuple[Phase, ...]
    job_s: float | None
    fault_free_s: float | None
    unknown: tuple[str, ...] = ()

    @property
    def fault_free(self) -> Phase:
        """The job without faults."""
        return self.phases[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Values that stay the same during an experiment."""

    experiment: Experiment
    topology: Topology
    kind: LabKind
    arrays: LinkArrays
    parameters: StepParameters
    failed: frozenset[str]
    routing: Routing
    seed: int


def default_parameters(kind: LabKind) -> StepParameters:
    """Return the parameters of a lab without a calibration: those by which `auto` chooses an algorithm."""
    link = cost.NETWORKS[kind].far
    return StepParameters(alpha_ns=link.alpha_ns, overhead_ns=link.overhead_ns)


def lab_arrays(topology: Topology, kind: LabKind, rate_scale: float | None) -> LinkArrays:
    """Return the directions of a lab's links and their nominal capacities, in bytes per second."""
    network = cost.NETWORKS[kind]
    return link_arrays(
        topology,
        rate_scale=rate_scale,
        host_bytes_per_s=1e9 / network.far.ns_per_byte,
        local_bytes_per_s=1e9 / network.near.ns_per_byte,
    )


def predict(
    experiment: Experiment,
    faults: Sequence[PlannedFault],
    inventory: Inventory,
    parameters: StepParameters,
    *,
    failed: frozenset[str] = frozenset(),
    draws: int = DRAWS,
    seed: int = 1,
) -> ExperimentPrediction:
    """Predict an experiment whose names were resolved on a lab.

    Args:
        experiment: the experiment, with names of this lab (`faultbed.harness.run.prepare.resolve`).
        faults: its faults, planned on this lab.
        inventory: the lab.
        parameters: the lab's parameters, calibrated or default.
        failed: names of links that carry nothing during the whole experiment.
        draws: number of random draws of queue pair numbers, for routing schemes that hash.
        seed: seed of the draws.

    Raises:
        ConfigError: the experiment uses something that the model does not support; the message names its path.
    """
    topology = inventory.topology
    fabric = experiment.fabric
    routing = fabric.as_routing if fabric is not None else Routing()
    setting = _Setting(
        experiment=experiment,
        topology=topology,
        kind=inventory.kind,
        arrays=lab_arrays(topology, inventory.kind, inventory.rate_scale),
        parameters=parameters,
        failed=failed,
        routing=replace(
            routing, hash_seeds={switch.name: inventory.hash_seed(switch.name) for switch in topology.switches}
        ),
        seed=seed,
    )
    try:
        return _predict(setting, faults, draws)
    except UsageError as error:
        raise ConfigError(f"{experiment.source}: {error}") from error


def _predict(setting: _Setting, faults: Sequence[PlannedFault], draws: int) -> ExperimentPrediction:
    experiment = setting.experiment
    name = experiment.fabric.routing if experiment.fabric is not None else DEFAULT_SCHEME
    _refuse_unmodelled(setting, name, faults)
    places = {fault.id: f"faults[{index}].kind" for index, fault in enumerate(experiment.faults)}
    effects = {fault.spec.id: effect_of(fault, places.get(fault.spec.id, fault.kind)) for fault in faults}
    _refuse_compute(setting, effects)
    rounds = 1 if scheme_named(name).is_static and not setting.failed and not faults else draws
    work = _work(setting)
    phases: dict[tuple[str, ...], Phase] = {}
    for on in [(), *(names for _, names in _windows(faults))]:
        if on not in phases:
            chosen = [(fault, effects[fault.spec.id]) for fault in faults if fault.spec.id in on]
            phases[on] = _phase(setting, name, chosen, work, rounds)
    job_s = fault_free_s = None
    if isinstance(work, RankTraffic) and work.iterations is not None:
        times = {on: phase.iteration_s.median for on, phase in phases.items() if phase.iteration_s is not None}
        fault_free_s = times[()] * work.iterations
        job_s = _job_time(times, _windows(faults), work.iterations)
    computes = isinstance(work, RankTraffic) and work.compute_units > 0
    return ExperimentPrediction(
        routing=name,
        ranks=len(work.pairs) if isinstance(work, Flow) else len(work.ranks),
        size_bytes=work.size_bytes,
        draws=rounds,
        phases=tuple(phases.values()),
        job_s=job_s,
        fault_free_s=fault_free_s,
        unknown=("the time of the compute phase",) if computes and setting.parameters.compute_ns is None else (),
    )


def _work(setting: _Setting) -> RankTraffic | Flow:
    workload = setting.experiment.workload
    if isinstance(workload, Flow):
        return workload
    return rank_traffic(workload, FabricModel(kind=setting.kind, topology=setting.topology))


def _refuse_unmodelled(setting: _Setting, name: str, faults: Sequence[PlannedFault]) -> None:
    """Reject schemes that spread a queue pair over paths: the model has one path and one window per queue pair."""
    if scheme_named(name).is_per_packet and (traits_of(setting.kind).is_emulated or faults):
        raise UsageError(
            f"fabric.routing: {name} sends the packets of one queue pair over several paths, and the model of losses "
            "and reordering has one window on one path; choose another scheme, or run it on a lab"
        )
    links = {link.name for link in setting.topology.uplinks}
    for link in setting.routing.weights:
        if link not in links:
            raise UsageError(f'fabric.weights: no link between switches "{link}" in this lab; remove it')


def _refuse_compute(setting: _Setting, effects: Mapping[str, Effect]) -> None:
    slow = [name for name, effect in effects.items() if effect.compute < 1]
    if slow and setting.parameters.compute_ns is None:
        raise UsageError(
            f"faults: {slow[0]} slows down the compute phase, and nothing is known about its time; calibrate the model "
            "with runs that compute (`faultbed calibrate`)"
        )


def _windows(faults: Sequence[PlannedFault]) -> list[tuple[float, tuple[str, ...]]]:
    """Return (begin in s, names of the faults that are on) for each span between begins and ends of faults."""
    edges = sorted({edge for fault in faults for edge in (fault.spec.at_s, fault.ends_s)})
    return [
        (begin, tuple(fault.spec.id for fault in faults if fault.spec.at_s <= begin < fault.ends_s)) for begin in edges
    ]


def _job_time(
    iteration_s: Mapping[tuple[str, ...], float], windows: Sequence[tuple[float, tuple[str, ...]]], iterations: int
) -> float:
    """Return the time at which a job ends, in s, if its iterations take another time while faults are on."""
    left, now = float(iterations), 0.0
    on: tuple[str, ...] = ()
    for begin, names in windows:
        done = (begin - now) / iteration_s[on] if iteration_s[on] else left
        if done >= left:
            return now + left * iteration_s[on]
        left, now, on = left - done, begin, names
    return now + left * iteration_s[on]


def _phase(
    setting: _Setting,
    scheme: str,
    faults: Sequence[tuple[PlannedFault, Effect]],
    work: RankTraffic | Flow,
    draws: int,
) -> Phase:
    state = state_of(
        setting.topology,
        scheme_named(scheme),
        setting.routing,
        setting.arrays,
        failed=setting.failed,
        faults=faults,
        in_flight=_IN_FLIGHT,
    )
    if scheme_named(scheme).is_placed:
        state = _placed(setting, state)
    names = tuple(fault.spec.id for fault, _ in faults)
    rng = np.random.default_rng(setting.seed)
    if isinstance(work, Flow):
        return _flow_phase(setting, state, work, names, rng, draws)
    _refuse_cut(state, work.ranks, names)
    costs = []
    for _ in range(draws):
        paths = _with_losses(drawn_paths(work, state.fabric, state.arrays, rng), state)
        costs.append(_iteration(setting, state, work, paths))
    seconds = [item.features.seconds(setting.parameters) for item in costs]
    middle = costs[int(np.argsort(seconds)[len(seconds) // 2])]
    transfer_s = middle.features.transfer_s
    busy = np.zeros(len(middle.link_bytes))
    np.divide(middle.link_bytes, state.arrays.capacity * transfer_s, out=busy, where=transfer_s > 0)
    worst_link, worst_share = _busiest(state.arrays, busy)
    return Phase(
        faults=names,
        iteration_s=_drawn(seconds),
        goodput_bps=None,
        worst_link=worst_link,
        worst_share=worst_share,
        mmr=_mmr(setting.topology, state.arrays, middle.link_bytes),
    )


def _placed(setting: _Setting, state: FabricState) -> FabricState:
    """Return the fabric with the flows placed on the links that are left, as the controller of `te` does at once."""
    workload = setting.experiment.workload
    demands = demands_of_workload(workload, FabricModel(kind=setting.kind, topology=setting.topology))
    live = place_on_live_links(setting.topology, demands, state.fabric.failed)
    routing = replace(state.fabric.routing, uplinks=live.placement.uplink)
    return replace(state, fabric=replace(state.fabric, routing=routing))


def _iteration(setting: _Setting, state: FabricState, traffic: RankTraffic, paths: Paths) -> IterationCost:
    return iteration_cost(
        traffic.programs,
        paths,
        state.arrays.capacity,
        setting.parameters,
        item_bytes=traffic.item_bytes,
        balances=traffic.balances,
        compute_units=traffic.compute_units / _slowest(setting.topology, state, traffic.ranks),
    )


def _slowest(topology: Topology, state: FabricState, ranks: Sequence[str]) -> float:
    """Return the remaining share of the speed of the ranks' slowest GPU, 0 to 1; all other ranks wait for it."""
    shares = [1.0]
    for rank in ranks:
        host, _, name = rank.partition(":")
        rnic = next(rnic for rnic in topology.host_by_name[host].rnics if rnic.name == name)
        shares.append(state.compute.get(f"{host}:{rnic.gpu or 'gpu0'}", 1.0))
    return min(shares)


def _refuse_cut(state: FabricState, rnics: Sequence[str], faults: Sequence[str]) -> None:
    for link in state.cut_host_links:
        rnic = ":".join(link.split(":")[1:])
        if rnic in rnics:
            raise UsageError(
                f"faults: {', '.join(faults)} cuts off the rank on {rnic}, so that the workload stops; the model has "
                "no restarts"
            )


def _with_losses(paths: Paths, state: FabricState) -> Paths:
    """Return paths whose loads on the links include the retransmissions of queue pairs that lose packets."""
    if not state.goodput:
        return paths
    return {pair: tuple(_lossy(path, state.goodput) for path in of_pair) for pair, of_pair in paths.items()}


def _lossy(path: Path, goodput: Mapping[int, float]) -> Path:
    share = float(np.prod([goodput.get(number, 1.0) for number, _ in path]))
    if share <= 0:
        raise UsageError("faults: all packets of a queue pair are lost, so that the workload stops; lose fewer")
    return tuple((number, part / share) for number, part in path)


def _flow_phase(
    setting: _Setting,
    state: FabricState,
    flow: Flow,
    names: tuple[str, ...],
    rng: np.random.Generator,
    draws: int,
) -> Phase:
    if flow.on_s:
        raise UsageError("workload.on: the model has no bursts; remove on and off, or run the experiment on a lab")
    if len(flow.pairs) * flow.qps > MOST_FLOWS:
        raise UsageError(f"workload.qps: {len(flow.pairs) * flow.qps} queue pairs, of at most {MOST_FLOWS}")
    pairs = [pair if flow.flow != "read" else pair[::-1] for pair in flow.pairs]
    _refuse_cut(state, [end for pair in pairs for end in pair], names)
    goodput, loads = [], []
    for _ in range(draws):
        paths = [
            path_of_flow(state.fabric, state.arrays, drawn_queue_pair(src, dst, rng))
            for src, dst in pairs
            for _ in range(flow.qps)
        ]
        rates, used = _flow_rates(setting, state, paths, flow)
        goodput.append(float(rates.sum()) * 8)
        loads.append(used)
    middle = loads[int(np.argsort(goodput)[len(goodput) // 2])]
    worst_link, worst_share = _busiest(state.arrays, middle / (state.arrays.capacity * setting.parameters.rate))
    return Phase(
        faults=names,
        iteration_s=None,
        goodput_bps=_drawn(goodput),
        worst_link=worst_link,
        worst_share=worst_share,
        mmr=_mmr(setting.topology, state.arrays, middle),
    )


def _flow_rates(setting: _Setting, state: FabricState, paths: Sequence[Path], flow: Flow) -> tuple[Floats, Floats]:
    """Return the goodput of each queue pair and the load on each direction, in bytes per second."""
    capacity = state.arrays.capacity * setting.parameters.rate
    links = len(capacity)
    entries = [(unit, at, part) for unit, path in enumerate(paths) for at, part in _lossy(path, state.goodput)]
    # A paced flow has a link of its own: its queue pairs share the flow's rate.
    if flow.rate_bps:
        entries += [(unit, links + unit, 1.0) for unit in range(len(paths))]
        capacity = np.append(capacity, np.full(len(paths), flow.rate_bps / 8 / flow.qps))
    unit, link, weight = zip(*entries, strict=True)
    loads = merged(unit, link, weight, units=len(paths))
    rates = max_min_rates(loads, capacity)
    return rates, link_rates(loads, rates, len(capacity))[:links]


def _drawn(values: Sequence[float]) -> Draw:
    low, median, high = np.percentile(values, (5, 50, 95))
    return Draw(median=float(median), low=float(low), high=float(high))


def _busiest(arrays: LinkArrays, busy: Floats) -> tuple[str, float]:
    known = np.where(np.isfinite(arrays.capacity), busy, 0.0)
    worst = int(known.argmax())
    if not known[worst]:
        return "", 0.0
    return arrays.name(worst), float(known[worst])


def _mmr(topology: Topology, arrays: LinkArrays, link_bytes: Floats) -> dict[str, float]:
    load = {
        (link.name, node): float(link_bytes[arrays.numbers[link.name, node]])
        for link, node in itertools.chain.from_iterable(
            ((link, link.a.node), (link, link.b.node)) for link in topology.uplinks
        )
    }
    return uplink_mmr(topology, load)
