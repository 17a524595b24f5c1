"""Rates of a lab's links: the speed of each by its tier, and how a soft lab shapes its switch ports for it. Pure.

A tier is named by the lower end of its links: `host` (host to rack switch), `rtsw` (rack switch to spine) or `ctsw`
(spine to aggregation). The inventory gives the speed of its links, or its taper, from which the speed is computed. The
taper is the capacity of the links below a switch divided by the capacity of its uplinks: 1 is full bisection; Meta
reports 2.8 and 7 (arXiv 2510.20171, 2407.21783).

A soft lab divides all speeds by `rate_scale` and shapes the ports of its switches. Delays and queues are not scaled.
The port of a host is never shaped, because a drop there breaks the queue pair (rxe_net.c, rxe_send).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from faultbed.testbed.inventory.schema import LabVars, TierVars, mistake
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Link, Port, Topology

__all__ = ["LEAST_RATE_BPS", "MOST_RATE_BPS", "Shape", "check_queue", "plain_shapes", "shapes_of", "with_speeds"]

MOST_RATE_BPS = 100_000_000
"""Maximum rate of a link, below the emulation's capacity: 117 Mb/s over all links together (docs/numbers.md)."""
LEAST_RATE_BPS = 500_000
"""At this rate one packet of 4200 bytes takes 67 ms, as long as the shortest retransmission timeout that we use."""
DEEP_PACKETS = 10_000
"""Size of a queue if none is given: more than all queue pairs of a lab have in flight (rxe: 64 packets each)."""
MOST_DELAY_US = 500_000
_TAPER_TOLERANCE = 0.01

