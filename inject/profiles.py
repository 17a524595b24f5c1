"""Fault schedules as they occur in the field, compressed in time: `f(seed, topology) → FaultSpecs`. Pure.

    llama3-54d        unplanned interruptions of one 54-day training run, by category (Llama 3, arXiv 2407.21783,
                      table 5), as a Poisson process; ranks that hang and hosts that freeze recover when the
                      fault is removed
    llama3-54d-fatal  llama3-54d, with causes that ended the run as rank kills and host reboots: for jobs that restart
                      (`[workload.resilience]`)
    hpn-flaps         links that flap for 1, 5, 9, 30, 60 and 120 s: the job survives, stalls, or fails
                      (Alibaba HPN, SIGCOMM 2024)
    early-life        one new link that flaps often at first and ever more rarely
    lemon-gpu         one GPU that is lost again and again by memory errors, others rarely (lemon nodes: Meta,
                      arXiv 2410.21680)
    diurnal-thermal   GPUs that the heat of the day slows down, each rack a little later than the one before

Every draw is SHA-256 over `seed/name/number`, so a schedule is the same in every Python and on every machine; times are
whole milliseconds. Faults on one target never overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology

__all__ = ["LLAMA3_54D", "PROFILES", "Category", "Profile", "as_plain", "digest", "drawn_categories", "schedule"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A cause of interruptions, and how often it was counted.

    `kind` is the fault kind with the same symptom; None: no fault kind has it. `fatal` is the fault kind that ends the
    rank or the host instead; None: the cause ends neither.
    """

    name: str
    count: int
    kind: str | None
    fatal: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


