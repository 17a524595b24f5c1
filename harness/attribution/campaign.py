"""A campaign with known faults: short runs, each with one kind of fault at a place that the job uses. Pure.

The job is an all-to-all, so that every RNIC exchanges data with every other one. Every tenth run has no fault.
`faultbed.harness.attribution.confusion` scores the attribution of each run against its fault.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from faultbed.harness.experiment.toml_text import inline
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import kind_named
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.topology import Topology

__all__ = ["Label", "experiment", "in_turn", "labels"]

AT_S, FOR_S, DURATION_S = 6, 3, 16
_SIZE_BYTES = 256 << 10
"""Size of the all-to-all. `experiment` rounds it down, so that every block has whole four-byte elements."""
_LONGER_S = {"host.memory-pressure": 14, "host.cpu-steal": 6, "congestion.late-receives": 8}
"""Durations of kinds that need more than `FOR_S`: memory is allocated gradually (30 MiB/s on a busy machine), the
kernel reports CPU pressure after seconds, and a rank has eight receives posted in advance."""
_COMPUTELESS_BYTES = 16 << 10
_COMPUTELESS = frozenset({"congestion.late-receives"})
"""Kinds that need a job without a compute phase. During one, even a late receive is posted before its data arrives."""

_PlaceClass = Literal["link", "rnic", "host", "gpu", "switch", "rtsw"]
_Range = tuple[float, float]
_Row = tuple[str, _PlaceClass, Mapping[str, str | _Range]]
_ROWS: tuple[_Row, ...] = (
    ("packet.drop", "link", {"share": (0.02, 0.1), "direction": "to"}),
    ("packet.drop", "link", {"share": (0.02, 0.1), "direction": "from"}),
    ("packet.corrupt", "link", {"share": (0.02, 0.1)}),
    ("packet.mark", "link", {"share": (0.1, 0.4)}),
    ("packet.reorder", "link", {"share": (0.05, 0.2)}),
    ("link.down", "link", {}),
    ("link.flap", "link", {}),
    ("link.oneway", "link", {}),
    ("link.rate", "link", {"rate": (1, 3)}),
    ("link.mtu", "link", {"mtu": (800, 1200)}),
    ("congestion.shallow-queue", "link", {"packets": (2, 4), "rate": (3, 8)}),
    ("rnic.reset", "rnic", {}),
    ("host.freeze", "host", {}),
    ("host.reboot", "host", {}),
    ("host.rank-hang", "host", {}),
    ("host.rank-kill", "host", {}),
    ("host.cpu-steal", "host", {"share": (0.5, 0.8)}),
    ("host.memory-pressure", "host", {"left": (4, 8)}),
    ("gpu.throttle", "gpu", {"percent": (40, 85)}),
    ("gpu.thermal", "gpu", {"low": (10, 30), "high": (60, 90), "period": (2, 4)}),
    ("gpu.noisy-neighbour", "gpu", {"neighbours": (2, 4)}),
    ("gpu.lost", "gpu", {}),
    ("gpu.xid", "gpu", {"xid": (13, 95)}),
    ("switch.bgp-kill", "switch", {}),
    ("switch.bgp-reset", "switch", {}),
    ("switch.reboot", "switch", {}),
    ("switch.withdraw", "rtsw", {}),  # other switches announce no prefix that a job uses
    ("congestion.late-receives", "host", {"late": (4000, 8000)}),
    ("gpu.ecc", "gpu", {"error": "uncontained"}),
    ("gpu.row-remap", "gpu", {"state": "pending"}),
    ("gpu.overheat", "gpu", {"celsius": (89, 94)}),
)
"""Kinds of the campaign, by the class of their places, with their parameters.

Left out are kinds that must not affect a job (`host.clock-step`, `host.disk-full`, `switch.drain`,
`switch.hash-policy`, `switch.freeze`), because they leave nothing to attribute, and others such as those of storage,
which the job does not use.
"""
_PROBED_ROWS: tuple[_Row, ...] = (("packet.delay", "link", {"delay": (100, 300), "direction": "to"}),)
"""Only for campaigns with probes: delayed packets move no counter that locates them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The fault of one run of the campaign; `kind` None: no fault."""

    number: int
    seed: int
    kind: str | None
    target: str = ""
    parameters: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The experiment's name: letters, digits, dots and dashes."""
        fault_text = "none" if self.kind is None else f"{self.kind}-{self.target}"
        return re.sub(r"[^a-z0-9.-]", "-", f"truth-{self.seed}-{self.number:03}-{fault_text}".lower())[:63]


