"""Traffic engineering: which uplink each flow key takes, so that the fullest link carries as little as possible. Pure.

A key is what a switch can match: the port of a source RNIC, and the prefixes of a destination host. All packets of a
key take one uplink of the source's rack switch, and with it one spine. Where that spine is directly above the
destination's rack, it also decides over which link the key enters the rack. Keys are then the edges of a bipartite
multigraph, from racks that send to racks that receive, and a placement colours them by spines. Links above the spines
are left to ECMP and to no bound.

Equal keys are placed exactly on a healthy fabric: a bipartite multigraph always has an equitable colouring (de Werra,
"Equitable colorations of graphs", 1971), and alternating chains find it (Koenig, "Ueber Graphen und ihre Anwendung",
1916). Unequal keys are placed largest first (Graham, "Bounds on multiprocessing timing anomalies", 1969), then moved
off the fullest link, or exchanged with a smaller one on another, while that helps.

The same demands give the same placement, in whatever order they come: nothing is drawn and nothing is remembered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.valley_free import ValleyFreePaths

__all__ = ["Key", "Placement", "place"]

Key = tuple[str, str]
"""A source RNIC (`host1:rxe0`) and a destination host (`host3`)."""
_LESS = 1 - 1e-9
"""A fullest link below this share of the former one is an improvement; above it, rounding."""
_MOST_MOVES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each key goes.

    Attributes:
        uplink: name of the link by which each key leaves its rack switch. A key inside one rack needs none.
        fullest_bytes: what the fullest link between a rack and a spine carries, in either direction.
        bound_bytes: what that is at least under any placement, even if keys were divided: the bytes of a rack in one
            direction divided by its live links, for the rack with most.
        whole_bound_bytes: the same if no key is divided.
    """

    uplink: Mapping[Key, str] = field(default_factory=dict)
    fullest_bytes: float = 0.0
    bound_bytes: float = 0.0
    whole_bound_bytes: float = 0.0


def place(topology: Topology, demands: Mapping[Key, float], *, failed: frozenset[str] = frozenset()) -> Placement:
    """Return the placement of keys that have to carry `demands` bytes in the same time.

    Args:
        topology: the lab. All its links between racks and spines count as equally fast.
        demands: bytes of each key; a key of 0 bytes is placed, too.
        failed: names of links that carry nothing.

    Raises:
        UsageError: a demand is negative or not finite, or a key has no path.
    """
    for (source, destination), size_bytes in demands.items():
        if not (math.isfinite(size_bytes) and size_bytes >= 0):
            raise UsageError(f"demand from {source} to {destination}: {size_bytes:g} bytes; give 0 or more")
    fabric = _Fabric(topology, demands, failed)
    if not fabric.keys:
        return Placement()
    sizes = {size_bytes for size_bytes in fabric.sizes if size_bytes}
    if len(sizes) <= 1:
        _colour_equal(fabric, most=fabric.most_keys())
    else:
        _colour_unequal(fabric)
    bound_bytes = fabric.bound_bytes()
    whole = fabric.most_keys() * max(sizes, default=0.0) if len(sizes) <= 1 else max(bound_bytes, *sizes)
    return Placement(
        uplink=fabric.uplinks(), fullest_bytes=fabric.fullest_bytes(), bound_bytes=bound_bytes, whole_bound_bytes=whole
    )


