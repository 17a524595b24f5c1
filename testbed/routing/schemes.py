"""Routing schemes: how a switch chooses among equal-cost next hops. Pure.

    ecmp            hash of the 5-tuple: every packet of a queue pair takes one path (RFC 2992)
    e-ecmp          hash of the destination queue pair in the BTH, unaffected by source ports of low entropy
    static-parity   odd-numbered destination hosts by the first half of the next hops, even-numbered ones by the second
    pinned          a next hop for each slice of a rack's RNICs, whichever host sends
    spray           every packet by the next hop in turn
    weighted        hash of the 5-tuple into shares of unequal size
    resilient       hash of the 5-tuple into buckets; a dead next hop moves its own buckets and no other one
    te              the uplink that traffic engineering has chosen for the source RNIC and the destination host;
                    elsewhere ECMP. A controller places the flows again when links fail or return

If a static next hop is dead, ECMP over the live ones replaces it: the table of that next hop has lost the route.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology
from faultbed.testbed.packets.bth import ROCE_PORT
from faultbed.testbed.routing.jenkins_hash import nft_jhash
from faultbed.testbed.suggestions import nearest

__all__ = ["SCHEMES", "Choice", "Flow", "Routing", "Scheme", "bucket_counts", "scheme_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The traffic of one queue pair. `src` and `dst` are RNICs (`host1:rxe0`)."""

    src: str
    dst: str
    size_bytes: float
    src_port: int
    dst_qpn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A scheme's parameters.

    Attributes:
        seed: seed of the hash of queue pairs. All switches share it, so two tiers choose alike (hash polarisation).
        hash_seeds: seed of the hash of the 5-tuple, by switch (`Inventory.hash_seed`); other switches have `seed`.
        weights: `weighted`: share of each next hop, by the name of its link; other links have 1.
        buckets: `resilient`: number of buckets of a next-hop group.
        uplinks: `te`: name of the uplink of each source RNIC and destination host (`placement_of_flows`).
    """

    seed: int = 1
    hash_seeds: Mapping[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    buckets: int = 128
    uplinks: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Inputs of a switch's choice of a next hop.

    Attributes:
        topology: the lab.
        switch: that decides.
        routing: parameters of the scheme.
        flow: the queue pair.
        hops: next hops of a healthy fabric, in the order of the inventory.
        alive: next hops that are up.
    """

    topology: Topology
    switch: str
    routing: Routing
    flow: Flow
    hops: Sequence[Link]
    alive: Sequence[Link]


Shares = tuple[tuple[Link, float], ...]
"""Next hops of one flow with the fraction of its bytes that each carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A rule that chooses among next hops.

    Attributes:
        name: the name in an experiment.
        summary: one line for people.
        is_static: whether the choice depends on the placement only: two runs on one placement load the links alike.
        choose: shares of a flow over the live next hops.
        parameters: its parameters, by their names in `[fabric]` of an experiment.
        fidelity: how real the scheme is on a soft lab.
        marks: nftables expression that draws a next hop's number for each packet, with `{hops}` and `{seed}`; empty:
            packets are not marked.
        is_per_packet: whether packets of one queue pair get different marks.
        shares: the attribute of the kernel's next-hop group with the shares; None: the kernel's hash does not choose.
        is_placed: whether the choice depends on demands and live links, so that a controller has to follow them.
    """

    name: str
    summary: str
    is_static: bool
    choose: Callable[[Choice], Shares]
    parameters: tuple[str, ...] = ()
    fidelity: Literal["real", "emulated"] = "real"
    marks: str = ""
    is_per_packet: bool = False
    shares: Literal["weights", "buckets"] | None = None
    is_placed: bool = False

    @property
    def has_tables(self) -> bool:
        """Whether switches need tables of their own for it; BGP's are enough for plain ECMP."""
        return self.is_static or bool(self.marks) or self.shares is not None


def scheme_named(name: str) -> Scheme:
    """Return a scheme that labs apply.

    Raises:
        UsageError: no scheme has this name.
    """
    if name not in SCHEMES:
        near = nearest(name, SCHEMES)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(SCHEMES)}"
        raise UsageError(f'routing: no scheme is called "{name}"; {hint}')
    return SCHEMES[name]


def _ecmp(choice: Choice) -> Shares:
    return _all_on(choice.alive[int(_tuple_hash(choice) * len(choice.alive))])


def _e_ecmp(choice: Choice) -> Shares:
    # A mark is set for each next hop of the healthy fabric; the table of a dead one is empty.
    mark = nft_jhash(choice.flow.dst_qpn.to_bytes(3, "big"), modulus=len(choice.hops), seed=choice.routing.seed)
    return _static(choice, choice.hops[mark])


def _static_parity(choice: Choice) -> Shares:
    host, _, rnic = choice.flow.dst.partition(":")
    number = 1 + [host_entry.name for host_entry in choice.topology.hosts].index(host)
    half = (len(choice.hops) + 1) // 2
    half_hops = choice.hops[:half] if number % 2 or len(choice.hops) == 1 else choice.hops[half:]
    order = [rnic_entry.name for rnic_entry in choice.topology.host_by_name[host].rnics].index(rnic)
    return _static(choice, half_hops[order % len(half_hops)])