def labels(topology: Topology, *, lab_kind: LabKind, seed: int, places: int, probe: bool = False) -> tuple[Label, ...]:
    """Return the labels of all runs: each supported kind at up to `places` places, and no fault in every tenth run.

    `seed` selects the places and the intensity of each fault. With `probe`, kinds that only probes can locate are
    included.
    """
    chosen: list[Label] = []
    for candidate in _candidates(topology, (*_ROWS, *(_PROBED_ROWS if probe else ())), seed, places):
        if not _is_supported(candidate, topology, lab_kind):
            continue
        if len(chosen) % 10 == 9:  # noqa: PLR2004 - every tenth
            chosen.append(Label(number=len(chosen), seed=seed, kind=None))
        kind, target, parameters = candidate
        chosen.append(Label(number=len(chosen), seed=seed, kind=kind, target=target, parameters=parameters))
    return tuple(chosen)


def in_turn(runs: Iterable[Label]) -> list[Label]:
    """Interleave the kinds: one run of each, then a second run of each, so that an early end omits no kind."""
    by_kind: dict[str | None, list[Label]] = {}
    for label in runs:
        by_kind.setdefault(label.kind, []).append(label)
    return [label for rounds in itertools.zip_longest(*by_kind.values()) for label in rounds if label is not None]


def experiment(label: Label, topology: Topology, *, probe: bool = False) -> bytes:
    """Return the experiment file of one run (TOML), with or without probes."""
    ranks = [f"{host.name}:{host.rnics[0].name}" for host in topology.hosts]
    is_computeless = label.kind in _COMPUTELESS
    block_bytes = 4 * ((_COMPUTELESS_BYTES if is_computeless else _SIZE_BYTES) // (4 * len(ranks)))
    lasting_s = _LONGER_S.get(label.kind or "", FOR_S)
    lines = [
        f'name = "{label.name}"',
        f"seed = {1000 * label.seed + label.number}",
        "[workload]",
        'collective = "all-to-all"',
        f'size = "{block_bytes * len(ranks)}B"',
        f"ranks = {inline(ranks)}",
        f'duration = "{DURATION_S + lasting_s - FOR_S}s"',
        "compute_units = 0" if is_computeless else "compute_units = 8",
        *(["qp = { rnr_retry = 7 }"] if is_computeless else []),  # NCCL's default
        "[[expect]]",
        'metric = "wrong_elements"',
        "max = 0",
    ]
    if probe:
        lines.append("[probe]")
    if label.kind is not None:
        lines += [
            "[[faults]]",
            f'kind = "{label.kind}"',
            f'target = "{label.target}"',
            f'at = "{AT_S}s"',
            f'for = "{lasting_s}s"',
            f"set = {inline(kind_named(label.kind).spelled(label.parameters))}",
        ]
    return ("\n".join(lines) + "\n").encode()


_Candidate = tuple[str, str, Mapping[str, str | float]]
"""(kind, target, parameters)."""


def _candidates(topology: Topology, rows: Sequence[_Row], seed: int, places: int) -> Iterator[_Candidate]:
    places_by_class = _places(topology)
    for kind, place_class, ranges in rows:
        rng = random.Random(f"{seed}:{kind}:{ranges.get('direction')}")  # noqa: S311 - an experiment, no secret
        for target in rng.sample(places_by_class[place_class], min(places, len(places_by_class[place_class]))):
            yield kind, target, {name: _drawn(rng, within) for name, within in ranges.items()}


def _places(topology: Topology) -> dict[_PlaceClass, list[str]]:
    first = {host.name: host.rnics[0].name for host in topology.hosts}
    return {
        "link": [link.name for link in topology.links if link.is_uplink or first.get(link.b.node) == link.rnic],
        "rnic": [f"{host}:{rnic}" for host, rnic in first.items()],
        "host": list(first),
        "gpu": [f"{host.name}:{gpu.name}" for host in topology.hosts for gpu in host.gpus],
        "switch": [switch.name for switch in topology.switches],
        "rtsw": [switch.name for switch in topology.switches if switch.role == "rtsw"],
    }


def _drawn(rng: random.Random, allowed: str | _Range) -> str | float:
    """Return a value drawn from a range, an integer if the range's lower end is one. A text is returned unchanged."""
    if isinstance(allowed, str):
        return allowed
    low, high = allowed
    return rng.randint(int(low), int(high)) if float(low).is_integer() else round(rng.uniform(low, high), 3)


def _is_supported(candidate: _Candidate, topology: Topology, lab_kind: LabKind) -> bool:
    kind, target, parameters = candidate
    try:
        plan(FaultSpec(kind=kind, target=target, for_s=FOR_S, params=dict(parameters)), topology, lab_kind=lab_kind)
    except FaultbedError:
        return False
    return True
