"""A truth-labelled campaign: one short run for each kind of fault at each place that carries the job. Pure.

The job is an all-to-all, so that every RNIC of the job talks to every other one. Each run has one fault, some have
none; `harness.confusion` holds what attribution says of each against it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inject.plan import FaultSpec, plan
from testbed.errors import FaultbedError
from testbed.topology import Topology

__all__ = ["Label", "experiment", "in_turn", "labels"]

AT_S, FOR_S, DURATION_S = 6, 3, 16
_PORT_FAULTS: tuple[tuple[str, Mapping[str, str | float]], ...] = (
    ("packet.drop", {"share": 0.05, "direction": "to"}),
    ("packet.drop", {"share": 0.05, "direction": "from"}),
    ("packet.corrupt", {"share": 0.05}),
    ("packet.mark", {"share": 0.2}),
    ("link.flap", {}),
    ("link.oneway", {}),
    ("link.mtu", {"mtu": 1000}),
)
_HOST_FAULTS: tuple[tuple[str, Mapping[str, str | float]], ...] = (
    ("host.freeze", {}),
    ("host.rank-hang", {}),
    ("host.cpu-steal", {"share": 0.6}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What one run of the campaign does; `kind` None: nothing."""

    number: int
    kind: str | None
    target: str = ""
    parameters: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The experiment's name: letters, digits, dots and dashes."""
        if self.kind is None:
            return f"truth-{self.number:03}-none"
        return re.sub(r"[^a-z0-9.-]", "-", f"truth-{self.number:03}-{self.kind}-{self.target}".lower())[:63]


def labels(topology: Topology, *, lab_kind: str) -> tuple[Label, ...]:
    """All runs for a lab: what its kinds of faults can do at its places. Every tenth run has no fault."""
    wanted = [one for one in _wanted(topology) if _possible(one, topology, lab_kind)]
    found: list[Label] = []
    for kind, target, parameters in wanted:
        if len(found) % 10 == 9:  # noqa: PLR2004 - every tenth
            found.append(Label(number=len(found), kind=None))
        found.append(Label(number=len(found), kind=kind, target=target, parameters=parameters))
    return tuple(found)


def in_turn(some: Iterable[Label]) -> list[Label]:
    """One run of each kind, then a second one of each: a campaign that is ended early has seen every kind."""
    by_kind: dict[str | None, list[Label]] = {}
    for one in some:
        by_kind.setdefault(one.kind, []).append(one)
    return [one for rounds in itertools.zip_longest(*by_kind.values()) for one in rounds if one is not None]


def experiment(label: Label, topology: Topology) -> bytes:
    """The experiment file of one run (TOML)."""
    ranks = ", ".join(f'"{host.name}:{host.rnics[0].name}"' for host in topology.hosts)
    lines = [
        f'name = "{label.name}"',
        f"seed = {label.number + 1}",
        "[workload]",
        'collective = "all-to-all"',
        'size = "256KiB"',
        f"ranks = [{ranks}]",
        f'duration = "{DURATION_S}s"',
        "compute_units = 8",
        "[[expect]]",
        'metric = "wrong_elements"',
        "max = 0",
    ]
    if label.kind is not None:
        values = ", ".join(
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
            for name, value in label.parameters.items()
        )
        lines += [
            "[[faults]]",
            f'kind = "{label.kind}"',
            f'target = "{label.target}"',
            f'at = "{AT_S}s"',
            f'for = "{FOR_S}s"',
            f"set = {{ {values} }}",
        ]
    return ("\n".join(lines) + "\n").encode()


_Wanted = tuple[str, str, Mapping[str, str | float]]


def _wanted(topology: Topology) -> Iterator[_Wanted]:
    first = {host.name: host.rnics[0].name for host in topology.hosts}
    links = [link for link in topology.links if link.is_uplink or first.get(link.b.node) == link.rnic]
    for (kind, parameters), link in itertools.product(_PORT_FAULTS, links):
        yield kind, link.name, parameters
    for (kind, parameters), host in itertools.product(_HOST_FAULTS, topology.hosts):
        yield kind, host.name, parameters
    for host in topology.hosts:
        for gpu, percent in itertools.product(host.gpus, (50, 80)):
            yield "gpu.throttle", f"{host.name}:{gpu.name}", {"percent": percent}
    for switch in topology.switches:
        yield "switch.bgp-kill", switch.name, {}
        if switch.role == "rtsw":  # the others announce nothing that a job talks to
            yield "switch.withdraw", switch.name, {}


def _possible(one: _Wanted, topology: Topology, lab_kind: str) -> bool:
    kind, target, parameters = one
    try:
        plan(FaultSpec(kind=kind, target=target, for_s=FOR_S, params=dict(parameters)), topology, lab_kind=lab_kind)
    except FaultbedError:
        return False
    return True