def _pinned(choice: Choice) -> Shares:
    rack = choice.topology.host_by_name[choice.flow.dst.partition(":")[0]].rack
    slices = [f"{host.name}:{rnic.name}" for host in choice.topology.hosts if host.rack == rack for rnic in host.rnics]
    return _static(choice, choice.hops[slices.index(choice.flow.dst) % len(choice.hops)])


def _spray(choice: Choice) -> Shares:
    # The marks name the next hops of the healthy fabric in turn. Packets of a dead one take BGP's ECMP.
    share, (fallback, _) = 1 / len(choice.hops), _ecmp(choice)[0]
    dead = sum(link not in choice.alive for link in choice.hops)
    return tuple((link, share * (1 + dead if link == fallback else 1)) for link in choice.hops if link in choice.alive)


def _weighted(choice: Choice) -> Shares:
    weights = [choice.routing.weights.get(link.name, 1.0) for link in choice.alive]
    remaining = _tuple_hash(choice) * sum(weights)
    for link, weight in zip(choice.alive, weights, strict=True):
        remaining -= weight
        if remaining < 0:
            return _all_on(link)
    return _all_on(choice.alive[-1])


def _resilient(choice: Choice) -> Shares:
    bucket = int(_tuple_hash(choice) * choice.routing.buckets)
    counts = bucket_counts(choice.routing.buckets, len(choice.hops))
    link = next(hop for hop, end in zip(choice.hops, accumulate(counts), strict=True) if bucket < end)
    return _all_on(link if link in choice.alive else choice.alive[bucket % len(choice.alive)])


def _te(choice: Choice) -> Shares:
    name = choice.routing.uplinks.get((choice.flow.src, choice.flow.dst.partition(":")[0]))
    # Links in parallel between the same two switches share a name, and are one next hop as long as one of them is up.
    links = [link for link in choice.alive if link.name == name]
    return tuple((link, 1 / len(links)) for link in links) if links else _ecmp(choice)


def bucket_counts(buckets: int, hops: int) -> tuple[int, ...]:
    """Return how many buckets of a resilient group each of its next hops has.

    The kernel rounds the end of each next hop's buckets to the closest number (`nh_res_group_rebalance` in
    net/ipv4/nexthop.c). Next hops get none if there are fewer buckets than next hops.
    """
    ends = [(buckets * number + hops // 2) // hops for number in range(hops + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def _all_on(link: Link) -> Shares:
    return ((link, 1.0),)


def _static(choice: Choice, link: Link) -> Shares:
    return _all_on(link) if link in choice.alive else _ecmp(choice)


def _tuple_hash(choice: Choice) -> float:
    """Return a number in [0, 1) that is drawn by the 5-tuple. Linux and ASICs have other hashes, equally even."""
    addresses = [_address(choice.topology, name) for name in (choice.flow.src, choice.flow.dst)]
    seed = choice.routing.hash_seeds.get(choice.switch, choice.routing.seed)
    key = "|".join([*addresses, "17", str(choice.flow.src_port), str(ROCE_PORT), str(seed)])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest()) / 2**48


def _address(topology: Topology, rnic: str) -> str:
    host, _, name = rnic.partition(":")
    return next(rnic_entry.ip for rnic_entry in topology.host_by_name[host].rnics if rnic_entry.name == name)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="ecmp", summary="hash of the 5-tuple", is_static=False, choose=_ecmp),
        Scheme(
            name="e-ecmp",
            summary="hash of the destination queue pair",
            is_static=False,
            choose=_e_ecmp,
            parameters=("qp_hash_seed",),
            fidelity="emulated",  # the hash is ours, an ASIC has another one
            marks="jhash @th,104,24 mod {hops} seed {seed:#x}",
        ),
        Scheme(name="static-parity", summary="odd and even hosts by halves", is_static=True, choose=_static_parity),
        Scheme(name="pinned", summary="a next hop for each slice of a rack", is_static=True, choose=_pinned),
        Scheme(
            name="spray",
            summary="every packet by the next hop in turn",
            is_static=True,
            choose=_spray,
            marks="numgen inc mod {hops}",
            is_per_packet=True,
        ),
        Scheme(
            name="weighted",
            summary="hash of the 5-tuple, unequal shares",
            is_static=False,
            choose=_weighted,
            parameters=("weights",),
            shares="weights",
        ),
        Scheme(
            name="resilient",
            summary="hash of the 5-tuple into buckets",
            is_static=False,
            choose=_resilient,
            parameters=("buckets",),
            shares="buckets",
        ),
        Scheme(
            name="te",
            summary="the uplink that traffic engineering chose",
            is_static=True,
            choose=_te,
            parameters=("cycle", "backdoor", "demand"),
            is_placed=True,
        ),
    )
}
"""Every scheme that labs apply, by its name."""
