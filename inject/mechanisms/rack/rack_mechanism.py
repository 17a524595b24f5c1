"""Parts that the mechanisms of rack labs share: commands as holder requests, counters of hardware RNICs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from faultbed.inject.kinds.kind import Fidelity
from faultbed.inject.mechanisms.mechanism import Mechanism, Place, Request, Step, Witness, holder_request
from faultbed.inject.mechanisms.soft.hop import ends_of
from faultbed.testbed.errors import Unsupported
from faultbed.testbed.model.topology import Port
from faultbed.testbed.observe import counters

__all__ = [
    "ADAPTIVE",
    "COUNTERS",
    "PCI",
    "Commands",
    "RackMechanism",
    "at_port",
    "by_commands",
    "ends_on_paths",
    "hardware_counter",
    "port_down_pattern",
    "require_phases",
    "retransmissions",
    "typed_command",
]

PCI = "/sys/bus/pci"
COUNTERS = {
    name: counters.MLX5[name]
    for name in ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "retry_exceeded_err")
}
"""Counters of retransmission by rxe's names, and their mlx5 counterparts."""
ADAPTIVE = "roce_adp_retrans"
"""The first counter of mlx5 that moves when nothing is answered: adaptive retransmission (mlx5/counters.c).

It is on by default (register ROCE_ACCL, `roce_adp_retrans_en`). On a ConnectX-6 `local_ack_timeout_err` follows about
1 s later with a timeout of up to 16, and 17 s later with 20. A queue pair fails later than the InfiniBand formula says:
after 3.1 s instead of 0.5 s with timeout 14 and 6 retries.
"""


def port_down_pattern(setting: str) -> str:
    """Return the pattern of the output of `mlxconfig -e query` if the firmware takes the port down with the driver.

    The columns are default, current and next boot (mstflint, mlxcfg_ui.cpp): the current value decides. Where
    KEEP_ETH_LINK_UP_Px is True, the default of every recorded ConnectX, the wire keeps its signal.
    """
    return rf"^\W*(RO)?\s*{setting}\s+\S+\s+False\(0\)\s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RackMechanism:
    """How a kind is carried out on a rack lab, in words for the catalogue (`by`), and its `fidelity` there."""

    kind: str
    fidelity: Fidelity
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The arguments of `faultbed.inject.node.commands.CommandsActuator`, which documents them."""

    on: Sequence[Sequence[str]]
    off: Sequence[Sequence[str]]
    look: Sequence[str]
    applied: str
    normal: str
    needs: Sequence[str] = ()
    able: Sequence[tuple[Sequence[str], str, str]] = ()
    remember: dict[str, tuple[Sequence[str], str]] = field(default_factory=dict)
    guard: str | None = None
    device: str | None = None
    count: tuple[Sequence[str], str] | None = None
    settle_s: float = 5.0
    command_s: float = 30.0
    lost: str | None = None
    gone: str | None = None
    unclear: str | None = None

    def args(self, shows: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as JSON data."""
        return {
            "on": [list(words) for words in self.on],
            "off": [list(words) for words in self.off],
            "look": list(self.look),
            "applied": self.applied,
            "normal": self.normal,
            "needs": list(self.needs),
            "able": [[list(words), pattern, missing] for words, pattern, missing in self.able],
            "remember": {name: [list(words), pattern] for name, (words, pattern) in self.remember.items()},
            "guard": self.guard,
            "device": self.device,
            "count": [list(self.count[0]), self.count[1]] if self.count else None,
            "settle_s": self.settle_s,
            "command_s": self.command_s,
            **{name: text for name in ("lost", "gone", "unclear") if (text := getattr(self, name)) is not None},
            "shows": shows,
        }


def typed_command(words: Sequence[str], needs: Sequence[str]) -> str:
    """Return a command as a person would type it, with the first name of each program in `needs`."""
    text = shlex.join(words)
    for need in needs:
        name = need.partition("|")[0]
        text = text.replace(f"'{{{name}}}'", name).replace(f"{{{name}}}", name)
    return text


