"""What the ways of rack labs share: what one is worth, the request of commands, counters of hardware RNICs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inject.kinds.kind import Fidelity
from inject.mechanisms.mechanism import Place, Request, Shot, Step, Witness, held
from testbed.errors import Unsupported
from testbed.model.topology import Topology
from testbed.observe import counters

__all__ = ["ADAPTIVE", "COUNTERS", "PCI", "Commands", "Way", "commanded", "hardware", "phases_last", "retries", "shown"]

PCI = "/sys/bus/pci"
COUNTERS = {
    name: counters.MLX5[name]
    for name in ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "retry_exceeded_err")
}
"""Counters of retransmission by rxe's names, and those of mlx5 that tell the same."""
ADAPTIVE = "roce_adp_retrans"
"""What mlx5 counts first where nothing comes back: its adaptive retransmission (drivers/infiniband/hw/mlx5/counters.c).

It is on by default (register ROCE_ACCL, `roce_adp_retrans_en`). On a ConnectX-6 `local_ack_timeout_err` follows about
1 s later with a timeout of up to 16, and 17 s later with 20, and a queue pair dies later than the InfiniBand formula
says: after 3.1 s instead of 0.5 s with timeout 14 and 6 retries.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a kind is done on a rack lab, in words for the catalogue; `fidelity` is what it is worth there."""

    kind: str
    fidelity: Fidelity
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The arguments of `inject.node.commands.CommandsActuator`; see there."""

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

    def args(self, shows: dict[str, Any]) -> dict[str, Any]:
        """As JSON."""
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
            "shows": shows,
        }


def shown(words: Sequence[str], needs: Sequence[str]) -> str:
    """One command as a person would type it: with the first of each needed program's names."""
    text = shlex.join(words)
    for need in needs:
        name = need.partition("|")[0]
        text = text.replace(f"'{{{name}}}'", name).replace(f"{{{name}}}", name)
    return text


def commanded(
    asked: Request,
    commands: Commands,
    *,
    node: str,
    claims: str,
    shows: dict[str, Any],
    must_move: tuple[Witness, ...] = (),
    restored: tuple[tuple[str, int], ...] = (),
    while_on: tuple[tuple[str, int], ...] = (),
    edges: list[list[Any]] | None = None,
    patience_s: float | None = None,
) -> Shot:
    """The shot of a fault that commands on `node` make; each change is told beside its revert."""
    do, undo = ([shown(words, commands.needs) for words in each] for each in (commands.on, commands.off))
    both = max(len(do), len(undo))
    do += ["# (nothing more)"] * (both - len(do))
    undo += ["# (nothing more)"] * (both - len(undo))
    return Shot(
        place=Place(node=node),
        request=held(asked, "commands", commands.args(shows), claims=claims, edges=edges, patience_s=patience_s),
        steps=tuple(Step(do=one, undo=two) for one, two in zip(do, undo, strict=True)),
        must_move=must_move,
        must_not_move=(),
        restored=restored,
        shows=shows,
        while_on=while_on,
    )


def retries(topology: Topology, *names: str, but: str | None = None) -> tuple[str, ...]:
    """Counters of retransmission of every hardware RNIC (of every host but one), by rxe's names."""
    wanted = (*(names or tuple(COUNTERS)), ADAPTIVE)
    return tuple(
        f"{host.name}/{rnic.name}.{COUNTERS.get(name, name)}"
        for name in wanted
        for host in topology.hosts
        if host.name != but
        for rnic in host.rnics
    )


def hardware(key: str) -> str:
    """A counter of rxe's, `node/device.name`, by the name that a hardware RNIC has for it; any other as it is."""
    head, _, name = key.rpartition(".")
    return f"{head}.{counters.MLX5.get(name, name)}"


def phases_last(asked: Request, edges: Sequence[Sequence[Any]], shortest_s: float, *, why: str) -> None:
    """Refuse a fault that comes and goes faster than its target can follow.

    Raises:
        Unsupported: a phase, or the whole window, is shorter than `shortest_s`.
    """
    times = [float(at) for at, _ in edges]
    phases = [later - earlier for earlier, later in itertools.pairwise(times)] or [asked.for_s]
    if min(phases) < shortest_s:
        raise Unsupported(
            f"{asked.where}: not supported on this lab: {asked.kind} is to hold for {min(phases):g} s, and {why}; "
            f"make every phase at least {shortest_s:g} s"
        )