LLAMA3_54D = (
    Category(name="faulty GPU", count=148, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="GPU HBM3 memory", count=72, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="software bug", count=54, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="network switch or cable", count=35, kind="link.down"),
    Category(name="host maintenance", count=32, kind="host.freeze", fatal="host.reboot"),
    Category(name="GPU SRAM memory", count=19, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="GPU system processor", count=17, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="NIC", count=7, kind="link.down"),
    Category(name="NCCL watchdog timeout", count=7, kind="host.rank-hang", fatal="host.rank-kill"),
    Category(name="silent data corruption", count=6, kind="data.corrupt", params={"every": 200}),
    Category(name="GPU thermal interface and sensor", count=6, kind="gpu.throttle", params={"percent": 50}),
    Category(name="SSD", count=3, kind=None),
    Category(name="power supply", count=3, kind="host.freeze", fatal="host.reboot"),
    Category(name="server chassis", count=2, kind="host.freeze", fatal="host.reboot"),
    Category(name="IO expansion board", count=2, kind="link.down"),
    Category(name="dependency", count=2, kind=None),
    Category(name="CPU", count=2, kind="host.cpu-steal", params={"share": 0.5}),
    Category(name="system memory", count=2, kind="host.freeze", fatal="host.reboot"),
)
HPN_FLAPS_S = (1, 5, 9, 30, 60, 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A generator of schedules. `events` is the default number of faults to expect."""

    name: str
    summary: str
    events: int
    make: Callable[[_Draws, Topology, float, int], Iterator[FaultSpec]]


class _Draws:
    """A sequence of numbers drawn from a seed."""

    def __init__(self, seed: int, name: str) -> None:
        self._head, self._count = f"{seed}/{name}", 0

    def below(self, choices: int) -> int:
        """Draw a number in [0, choices)."""
        self._count += 1
        text = f"{self._head}/{self._count}".encode()
        return int.from_bytes(hashlib.sha256(text).digest(), "big") % choices

    def share(self) -> float:
        """Draw a number in (0, 1), in steps of a millionth."""
        return (self.below(999_999) + 1) / 1_000_000

    def gap_s(self, mean_s: float) -> float:
        """Draw the time to the next event of a Poisson process."""
        return -math.log(self.share()) * mean_s

    def choice(self, choices: Sequence[_T]) -> _T:
        """Draw an element of a sequence."""
        return choices[self.below(len(choices))]


def schedule(
    name: str, topology: Topology, *, seed: int, duration_s: float, events: int | None = None
) -> tuple[FaultSpec, ...]:
    """Return the faults of a profile, in the order in which they begin, all within `duration_s`.

    A fault that would overlap another one on its target, or on a host that is frozen or reboots, is delayed. A fault
    that then ends after `duration_s` is left out, so there may be fewer than `events`.

    Args:
        name: a key of `PROFILES`.
        topology: the lab; targets are drawn from it.
        seed: the same seed gives the same schedule.
        duration_s: length of the schedule; the profile is compressed into it.
        events: expected number of faults; None: the profile's default.

    Raises:
        UsageError: there is no such profile, or the lab has no target for it.
    """
    if name not in PROFILES:
        raise UsageError(f'no profile "{name}"; choose one of {", ".join(PROFILES)}')
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise UsageError(f"duration: {duration_s:g} s; a schedule must last longer than 0 s")
    profile = PROFILES[name]
    count = profile.events if events is None else events
    if count < 1:
        raise UsageError(f"events: {count}; a schedule must expect at least one event")
    specs: list[FaultSpec] = []
    for spec in profile.make(_Draws(seed, name), topology, duration_s, count):
        earliest_s = max(
            (earlier.at_s + earlier.for_s + _REST_S for earlier in specs if _conflict(earlier, spec)), default=0.0
        )
        at_s = round(max(spec.at_s, earliest_s), 3)
        for_s = round(spec.for_s, 3)
        # A fault that would outlive the schedule is left out.
        if at_s + for_s <= duration_s:
            specs.append(FaultSpec(kind=spec.kind, target=spec.target, at_s=at_s, for_s=for_s, params=spec.params))
    return tuple(sorted(specs, key=lambda spec: (spec.at_s, spec.target, spec.kind)))


def _conflict(spec: FaultSpec, other_spec: FaultSpec) -> bool:
    """Return whether two faults must not overlap: they share a target, or one stops the other's host."""
    if spec.target == other_spec.target:
        return True
    return any(
        stopped.kind in ("host.freeze", "host.reboot") and stopped.target in other.target.split(":")
        for stopped, other in ((spec, other_spec), (other_spec, spec))
    )


def as_plain(spec: FaultSpec) -> dict[str, Any]:
    """Return a fault of a schedule as plain data, ready for JSON. An experiment gives it its id and its exposure."""
    plain = {**asdict(spec), "params": dict(spec.params)}
    del plain["id"], plain["exposed"]
    return plain


def digest(specs: tuple[FaultSpec, ...]) -> str:
    """Return the SHA-256 of a schedule in hex: equal schedules have equal digests."""
    plain = [as_plain(spec) for spec in specs]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# Pause between two faults of one target: long enough to verify that the first one is cleared.
_REST_S = 1.0
# Shortest window of drawn faults. In a shorter one too little traffic would show the effect.
_SHORTEST_S = 0.5


def drawn_categories(seed: int, count: int) -> tuple[Category, ...]:
    """Return the causes of `count` interruptions, drawn with the weights of the published table."""
    draws = _Draws(seed, "categories")
    return tuple(_category(draws) for _ in range(count))


def _category(draws: _Draws) -> Category:
    drawn = draws.below(sum(category.count for category in LLAMA3_54D))
    for category in LLAMA3_54D:
        drawn -= category.count
        if drawn < 0:
            return category
    raise AssertionError(f"draw {drawn} is outside the table")


def _llama3(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    for category, spec in _interruptions(draws, topology, duration_s, events):
        if category.kind is not None:
            yield spec


def _llama3_fatal(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    for category, spec in _interruptions(draws, topology, duration_s, events):
        if category.fatal is not None:
            # A kill takes effect at once. In a longer window the job may have restarted its engines, which would look
            # as if none had been killed.
            yield replace(spec, kind=category.fatal, params={}, for_s=_SHORTEST_S)
        elif category.kind is not None:
            yield spec


def _interruptions(
    draws: _Draws, topology: Topology, duration_s: float, events: int
) -> Iterator[tuple[Category, FaultSpec]]:
    """Yield each interruption with the fault that has its symptom; the fault's kind is empty if no kind has it."""
    at_s = 0.0
    while (at_s := at_s + draws.gap_s(duration_s / events)) < duration_s:
        category = _category(draws)
        target = _target(draws, topology, category)
        window_s = max(_SHORTEST_S, min(draws.gap_s(duration_s / events / 4), duration_s / 10))
        if target is not None:
            kind, params = category.kind or "", dict(category.params)
            yield category, FaultSpec(kind=kind, target=target, at_s=at_s, for_s=window_s, params=params)


def _target(draws: _Draws, topology: Topology, category: Category) -> str | None:
    host = draws.choice(topology.hosts)
    if category.kind == "link.down":
        switches = category.name == "network switch or cable" and topology.uplinks
        return draws.choice(topology.uplinks).name if switches else f"{host.name}:{draws.choice(host.rnics).name}"
    if category.kind == "data.corrupt":
        return f"{host.name}:{draws.choice(host.rnics).name}"
    if category.kind == "gpu.throttle":
        return f"{host.name}:{draws.choice(host.gpus).name}" if host.gpus else None
    return host.name


def _hpn_flaps(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    links = [*topology.rnic_names, *(link.name for link in topology.uplinks)]
    rounds = [HPN_FLAPS_S[number % len(HPN_FLAPS_S)] for number in range(events)]
    for number in range(len(rounds) - 1, 0, -1):  # Fisher and Yates
        other = draws.below(number + 1)
        rounds[number], rounds[other] = rounds[other], rounds[number]
    # Each flap is followed by a pause of its own length, and a little more.
    scale = duration_s / sum(2 * flap_s + 1 for flap_s in rounds)
    at_s = 0.0
    for flap_s in rounds:
        window_s = flap_s * scale
        yield FaultSpec(kind="link.flap", target=draws.choice(links), at_s=at_s, for_s=max(0.01, window_s))
        at_s += (2 * flap_s + 1) * scale


def _early_life(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    target = draws.choice(topology.links).name
    # Weibull with a shape of 1/2: the hazard rate falls (infant mortality). Event n of N is due at (n / (N + 1))²,
    # with jitter.
    for number in range(1, events + 1):
        at_s = duration_s * (number / (events + 1)) ** 2 * (0.5 + draws.share())
        yield FaultSpec(kind="link.flap", target=target, at_s=at_s, for_s=max(0.05, draws.gap_s(0.3)))


def _diurnal(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    gpus = [(host.rack, f"{host.name}:{gpu.name}") for host in topology.hosts for gpu in host.gpus]
    racks = sorted({rack for rack, _ in gpus})
    period_s = max(1.0, duration_s / 2)
    for rack, gpu in gpus[:events]:
        late_s = racks.index(rack) * min(1.0, duration_s / 10)
        high = 20 + draws.below(40)
        yield FaultSpec(
            kind="gpu.thermal",
            target=gpu,
            at_s=late_s,
            for_s=duration_s - late_s,
            params={"low": 5, "high": high, "period": round(period_s, 3)},
        )


def _lemon(draws: _Draws, topology: Topology, duration_s: float, events: int) -> Iterator[FaultSpec]:
    gpus = [f"{host.name}:{gpu.name}" for host in topology.hosts for gpu in host.gpus]
    if not gpus:
        return
    lemon, at_s = draws.choice(gpus), 0.0
    while (at_s := at_s + draws.gap_s(duration_s / events)) < duration_s:
        # The lemon is the target in at least four of five draws: restarts do not repair such a GPU for long.
        target = lemon if draws.below(5) else draws.choice(gpus)
        window_s = max(_SHORTEST_S, min(draws.gap_s(duration_s / events / 4), duration_s / 10))
        yield FaultSpec(kind="gpu.lost", target=target, at_s=at_s, for_s=window_s)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(name="llama3-54d", summary="interruptions of a training run by cause", events=20, make=_llama3),
            Profile(
                name="llama3-54d-fatal",
                summary="interruptions of a training run as rank kills and host reboots",
                events=6,
                make=_llama3_fatal,
            ),
            Profile(name="hpn-flaps", summary="flaps of 1 to 120 s, compressed", events=6, make=_hpn_flaps),
            Profile(name="early-life", summary="one new link, flapping ever more rarely", events=12, make=_early_life),
            Profile(
                name="lemon-gpu", summary="one GPU that is lost again and again, others rarely", events=8, make=_lemon
            ),
            Profile(name="diurnal-thermal", summary="the heat of the day, rack by rack", events=64, make=_diurnal),
        )
    }
)
"""Every profile, by name."""