def by_commands(
    request: Request,
    commands: Commands,
    *,
    node: str,
    claims: str,
    shows: dict[str, Any],
    must_move: tuple[Witness, ...] = (),
    restored: tuple[tuple[str, int], ...] = (),
    while_on: tuple[tuple[str, int | None], ...] = (),
    edges: list[list[Any]] | None = None,
    patience_s: float | None = None,
    quality: tuple[str, ...] = (),
) -> Mechanism:
    """Return the mechanism of a fault that commands on `node` carry out.

    The steps for people pair the n-th change with the n-th revert. The other arguments are those of `Mechanism` and
    `holder_request`.
    """
    do, undo = ([typed_command(words, commands.needs) for words in lines] for lines in (commands.on, commands.off))
    length = max(len(do), len(undo))
    do += ["# (nothing more)"] * (length - len(do))
    undo += ["# (nothing more)"] * (length - len(undo))
    return Mechanism(
        place=Place(node=node),
        request=holder_request(
            request, "commands", commands.args(shows), claims=claims, edges=edges, patience_s=patience_s
        ),
        steps=tuple(Step(do=command, undo=revert) for command, revert in zip(do, undo, strict=True)),
        must_move=must_move,
        must_not_move=(),
        restored=restored,
        shows=shows,
        while_on=while_on,
        quality=quality,
    )


def retransmissions(rnics: Iterable[str]) -> tuple[str, ...]:
    """Return the retransmission counters of hardware RNICs, which are given as `host/rnic`."""
    names = tuple(rnics)
    return tuple(
        f"{rnic}.{counter}" for counter in (*COUNTERS.values(), ADAPTIVE, "duplicate_request") for rnic in names
    )


def ends_on_paths(request: Request) -> tuple[str, ...]:
    """Return the RNICs on the paths that use a fault's target, as `host/rnic`; counters of others prove nothing.

    They are the RNIC at the link, and those of `src` and `dst`: one end of a connection counts what happens to the
    other, as retransmissions, NAKs or duplicates. If none is known, they are the RNICs below the switch that is the
    target, or below the lower end of an uplink: one end of every path over it is there.
    """
    link = request.target.link
    ends = [f"{link.b.node}/{link.rnic}"] if link is not None and link.rnic is not None else []
    ends += [f"{end.node}/{end.rnic.name}" for end in ends_of(request).values() if end.rnic is not None]
    below, reached = [link.a.node if link is not None else request.target.node], set[str]()
    while not ends and below:
        reached |= set(below)
        links = [other for switch in below for other in request.topology.links_of(switch) if other.a.node == switch]
        lower = [other for switch in below for other in request.topology.links_of(switch) if other.b.node == switch]
        ends = [f"{other.b.node}/{other.rnic}" for other in links if other.rnic is not None]
        below = [other.a.node for other in lower if other.a.node not in reached]
    return tuple(dict.fromkeys(ends))


def at_port(request: Request, port: Port, *counters_of_port: str, rnic: Sequence[str] = ()) -> Witness:
    """Return the witness of a fault at a switch port whose ASIC counts no hits: counters of this port and its link.

    Args:
        request: the fault.
        port: the port.
        counters_of_port: names of the port's counters (faultbed.testbed.node.asic_ports).
        rnic: names of counters of the RNIC at the other end; a link between switches has none.
    """
    own = tuple(f"{port.node}/{port.netdev}.{name}" for name in counters_of_port)
    link = request.target.link
    end = f"{link.b.node}/{link.rnic}" if link is not None and link.rnic is not None else None
    return Witness(any_of=(*own, *(f"{end}.{name}" for name in rnic if end)))


def hardware_counter(key: str) -> str:
    """Return an rxe counter (`node/device.name`) by its name on a hardware RNIC; other counters stay as they are."""
    head, _, name = key.rpartition(".")
    return f"{head}.{counters.MLX5.get(name, name)}"


def require_phases(request: Request, edges: Sequence[Sequence[Any]], shortest_s: float, *, why: str) -> None:
    """Refuse a fault whose phases are too short for its target.

    Raises:
        Unsupported: a phase, or the whole window, is shorter than `shortest_s`.
    """
    times = [float(at) for at, _ in edges]
    phases = [later - earlier for earlier, later in itertools.pairwise(times)] or [request.spec.for_s]
    if min(phases) < shortest_s:
        raise Unsupported(
            f"{request.where}: not supported on this lab: {request.spec.kind} is on for {min(phases):g} s, and {why}; "
            f"make every phase at least {shortest_s:g} s"
        )
