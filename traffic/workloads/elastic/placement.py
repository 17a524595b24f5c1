"""Place the ranks of a job after a loss: on spares, on fewer RNICs, or where they were. Pure.

A spare is best in the rack of the rank that it replaces: its flows then use the same uplinks. Next best is one with the
same parity, the position in its rack modulo 2. Ranks at odd and even positions use different uplinks where routes are
static, and a replacement of the other parity puts two ranks on one uplink. Among equal spares, the one with the fewest
cut links is best, and after that the first one in the list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.workloads.elastic.machine import Impossible, JobState, Policy, Rescheduled, host_of

__all__ = ["choose_spare", "reschedule", "shrunk_grid"]

SHRINKS = "dp"
"""The dimension of a grid that can shrink, because its groups are copies of each other. A grid with a single dimension
can shrink along that one."""
_LEAST = 2


def choose_spare(topology: Topology, lost: str, spares: Sequence[str], cut: Collection[str] = ()) -> str | None:
    """Return the best spare RNIC for the RNIC of a lost rank, or None if there is no spare.

    `cut` are the names of links that are known to be down.
    """
    rack, parity = _position(topology, host_of(lost))

    def cost(numbered: tuple[int, str]) -> tuple[bool, bool, int, int]:
        number, name = numbered
        spare_rack, spare_parity = _position(topology, host_of(name))
        return spare_rack != rack, spare_parity != parity, _cut_paths(topology, host_of(name), cut), number

    best = min(enumerate(spares), key=cost, default=None)
    return None if best is None else best[1]


def _position(topology: Topology, host: str) -> tuple[str, int]:
    """Return a host's rack, and the parity of its position in the rack."""
    rack = topology.host_by_name[host].rack
    members = [other.name for other in topology.hosts if other.rack == rack]
    return rack, members.index(host) % 2


def _cut_paths(topology: Topology, host: str, cut: Collection[str]) -> int:
    """Return how many of a host's links, and of the uplinks of its switches, are cut."""
    own = [link for link in topology.links if link.b.node == host]
    switches = {link.a.node for link in own}
    uplinks = [link for link in topology.links if link.is_uplink and switches & {link.a.node, link.b.node}]
    return sum(link.name in cut for link in (*own, *uplinks))


def shrunk_grid(
    grid: tuple[tuple[str, int], ...], lost: Iterable[int]
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Return the grid without the coordinates of some lost ranks, and the ranks that are left, in order.

    All ranks that share a lost rank's coordinate along `dp` leave the job with it.

    Raises:
        UsageError: the grid has no dimension that can shrink, or too little of it would be left.
    """
    names = [name for name, _ in grid]
    if SHRINKS not in names and len(names) > 1:
        sizes = ", ".join(f"{name}={size}" for name, size in grid)
        raise UsageError(f"the grid {sizes} cannot shrink: it has no dimension {SHRINKS}, whose groups are copies")
    axis = names.index(SHRINKS) if SHRINKS in names else 0
    stride = prod(size for _, size in grid[:axis])
    size = grid[axis][1]
    lost_coordinates = {rank // stride % size for rank in lost}
    left = size - len(lost_coordinates)
    if left < _LEAST:
        raise UsageError(
            f"the grid cannot shrink along {names[axis]} from {size} to {left}: a collective needs {_LEAST} ranks"
        )
    kept = tuple(
        rank for rank in range(prod(size for _, size in grid)) if rank // stride % size not in lost_coordinates
    )
    return tuple((name, left if name == names[axis] else count) for name, count in grid), kept


def reschedule(
    state: JobState, policy: Policy, topology: Topology, cut: Collection[str] = ()
) -> Rescheduled | Impossible:
    """Return the next placement of a job whose lost hosts are known.

    Raises nothing: a job that cannot be placed gets an `Impossible` with the reason.
    """
    lost = [rank for rank, name in enumerate(state.ranks) if host_of(name) in state.lost_hosts]
    if state.cause == "storage":
        return Impossible(reason=f"{state.reason}: without its storage the job has no checkpoint to restart from")
    if not lost or policy.restart == "same":
        unchanged = tuple(range(len(state.ranks)))
        return Rescheduled(grid=state.grid, ranks=state.ranks, spares=state.spares, origins=unchanged)
    if policy.restart == "spare":
        placed = _on_spares(state, topology, lost, cut)
        if placed is not None:
            return placed
        if policy.without_spare == "fail":
            names = ", ".join(state.ranks[rank] for rank in lost)
            shortage = f"{len(state.spares)} spares are left for {names}, and without_spare is fail"
            return Impossible(reason=f"{state.reason}; {shortage}")
    return _shrunk(state, lost)


def _on_spares(state: JobState, topology: Topology, lost: Sequence[int], cut: Collection[str]) -> Rescheduled | None:
    ranks, spares = list(state.ranks), list(state.spares)
    for rank in lost:
        spare = choose_spare(topology, ranks[rank], spares, cut)
        if spare is None:
            return None
        spares.remove(spare)
        ranks[rank] = spare
    return Rescheduled(
        grid=state.grid, ranks=tuple(ranks), spares=tuple(spares), origins=tuple(range(len(state.ranks)))
    )


def _shrunk(state: JobState, lost: Sequence[int]) -> Rescheduled | Impossible:
    try:
        grid, kept = shrunk_grid(state.grid, lost)
    except UsageError as error:
        return Impossible(reason=f"{state.reason}; {error}")
    # Ranks on healthy hosts that leave the job with a lost one of their group are spares from now on.
    freed = [name for rank, name in enumerate(state.ranks) if rank not in kept and rank not in lost]
    return Rescheduled(
        grid=grid,
        ranks=tuple(state.ranks[rank] for rank in kept),
        spares=(*state.spares, *freed),
        origins=kept,
    )
