"""Model the time of an iteration in which ranks exchange messages in steps: latency, and max-min fair rates. Pure.

The ranks that exchange data with each other in a step form a component. Its queue pairs progress together, because a
rank enters the next step only when it has all data of this one. A component is therefore one *unit* of
`faultbed.testbed.routing.max_min`, whose weights are its bytes on each link. Components of the same step share links by
max-min fairness. With `dqplb` a pair of ranks moves data from slow queue pairs to fast ones. Each queue pair is then a
unit with its own rate, and the rate of the pair of ranks is their sum.

A step takes alpha + o (m - 1) + transfer time, as in `faultbed.traffic.schedules.cost`; m is the largest number of
messages of one rank. That model has no links. With one component, and links only at the ranks, both models are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.link_arrays import Path
from faultbed.testbed.routing.max_min import Floats, max_min_rates, merged
from faultbed.traffic.schedules import Program

__all__ = ["Features", "IterationCost", "Paths", "StepParameters", "iteration_cost"]

Pair = tuple[int, int]
Paths = Mapping[Pair, Sequence[Path]]
"""The path of each queue pair, by (sending rank, receiving rank)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParameters:
    """The parameters of a lab.

    `alpha_ns` is the latency of a step, `overhead_ns` the time of each further message in it, and `rate` the usable
    share of a link's nominal capacity. `compute_ns` is the time of one unit of `compute_units`; None: unknown.
    """

    alpha_ns: float
    overhead_ns: float
    rate: float = 1.0
    compute_ns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Steps, messages, transfer and compute of an iteration along its longest chain of steps.

    The time of the iteration is linear in these numbers. `transfer_s` is the time of the transfers if every link has
    its nominal capacity.
    """

    steps: int = 0
    messages: int = 0
    transfer_s: float = 0.0
    compute_units: float = 0.0

    def seconds(self, parameters: StepParameters) -> float:
        """Return the time of an iteration in s. If `compute_ns` is unknown, the time does not include compute."""
        communication = self.steps * parameters.alpha_ns + self.messages * parameters.overhead_ns
        compute = self.compute_units * (parameters.compute_ns or 0.0)
        return (communication + compute) / 1e9 + self.transfer_s / parameters.rate

    def after(self, earlier: Features) -> Features:
        """Return the features of a chain of steps that runs `earlier` and then this one."""
        return Features(
            steps=self.steps + earlier.steps,
            messages=self.messages + earlier.messages,
            transfer_s=self.transfer_s + earlier.transfer_s,
            compute_units=self.compute_units + earlier.compute_units,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterationCost:
    """The features of an iteration, and its bytes on each link, shape (links,)."""

    features: Features
    link_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """Ranks that exchange data in a step: bytes by pair, and the largest number of messages of one rank."""

    members: tuple[int, ...]
    sent: Mapping[Pair, int]
    messages: int


def iteration_cost(
    programs: Sequence[Program],
    paths: Paths,
    capacity: Floats,
    parameters: StepParameters,
    *,
    item_bytes: int,
    balances: bool = False,
    compute_units: float = 0.0,
) -> IterationCost:
    """Return the features of an iteration of `programs`, and its bytes on each link.

    Args:
        programs: the program of each rank, in rank order (`faultbed.traffic.schedules.programs`).
        paths: the path of each queue pair, by pair of ranks; the queue pairs share the pair's bytes evenly.
        capacity: capacity of each link in bytes per second, shape (links,).
        parameters: parameters that decide which chain of steps is the longest.
        item_bytes: bytes of an element.
        balances: whether queue pairs of a pair of ranks take over each other's data (`dqplb`).
        compute_units: work of each rank before its first step.

    Raises:
        UsageError: data crosses a link whose capacity is 0.
    """
    times_of = _balanced_times if balances else _transfer_times
    # Most steps of a schedule send the same bytes between the same ranks, so the rates are computed once for each
    # pattern.
    clocks = [Features(compute_units=compute_units)] * len(programs)
    link_bytes = np.zeros(len(capacity))
    known: dict[tuple[tuple[Pair, int], ...], tuple[list[_Component], list[float]]] = {}
    for sent in _steps(programs, item_bytes):
        key = tuple((pair, size) for pair, (size, _) in sent.items())
        if key not in known:
            components = _components(sent, {pair: len(paths[pair]) for pair in sent})
            known[key] = components, times_of(components, paths, capacity)
        for component, transfer_s in zip(*known[key], strict=True):
            begin = max((clocks[rank] for rank in component.members), key=lambda clock: clock.seconds(parameters))
            step = Features(steps=1, messages=component.messages - 1, transfer_s=transfer_s).after(begin)
            for rank in component.members:
                clocks[rank] = step
        _add_bytes(link_bytes, sent, paths)
    longest = max(clocks, key=lambda clock: clock.seconds(parameters))
    return IterationCost(features=longest, link_bytes=link_bytes)


def _steps(programs: Sequence[Program], item_bytes: int) -> Iterator[dict[Pair, tuple[int, int]]]:
    """Yield (bytes, messages) of each pair of ranks, step by step."""
    steps: dict[int, dict[Pair, tuple[int, int]]] = {}
    for program in programs:
        for step, dst, _, count in program["sends"]:
            sent = steps.setdefault(step, {})
            size, messages = sent.get((program["rank"], dst), (0, 0))
            sent[program["rank"], dst] = size + count * item_bytes, messages + 1
    for step in sorted(steps):
        yield dict(sorted(steps[step].items()))


def _components(sent: Mapping[Pair, tuple[int, int]], qps: Mapping[Pair, int]) -> list[_Component]:
    """Return the groups of ranks that exchange data in a step, directly or through others (union-find).

    `sent` has (bytes, messages) and `qps` the number of queue pairs of each pair of ranks.
    """
    root: dict[int, int] = {}

    def find(rank: int) -> int:
        root.setdefault(rank, rank)
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    for src, dst in sent:
        root[find(src)] = find(dst)
    by_root: dict[int, dict[Pair, tuple[int, int]]] = {}
    for pair, content in sent.items():
        by_root.setdefault(find(pair[0]), {})[pair] = content
    components = []
    for pairs in by_root.values():
        messages: Counter[tuple[str, int]] = Counter()
        for (src, dst), (_, count) in pairs.items():
            messages["sent", src] += count * qps[src, dst]
            messages["received", dst] += count * qps[src, dst]
        components.append(
            _Component(
                members=tuple(dict.fromkeys(rank for pair in pairs for rank in pair)),
                sent={pair: size for pair, (size, _) in pairs.items()},
                messages=max(messages.values()),
            )
        )
    return components


def _transfer_times(components: Sequence[_Component], paths: Paths, capacity: Floats) -> list[float]:
    """Return the transfer time of each component in s, if all begin together and each is one unit."""
    entries = [
        (number, at, size / len(paths[pair]) * part)
        for number, component in enumerate(components)
        for pair, size in component.sent.items()
        for path in paths[pair]
        for at, part in path
    ]
    return [0.0 if np.isinf(rate) else 1 / rate for rate in _rates(entries, len(components), capacity)]


def _balanced_times(components: Sequence[_Component], paths: Paths, capacity: Floats) -> list[float]:
    """Return the transfer time of each component in s, if each of its queue pairs is a unit (`dqplb`)."""
    owners = [
        (number, pair, path)
        for number, component in enumerate(components)
        for pair in component.sent
        for path in paths[pair]
    ]
    entries = [(number, at, part) for number, (_, _, path) in enumerate(owners) for at, part in path]
    by_pair: dict[tuple[int, Pair], float] = {}
    for (number, pair, _), rate in zip(owners, _rates(entries, len(owners), capacity), strict=True):
        by_pair[number, pair] = by_pair.get((number, pair), 0.0) + rate
    times = [0.0] * len(components)
    for (number, pair), rate in by_pair.items():
        times[number] = max(times[number], components[number].sent[pair] / rate)
    return times


def _rates(entries: Sequence[tuple[int, int, float]], units: int, capacity: Floats) -> list[float]:
    """Return the rate of each unit from its loads: (unit, link, weight)."""
    unit, link, weight = zip(*entries, strict=True) if entries else ((), (), ())
    rates = max_min_rates(merged(unit, link, weight, units=units), capacity)
    if not (rates > 0).all():
        raise UsageError("the model's paths cross a link without capacity; leave the fault out, or fail the link")
    return [float(rate) for rate in rates]


def _add_bytes(link_bytes: Floats, sent: Mapping[Pair, tuple[int, int]], paths: Paths) -> None:
    for pair, (size, _) in sent.items():
        for path in paths[pair]:
            for at, part in path:
                link_bytes[at] += size / len(paths[pair]) * part