_Tier = Literal["host", "rtsw", "ctsw"]
_TIERS: tuple[_Tier, ...] = ("host", "rtsw", "ctsw")
_LINKS = {
    "host": "links to hosts",
    "rtsw": "uplinks of rack switches to spines",
    "ctsw": "uplinks of spines to aggregation switches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The rate, queue and delay of what a port sends.

    `rate_bps` is in bits per second; None: no limit. `packets` is the size of the queue, including the packets that are
    being delayed. Each packet is sent `delay_us` later.
    """

    rate_bps: int | None
    packets: int
    delay_us: int


def plain_shapes(shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, dict[str, dict[str, int | None]]]:
    """Return shapes by switch and port, in the format for Ansible."""
    return {switch: {port: asdict(shape) for port, shape in ports.items()} for switch, ports in shapes.items()}


def with_speeds(topology: Topology, lab: LabVars, file: Path) -> Topology:
    """Return the topology with the speed of its tier for each link that has no speed of its own.

    Raises:
        ConfigError: a tier has no links, or its taper is not what the cabling gives; the message names the place.
    """
    if lab.tiers is None:
        return topology
    speeds = {link.name: link.a.speed_gbps or link.b.speed_gbps for link in topology.links}
    for name in _TIERS:
        tier: TierVars | None = getattr(lab.tiers, name)
        if tier is None:
            continue
        place = f"all.tiers.{name}"
        _check_tier(tier, place, file)
        links = [link for link in topology.links if _tier_of(topology, link) == name]
        if not links:
            raise mistake(file, place, f"this lab has no {_LINKS[name]}; add them at both ends, or remove the tier")
        if tier.speed_gbps is not None:
            speeds |= {link.name: speeds[link.name] or tier.speed_gbps for link in links}
        if tier.taper is not None:
            if name == "host":
                raise mistake(file, f"{place}.taper", "hosts have no links below them; give speed_gbps instead")
            _taper(topology, name, tier.taper, speeds, file)
    return replace(
        topology,
        links=tuple(
            replace(
                link,
                a=replace(link.a, speed_gbps=link.a.speed_gbps or speeds[link.name]),
                b=replace(link.b, speed_gbps=link.b.speed_gbps or speeds[link.name]),
            )
            for link in topology.links
        ),
    )


def _check_tier(tier: TierVars, place: str, file: Path) -> None:
    for name, value in (("speed_gbps", tier.speed_gbps), ("taper", tier.taper)):
        if value is not None and not 0 < value < math.inf:
            raise mistake(file, f"{place}.{name}", f"must be above 0, not {value:g}")
    check_queue(file, place, queue_kib=tier.queue_kib, delay_us=tier.delay_us)


def check_queue(file: Path, place: str, *, queue_kib: int | None, delay_us: int | None) -> None:
    """Reject a queue of less than 1 KiB and a delay outside of 0 to `MOST_DELAY_US`.

    Raises:
        ConfigError: one is rejected; the message names the place.
    """
    if queue_kib is not None and queue_kib < 1:
        raise mistake(file, f"{place}.queue_kib", f"must be above 0, not {queue_kib}")
    if delay_us is not None and not 0 <= delay_us <= MOST_DELAY_US:
        raise mistake(file, f"{place}.delay_us", f"must be 0 to {MOST_DELAY_US}, not {delay_us}")


def _taper(topology: Topology, tier: _Tier, taper: float, speeds: dict[str, float | None], file: Path) -> None:
    """Set the missing speeds of a tier's uplinks from the taper. If none is missing, compare the taper with them."""
    place = f"all.tiers.{tier}.taper"
    for switch in topology.switches:
        if switch.role != tier:
            continue
        links = topology.links_of(switch.name)
        above = [link for link in links if link.is_uplink and _is_above(topology, link, switch.name)]
        below = [link for link in links if not link.is_uplink or (link.b.node == switch.name)]
        if not above or not below:
            side = "uplinks" if not above else "links below it"
            raise mistake(file, place, f"{switch.name} has no {side}, so it cannot have a taper; add them")
        down = 0.0
        for link in below:
            speed = speeds[link.name]
            if speed is None:
                lower = f"all.tiers.{_tier_of(topology, link)}"
                raise mistake(file, place, f"the speed of {link.name}, below it, is not known; set {lower}.speed_gbps")
            down += speed
        unknown = [link for link in above if speeds[link.name] is None]
        up = sum(speeds[link.name] or 0.0 for link in above)
        each_gbps = (down / taper - up) / len(unknown) if unknown else 0.0
        if (unknown and each_gbps <= 0) or (not unknown and abs(down / up / taper - 1) > _TAPER_TOLERANCE):
            problem = (
                f"{taper:g}, but {switch.name} has {down:g} Gb/s below it and {up:g} Gb/s of uplinks, a taper of "
                f"{down / up:.3g}"
            )
            raise mistake(file, place, f"{problem}; change the taper, or speed_gbps or number of its uplinks")
        speeds |= {link.name: each_gbps for link in unknown}


def _is_above(topology: Topology, link: Link, switch: str) -> bool:
    """Return whether a link leads from a switch to one of a higher role."""
    roles = topology.switch_by_name
    return link.a.node == switch and roles[link.b.node].role != roles[switch].role


def _tier_of(topology: Topology, link: Link) -> str:
    return topology.switch_by_name[link.a.node].role if link.is_uplink else "host"


def shapes_of(topology: Topology, lab: LabVars, file: Path) -> dict[str, dict[str, Shape]]:
    """Return the shapes of a soft lab's ports, by switch and port; empty without a `rate_scale`.

    Raises:
        ConfigError: the emulation does not support a rate, a soft lab lacks the `rate_scale` for its tiers, queues or
            delays, or a rack lab has a `rate_scale`, a queue or a delay; the message names the place.
    """
    if not traits_of(lab.kind).is_emulated or lab.rate_scale is None:
        _refuse_shaping(topology, lab, file)
        return {}
    if not 0 < lab.rate_scale < math.inf:
        raise mistake(file, "all.rate_scale", f"must be above 0, not {lab.rate_scale:g}")
    shapes: dict[str, dict[str, Shape]] = {}
    for link, port in _switch_ports(topology):
        tier: TierVars = getattr(lab.tiers, _tier_of(topology, link), None) or TierVars()
        queue_kib = tier.queue_kib if port.queue_kib is None else port.queue_kib
        delay_us = tier.delay_us if port.delay_us is None else port.delay_us
        if port.speed_gbps is None and queue_kib is None and delay_us is None:
            continue
        rate_bps = _rate_bps(link, port, lab.rate_scale, file)
        # The limit of netem includes the packets that it is delaying (sch_netem.c, netem_enqueue).
        on_the_way = math.ceil((rate_bps or MOST_RATE_BPS) * (delay_us or 0) / 1e6 / 8 / lab.mtu)
        packets = DEEP_PACKETS if queue_kib is None else max(1, queue_kib * 1024 // lab.mtu)
        shape = Shape(rate_bps=rate_bps, packets=packets + on_the_way, delay_us=delay_us or 0)
        shapes.setdefault(port.node, {})[port.netdev] = shape
    if any(shape.rate_bps for ports in shapes.values() for shape in ports.values()):
        _require_host_rates(topology, file)
    return shapes


def _require_host_rates(topology: Topology, file: Path) -> None:
    """Reject a lab whose uplinks have rates and whose hosts have none: nothing would limit what the hosts send."""
    for link in topology.links:
        if not link.is_uplink and link.a.speed_gbps is None:
            problem = f"{link.name} has no speed, but other links do, so emulated CPUs would limit its rate"
            raise mistake(file, "all.tiers.host.speed_gbps", f"{problem}; give it one")


def _rate_bps(link: Link, port: Port, scale: float, file: Path) -> int | None:
    if port.speed_gbps is None:
        return None
    rate_bps = 8 * round(port.speed_gbps * 1e9 / scale / 8)  # the kernel counts whole bytes
    problem = f"{link.name} has {port.speed_gbps:.4g} Gb/s, which becomes {rate_bps / 1e6:.3g} Mb/s"
    if rate_bps > MOST_RATE_BPS:
        least = math.ceil(port.speed_gbps * 1e9 / MOST_RATE_BPS)
        limit = f"more than the {MOST_RATE_BPS / 1e6:g} Mb/s that the emulation carries"
        raise mistake(file, "all.rate_scale", f"{problem}, {limit}; make it {least} or more")
    if rate_bps < LEAST_RATE_BPS:
        most = math.floor(port.speed_gbps * 1e9 / LEAST_RATE_BPS)
        limit = f"less than the {LEAST_RATE_BPS / 1e6:g} Mb/s at which sending one packet takes as long as a timeout"
        raise mistake(file, "all.rate_scale", f"{problem}, {limit}; make it {most} or less")
    return rate_bps


def _switch_ports(topology: Topology) -> Iterator[tuple[Link, Port]]:
    """Yield every switch port with its link."""
    for link in topology.links:
        yield link, link.a
        if link.is_uplink:
            yield link, link.b


def _refuse_shaping(topology: Topology, lab: LabVars, file: Path) -> None:
    """Reject `rate_scale`, queues and delays on a rack; on a soft lab, reject tiers, queues and delays without one."""
    if traits_of(lab.kind).is_emulated:
        if lab.tiers is not None or any(port.queue_kib or port.delay_us for _, port in _switch_ports(topology)):
            raise mistake(file, "all.rate_scale", "is missing; the lab needs it to give the links their rates")
        return
    if lab.rate_scale is not None:
        raise mistake(
            file, "all.rate_scale", "applies only to soft labs, a rack's links have their real rates; remove it"
        )
    places = {f"all.tiers.{name}": getattr(lab.tiers, name, None) for name in _TIERS}
    places |= {f"{port.node}:{port.netdev}": port for _, port in _switch_ports(topology)}
    for place, shaping in places.items():
        for name in ("queue_kib", "delay_us"):
            if getattr(shaping, name, None) is not None:
                problem = "applies only to soft labs, a rack has its own fibres and queues"
                raise mistake(file, f"{place}.{name}", f"{problem}; remove it")
