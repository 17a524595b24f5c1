"""Preset fabrics: their arrays equal the scalar functions of a lab's topology on small random fabrics."""

import numpy as np
import pytest

from faultbed.harness.model.preset_fabric import PRESETS, PresetFabric, preset_named
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Host, Link, Port, Rnic, Switch, Topology
from faultbed.testbed.routing.link_arrays import link_arrays, path_of_flow
from faultbed.testbed.routing.max_min import loads_of_paths, max_min_rates, merged
from faultbed.testbed.routing.offered_load import Fabric
from faultbed.testbed.routing.schemes import Flow, Routing, scheme_named


def port(node, name, gbps=None):
    return Port(node=node, netdev=name, mac="", address=None, speed_gbps=gbps)


def topology_of(fabric):
    """Return a preset fabric as the topology of a lab, with a host of one RNIC for each GPU."""
    hosts, switches, links = [], [], []
    above = fabric.gbps * fabric.racks / fabric.taper / fabric.uplinks_of_ctsw
    for zone in range(fabric.zones):
        for number in range(fabric.ctsws):
            name = f"c{zone}.{number}"
            switches.append(
                Switch(name=name, role="ctsw", zone=f"z{zone}", rack=None, asn=1, loopback="", carrier=None)
            )
            links += [
                Link(a=port(name, f"up{at}", above), b=port(f"a{number}.{at}", name, above), rnic=None)
                for at in range(fabric.uplinks_of_ctsw)
            ]
        for rack in range(zone * fabric.racks, (zone + 1) * fabric.racks):
            leaf = f"r{rack}"
            switches.append(
                Switch(name=leaf, role="rtsw", zone=f"z{zone}", rack=f"rack{rack}", asn=1, loopback="", carrier=None)
            )
            links += [
                Link(a=port(leaf, f"up{at}", fabric.gbps), b=port(f"c{zone}.{at}", leaf, fabric.gbps), rnic=None)
                for at in range(fabric.ctsws)
            ]
            for slot in range(fabric.gpus_per_rack):
                name = f"h{rack * fabric.gpus_per_rack + slot}"
                rnic = Rnic(name="x", netdev="x", mac="", address=f"10.{zone}.{rack}.{slot + 1}/31")
                hosts.append(
                    Host(
                        name=name,
                        zone=f"z{zone}",
                        rack=f"rack{rack}",
                        rnics=(rnic,),
                        gpus=(),
                        front_end_netdev="",
                        front_end_mac="",
                        front_end_address="10.0.0.1/24",
                    )
                )
                links.append(Link(a=port(leaf, name, fabric.gbps), b=port(name, "x", fabric.gbps), rnic="x"))
    for number in range(fabric.ctsws):
        for at in range(fabric.uplinks_of_ctsw):
            name = f"a{number}.{at}"
            switches.append(Switch(name=name, role="atsw", zone="z0", rack=None, asn=1, loopback="", carrier=None))
    return Topology(hosts=tuple(hosts), switches=tuple(switches), links=tuple(links))


def drawn(rng):
    zones, racks, ctsws = (int(rng.integers(*bounds)) for bounds in ((1, 4), (1, 4), (1, 4)))
    return PresetFabric(
        name="small", zones=zones, racks=racks, ctsws=ctsws, atsws=int(rng.integers(1, 4)), gpus_per_rack=4,
        taper=float(rng.uniform(1, 3)) if racks > 3 else 1.0,
    )  # fmt: skip


def scalar_rates(topology, scheme, ends, ports):
    arrays = link_arrays(topology, rate_scale=None, host_bytes_per_s=np.inf, local_bytes_per_s=np.inf)
    fabric = Fabric.of(topology, scheme_named(scheme), Routing())
    paths = [
        path_of_flow(
            fabric, arrays, Flow(src=f"h{src}:x", dst=f"h{dst}:x", size_bytes=1, src_port=sport, dst_qpn=sport)
        )
        for (src, dst), sport in zip(ends, ports, strict=True)
    ]
    entries = [(flow, link, share) for flow, path in enumerate(paths) for link, share in path]
    rates = max_min_rates(merged(*zip(*entries, strict=True), units=len(paths)), arrays.capacity)
    return rates, [[arrays.directions[link] for link, _ in path] for path in paths]


def choice(walk, tier):
    """Return the number of the uplink that a switch of a tier chose; 0 if the flow does not cross the tier."""
    from_kind, to_kind = tier.split(":")
    for link, sender in walk:
        far = link.split(":")[1]
        if sender[0] == from_kind and far[0] == to_kind and link.startswith(sender):
            return int(far.split(".")[1])
    return 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scheme", ["pinned", "ecmp"])
def test_arrays_rates_equal_the_scalar_functions(seed, scheme):
    rng = np.random.default_rng(seed)
    fabric = drawn(rng)
    if fabric.gpus < 2:
        pytest.skip("one GPU sends nothing")
    ends = [tuple(int(gpu) for gpu in rng.choice(fabric.gpus, size=2, replace=False)) for _ in range(30)]
    ports = [int(number) for number in rng.integers(1 << 14, 1 << 16, size=30)]
    rates, walks = scalar_rates(topology_of(fabric), scheme, ends, ports)
    src, dst = (np.array(column) for column in zip(*ends, strict=True))
    if scheme == "pinned":
        hops = fabric.pinned_hops(src, dst)
    else:  # the arrays take the choices that the hash made
        up, above = (np.array([choice(walk, tier) for walk in walks]) for tier in ("r:c", "c:a"))
        hops = fabric.hops(src, dst, up=up, above=above)
    assert (hops >= 0).sum(axis=1).tolist() == [len(walk) for walk in walks]
    assert max_min_rates(loads_of_paths(hops), fabric.capacity) == pytest.approx(rates, rel=1e-9)


def test_presets_have_the_published_sizes():
    assert {name: preset.gpus for name, preset in PRESETS.items()} == {
        "llama3-24k": 24_576,
        "meta-32k": 32_256,
        "meta-32k-208": 26_624,
        "meta-32k-256": 32_768,
    }


@pytest.mark.parametrize("taper", [1.0, 2.8, 7.0])
def test_taper_is_capacity_below_over_capacity_above(taper):
    fabric = preset_named("llama3-24k", taper=taper)
    below = fabric.racks * fabric.ctsws * fabric.gbps
    above = fabric.capacity[-1] * 8 / 1e9 * fabric.uplinks_of_ctsw * fabric.ctsws
    assert below / above == pytest.approx(taper)
    assert len(fabric.capacity) == fabric.links


def test_taper_across_zones_leaves_a_seventh_of_the_rate():
    """All GPUs of a zone send to the next zone on pinned paths of equal load: each gets 1/7 of its RNIC."""
    fabric = PresetFabric(name="even", zones=2, racks=28, ctsws=16, atsws=4, taper=7.0)
    src = np.arange(fabric.gpus // 2)
    piece = src % 16
    hops = fabric.hops(src, src + fabric.gpus // 2, up=piece, above=src // 16 % 4)
    assert max_min_rates(loads_of_paths(hops), fabric.capacity) == pytest.approx(50e9 / 7)


@pytest.mark.parametrize("taper", [0.5, float("nan"), 1e9, -1.0])
def test_preset_impossible_taper_is_refused(taper):
    with pytest.raises(UsageError, match="must be 1 to 192"):
        preset_named("llama3-24k", taper=taper)


def test_preset_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean llama3-24k"):
        preset_named("lama3-24k")