class _Fabric:
    """The keys with their choices, and the state of a colouring.

    A slot is the links between one rack and one spine, in one direction. `slots_of[key][spine]` are the slots that a
    key fills if it takes a spine: one, or two where the spine is directly above the destination.
    """

    def __init__(self, topology: Topology, demands: Mapping[Key, float], failed: frozenset[str]) -> None:
        self._paths = ValleyFreePaths(topology, failed=failed)
        self._rack_of = {f"{link.b.node}:{link.rnic}": link.a.node for link in topology.links if not link.is_uplink}
        racks_of_host: dict[str, set[str]] = defaultdict(set)
        """Rack switches of a host's RNICs: one, unless the fabric has rails."""
        for rnic, rack in self._rack_of.items():
            racks_of_host[rnic.partition(":")[0]].add(rack)
        self.links: list[tuple[str, ...]] = []
        self._slot_number: dict[tuple[str, str, bool], int] = {}
        self._choices: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        self.keys: list[Key] = []
        self.sizes: list[float] = []
        self.slots_of: list[Mapping[str, tuple[int, ...]]] = []
        # Large keys first, because the small ones fill what is left.
        for key, size_bytes in sorted(demands.items(), key=lambda item: (-item[1], item[0])):
            source, host = key
            if source not in self._rack_of or host not in racks_of_host:
                raise UsageError(f"key {source} to {host}: this lab has no such RNIC, or no such host")
            rack, targets = self._rack_of[source], sorted(racks_of_host[host])
            if targets == [rack]:
                continue
            self.keys.append(key)
            self.sizes.append(size_bytes)
            self.slots_of.append(self._slots(key, rack, targets))
        self.spine_of: dict[int, str] = {}
        self.members: list[dict[int, None]] = [{} for _ in self.links]
        self.load: list[float] = [0.0] * len(self.links)

    def _slots(self, key: Key, rack: str, targets: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the slots of each spine between a rack and the racks of a host, in the order of the inventory.

        The links of a host whose RNICs are in several racks are chosen by the address, so that only the uplink counts.
        """
        others = [target for target in targets if target != rack]
        name = rack, " ".join(others)
        if name not in self._choices:
            choices = [self._slots_to(rack, target) for target in others]
            common = [spine for spine in choices[0] if all(spine in choice for choice in choices)]
            self._choices[name] = {
                spine: choices[0][spine] if len(choices) == 1 else choices[0][spine][:1] for spine in common
            }
        if not self._choices[name]:
            raise UsageError(
                f"key {key[0]} to {key[1]}: no spine has a live path from {rack} to {' and '.join(others)}; name fewer "
                "failed links"
            )
        return self._choices[name]

    def _slots_to(self, rack: str, target: str) -> dict[str, tuple[int, ...]]:
        names: dict[str, list[str]] = {}
        for link in self._paths.next_hops(rack, target):
            names.setdefault(link.other(rack).node, []).append(link.name)
        slots: dict[str, tuple[int, ...]] = {}
        for spine, up in names.items():
            down = [link for link in self._paths.next_hops(spine, target) if link.other(spine).node == target]
            up_slot = self._slot(rack, spine, up, is_up=True)
            names_down = [link.name for link in down]
            slots[spine] = (up_slot, self._slot(target, spine, names_down, is_up=False)) if down else (up_slot,)
        return slots

    def _slot(self, rack: str, spine: str, names: Sequence[str], *, is_up: bool) -> int:
        number = self._slot_number.setdefault((rack, spine, is_up), len(self.links))
        if number == len(self.links):
            self.links.append(tuple(names))
        return number

    def put(self, key: int, spine: str) -> None:
        """Let a key take a spine, in place of the one that it took."""
        for slot in self.slots_of[key][self.spine_of[key]] if key in self.spine_of else ():
            del self.members[slot][key]
            self.load[slot] -= self.sizes[key]
        for slot in self.slots_of[key][spine]:
            self.members[slot][key] = None
            self.load[slot] += self.sizes[key]
        self.spine_of[key] = spine

    def _by_rack(self) -> Iterator[tuple[list[int], int]]:
        """Yield the keys that leave or enter each rack, with the number of live links that they can take."""
        place_of = {slot: (rack, is_up) for (rack, _, is_up), slot in self._slot_number.items()}
        keys: dict[tuple[str, bool], list[int]] = defaultdict(list)
        usable: dict[tuple[str, bool], set[int]] = defaultdict(set)
        for key, choice in enumerate(self.slots_of):
            slots = {slot for taken in choice.values() for slot in taken}
            for place in {place_of[slot] for slot in slots}:
                keys[place].append(key)
            for slot in slots:
                usable[place_of[slot]].add(slot)
        for place, numbers in keys.items():
            yield numbers, sum(len(self.links[slot]) for slot in usable[place])

    def bound_bytes(self) -> float:
        """Return the bytes of the fullest rack, in one direction, for each of its links."""
        return max(math.fsum(self.sizes[key] for key in keys) / links for keys, links in self._by_rack())

    def most_keys(self) -> int:
        """Return how many whole keys the fullest link carries at least."""
        return max(math.ceil(sum(self.sizes[key] > 0 for key in keys) / links) for keys, links in self._by_rack())

    def uplinks(self) -> dict[Key, str]:
        """Return the uplink of each key; parallel links to one spine share its keys, the largest first."""
        chosen: dict[Key, str] = {}
        loads: dict[str, float] = defaultdict(float)
        for number, key in enumerate(self.keys):
            slot = self.slots_of[number][self.spine_of[number]][0]
            link = min(self.links[slot], key=lambda name: loads[name])
            loads[link] += self.sizes[number]
            chosen[key] = link
        return chosen

    def fullest_bytes(self) -> float:
        """Return what the fullest link carries; the links of a slot share its keys evenly, as whole as they are."""
        fullest = 0.0
        for slot, members in enumerate(self.members):
            loads = [0.0] * len(self.links[slot])
            for key in sorted(members):  # the largest first
                at = loads.index(min(loads))
                loads[at] += self.sizes[key]
            fullest = max(fullest, *loads)
        return fullest

    def by_load(self, key: int) -> list[str]:
        """Return the spines that a key can take, that with the emptiest links first."""

        def rank(spine: str) -> tuple[float, float]:
            per_link = [
                (self.load[slot] + self.sizes[key]) / len(self.links[slot]) for slot in self.slots_of[key][spine]
            ]
            return max(per_link), sum(per_link)

        return sorted(self.slots_of[key], key=rank)


def _colour_equal(fabric: _Fabric, *, most: int) -> None:
    """Place equal keys so that no link carries more than `most` of them, if chains find such a placement."""
    for key, size_bytes in enumerate(fabric.sizes):
        spines = fabric.by_load(key)
        free = [spine for spine in spines if all(_has_room(fabric, slot, most) for slot in fabric.slots_of[key][spine])]
        if free or not size_bytes:
            fabric.put(key, (free or spines)[0])
        elif (spine := _freed(fabric, key, most)) is not None:
            fabric.put(key, spine)
        else:
            fabric.put(key, spines[0])


def _has_room(fabric: _Fabric, slot: int, most: int) -> bool:
    return len(fabric.members[slot]) < most * len(fabric.links[slot])


def _freed(fabric: _Fabric, key: int, most: int) -> str | None:
    """Free the links of one spine for a key, by moving others along an alternating chain; None: no chain does."""
    at_source = [s for s, slots in fabric.slots_of[key].items() if _has_room(fabric, slots[0], most)]
    at_target = [s for s, slots in fabric.slots_of[key].items() if _has_room(fabric, slots[-1], most)]
    for wanted in at_source:
        for other in at_target:
            if _shift(fabric, fabric.slots_of[key][wanted][-1], (wanted, other), most):
                return wanted
    # The other way round: the chain begins at the source.
    for wanted in at_target:
        for other in at_source:
            if _shift(fabric, fabric.slots_of[key][wanted][0], (wanted, other), most):
                return wanted
    return None


def _shift(fabric: _Fabric, full: int, spines: tuple[str, str], most: int) -> bool:
    """Move a key from `full`, a slot of the first spine, to the second one, and repair what that overfills in turn.

    Each key is moved once at most. If the chain cannot end, everything is moved back.
    """
    moved: dict[int, str] = {}
    here, there = spines
    while True:
        key = next((k for k in fabric.members[full] if k not in moved and there in fabric.slots_of[k]), None)
        if key is None:
            for one, spine in moved.items():
                fabric.put(one, spine)
            return False
        side = fabric.slots_of[key][here].index(full)
        moved[key] = here
        fabric.put(key, there)
        # The slot from which the key came has room again. At its other end, the new spine may be too full now.
        others = [slot for at, slot in enumerate(fabric.slots_of[key][there]) if at != side]
        over = [slot for slot in others if len(fabric.members[slot]) > most * len(fabric.links[slot])]
        if not over:
            return True
        full, here, there = over[0], there, here


def _colour_unequal(fabric: _Fabric) -> None:
    """Place keys largest first, then move or exchange keys of the fullest slot while its load becomes less."""
    for key in range(len(fabric.keys)):
        fabric.put(key, fabric.by_load(key)[0])
    for _ in range(_MOST_MOVES):
        fullest = max(range(len(fabric.links)), key=lambda slot: (_per_link(fabric, slot), -slot))
        if not _relieved(fabric, fullest):
            return


def _per_link(fabric: _Fabric, slot: int) -> float:
    return fabric.load[slot] / len(fabric.links[slot])


def _relieved(fabric: _Fabric, fullest: int) -> bool:
    """Take load off a slot without filling another one as much; return whether that was possible."""
    limit = _per_link(fabric, fullest) * _LESS
    for key in sorted(fabric.members[fullest]):
        spine = fabric.spine_of[key]
        for other in fabric.slots_of[key]:
            if other != spine and _tried(fabric, [(key, other)], limit):
                return True
        for other in fabric.slots_of[key]:
            for partner in _partners(fabric, key, other) if other != spine else ():
                if _tried(fabric, [(key, other), (partner, spine)], limit):
                    return True
    return False


def _partners(fabric: _Fabric, key: int, spine: str) -> list[int]:
    """Return smaller keys that share a slot with a key once it takes a spine."""
    found = {one: None for slot in fabric.slots_of[key][spine] for one in fabric.members[slot]}
    return sorted(one for one in found if fabric.sizes[one] < fabric.sizes[key])


def _tried(fabric: _Fabric, moves: Iterable[tuple[int, str]], limit: float) -> bool:
    """Make moves if all the links that they touch carry less than `limit` afterwards; return whether they were made."""
    moves = [(key, spine) for key, spine in moves if spine in fabric.slots_of[key]]
    before = [(key, fabric.spine_of[key]) for key, _ in moves]
    touched: set[int] = set()
    for key, spine in moves:
        touched.update(fabric.slots_of[key][fabric.spine_of[key]])
        fabric.put(key, spine)
        touched.update(fabric.slots_of[key][spine])
    if all(_per_link(fabric, slot) < limit for slot in touched):
        return True
    for key, was in before:
        fabric.put(key, was)
    return False
