"""Rates of links: speeds by tier and taper, shapers of a soft lab's switch ports, and refusals."""

import copy
import dataclasses
import itertools
import json

import pytest
import yaml

from faultbed.testbed.backends.soft import snapshot_key
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory import ansible_listing
from faultbed.testbed.inventory.audit import audit
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.inventory.rates import MOST_RATE_BPS, Shape, plain_shapes
from faultbed.testbed.inventory.soft_presets import PRESETS, _tree
from faultbed.testbed.preflight.checks import expected_next_hops, run_checks
from faultbed.testbed.preflight.collect import parse
from faultbed.testbed.shipped import inventories

ZONES = _tree(PRESETS["soft-zones"])
SCALE = PRESETS["soft-zones"].rates["rate_scale"]


@pytest.fixture
def changed(tmp_path):
    """Write a changed soft-zones inventory and return its path. An edit gets groups and lab-wide variables."""

    def change(edit):
        tree = copy.deepcopy(ZONES)
        edit(tree["all"]["children"], tree["all"]["vars"])
        path = tmp_path / "lab.yml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return change


def tier(variables, name):
    return variables["faultbed_tiers"][name]


def switch(groups, role, name):
    return groups["switches"]["children"][role]["hosts"][name]


@pytest.mark.parametrize("taper", [1, 2.8, 7])
def test_taper_decides_the_rate_of_the_uplinks(changed, taper):
    lab = load(changed(lambda _, variables: tier(variables, "ctsw").update(taper=taper)))
    for spine in ("ctsw1", "ctsw2", "ctsw3", "ctsw4"):
        ports = lab.shapes[spine]
        down = sum(ports[name].rate_bps for name in ports if name.startswith("rtsw"))
        up = sum(ports[name].rate_bps for name in ports if name.startswith("atsw"))
        assert down / up == pytest.approx(taper, rel=1e-4)
    assert lab.shapes["atsw1"]["ctsw1"] == lab.shapes["ctsw1"]["atsw1"]


def test_rates_shape_every_switch_port_and_no_host_port(changed):
    lab = load(changed(lambda _g, _v: None))
    assert set(lab.shapes) == {switch.name for switch in lab.topology.switches}
    for link in lab.topology.links:
        assert link.a.netdev in lab.shapes[link.a.node]
        assert (link.b.netdev in lab.shapes.get(link.b.node, {})) == link.is_uplink


def test_rates_of_a_port_override_those_of_its_tier(changed):
    def edit(groups, variables):
        tier(variables, "host").update(queue_kib=64, delay_us=2000)
        switch(groups, "rtsw", "rtsw1")["faultbed_ports"][0].update(speed_gbps=200, queue_kib=42, delay_us=0)

    lab = load(changed(edit))
    own, of_tier = lab.shapes["rtsw1"]["host1-rxe0"], lab.shapes["rtsw1"]["host1-rxe1"]
    assert own == Shape(rate_bps=round(200e9 / SCALE), packets=42 * 1024 // 4200, delay_us=0)
    on_the_way = -(-of_tier.rate_bps * 2000 // (8 * 4200 * 1_000_000))
    assert of_tier == Shape(rate_bps=round(400e9 / SCALE), packets=64 * 1024 // 4200 + on_the_way, delay_us=2000)


def test_labs_without_rates_are_not_shaped():
    for name in ("soft", "soft-mini", "soft-3rack", "rack-h100.example"):
        assert load(inventories() / f"{name}.yml").shapes == {}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda g, v: v.pop("faultbed_rate_scale"), "all.rate_scale: is missing"),
        (lambda g, v: v.update(faultbed_rate_scale=-1), "all.rate_scale: must be above 0, not -1"),
        (
            lambda g, v: v.update(faultbed_rate_scale=1000),
            (
                "all.rate_scale: rtsw1:host1:rxe0 has 400 Gb/s, which becomes 400 Mb/s, more than the "
                f"{MOST_RATE_BPS // 10**6} Mb/s that the emulation carries; make it {4 * 10**11 // MOST_RATE_BPS} or"
            ),
        ),
        (
            lambda g, v: v.update(faultbed_tiers={"rtsw": {"speed_gbps": 400}, "ctsw": {"speed_gbps": 400}}),
            "all.tiers.host.speed_gbps: rtsw1:host1:rxe0 has no speed, but other links do",
        ),
        (lambda g, v: v.update(faultbed_rate_scale=10**9), "less than the 0.5 Mb/s at which sending one packet"),
        (
            lambda g, v: tier(v, "ctsw").update(speed_gbps=400),
            (
                "all.tiers.ctsw.taper: 2.8, but ctsw1 has 800 Gb/s below it and 800 Gb/s of uplinks, a taper of 1; "
                "change the taper, or speed_gbps or number of its uplinks"
            ),
        ),
        (
            lambda g, v: [port.update(speed_gbps=800) for port in switch(g, "rtsw", "rtsw1")["faultbed_ports"][2:3]],
            "all.tiers.rtsw.taper: 1, but rtsw1 has 800 Gb/s below it and 800 Gb/s of uplinks, a taper of 1;",
        ),
        (
            lambda g, v: [
                g["switches"]["children"].pop("atsw"),
                *(
                    host.update(faultbed_ports=[x for x in host["faultbed_ports"] if x["peer"].startswith("rtsw")])
                    for host in g["switches"]["children"]["ctsw"]["hosts"].values()
                ),
            ],
            "all.tiers.ctsw: this lab has no uplinks of spines to aggregation switches; add them at both ends",
        ),
        (lambda g, v: v["faultbed_tiers"].pop("host"), "all.tiers.rtsw.taper: the speed of rtsw1:host1:rxe0"),
        (lambda g, v: tier(v, "host").update(taper=2), "all.tiers.host.taper: hosts have no links below them"),
        (lambda g, v: tier(v, "ctsw").update(taper=0), "all.tiers.ctsw.taper: must be above 0, not 0"),
        (lambda g, v: tier(v, "ctsw").update(queue_kib=0), "all.tiers.ctsw.queue_kib: must be above 0, not 0"),
        (lambda g, v: tier(v, "ctsw").update(delay_us=-5), "all.tiers.ctsw.delay_us: must be 0 to 500000, not -5"),
        (
            lambda g, v: switch(g, "atsw", "atsw1")["faultbed_ports"][0].update(queue_kib=-1),
            "atsw.atsw1.ports[0].queue_kib: must be above 0, not -1",
        ),
        (lambda g, v: tier(v, "ctsw").update(tapper=1), 'tiers.ctsw: unknown key "tapper"; did you mean taper?'),
    ],
)  # fmt: skip
def test_impossible_rates_are_refused_with_their_place(changed, edit, message):
    path = changed(edit)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert message in str(error.value)
    (first, *_) = audit(path)
    assert message in f"{first.place}: {first.what}"


def test_rates_uplink_without_a_speed_gets_the_rest_of_the_taper(changed):
    def edit(groups, variables):
        tier(variables, "ctsw").update(taper=2)
        switch(groups, "ctsw", "ctsw1")["faultbed_ports"][2].update(speed_gbps=300)

    speeds = {link.name: link.a.speed_gbps for link in load(changed(edit)).topology.uplinks}
    assert (speeds["ctsw1:atsw1"], speeds["ctsw1:atsw2"]) == (300, 100)
    assert speeds["ctsw2:atsw1"] == 200


def test_rates_on_a_rack_check_the_taper_and_shape_nothing(changed, monkeypatch):
    listing = ansible_listing.listing(inventories() / "rack-h100.example.yml")
    answer = copy.deepcopy(dict(listing))

    def with_vars(**variables):
        again = copy.deepcopy(answer)
        for one in again["_meta"]["hostvars"].values():
            one.update(variables)
        monkeypatch.setattr("faultbed.testbed.inventory.lab_inventory.listing", lambda _path: again)
        return load(inventories() / "rack-h100.example.yml")

    link = load(inventories() / "rack-h100.example.yml").topology.uplinks[0]
    topology = load(inventories() / "rack-h100.example.yml").topology
    below = [link for link in topology.links_of(link.a.node) if not link.is_uplink]
    above = [link for link in topology.links_of(link.a.node) if link.is_uplink]
    taper = sum(one.a.speed_gbps for one in below) / sum(one.a.speed_gbps for one in above)
    assert with_vars(faultbed_tiers={"rtsw": {"taper": taper}}).shapes == {}
    with pytest.raises(ConfigError, match=r"all\.tiers\.rtsw\.taper: "):
        with_vars(faultbed_tiers={"rtsw": {"taper": taper * 2}})
    with pytest.raises(ConfigError, match=r"all\.rate_scale: applies only to soft labs"):
        with_vars(faultbed_rate_scale=20000)
    with pytest.raises(
        ConfigError, match=r"all\.tiers\.rtsw\.delay_us: applies only to soft labs, a rack has its own fibre"
    ):
        with_vars(faultbed_tiers={"rtsw": {"delay_us": 5}})


def test_rates_are_part_of_the_snapshot_key(changed, monkeypatch):
    class Built:
        digest = "x"

    monkeypatch.setattr(snapshot_key.vm, "qemu_version", lambda: "7")
    keys = {
        snapshot_key.key(load(changed(lambda _, v, x=x: tier(v, "ctsw").update(taper=x))), Built, "tcg") for x in (1, 7)
    }
    assert len(keys) == 2


QDISCS = """\
@@node ctsw1
@@ip
[{"ifname":"atsw1","flags":["UP","LOWER_UP"],"mtu":4200,"qdisc":"prio","address":"02:fb:07:00:01:01","addr_info":[]}][]
@@qdisc
[{"kind":"prio","handle":"1:","dev":"atsw1","root":true,"options":{"bands":2}},
{"kind":"netem","handle":"20:","dev":"atsw1","parent":"1:2","options":{"limit":10001,
"delay":{"delay":0.0005,"jitter":0,"correlation":0},"rate":{"rate":RATE,"packetoverhead":0},"ecn":false,"gap":0}},
{"kind":"clsact","handle":"ffff:","dev":"atsw1","parent":"ffff:fff1"}]
@@end
"""


def test_preflight_finds_a_shaper_that_is_gone_or_has_another_rate():
    lab = load(inventories() / "soft-zones.yml")
    wanted = lab.shapes["ctsw1"]["atsw1"]
    assert wanted.delay_us == 500
    facts = parse(QDISCS.replace("RATE", str(wanted.rate_bps // 8)))["ctsw1"].interfaces["atsw1"]
    assert facts.shape == dataclasses.replace(wanted, packets=10001)
    slower = parse(QDISCS.replace("RATE", "1000"))["ctsw1"].interfaces["atsw1"]

    def check_link(interface):
        class Only(dict):
            def __missing__(self, _name):
                return parse("@@node none\n@@end\n")["none"]

        state = Only(parse(QDISCS.replace("RATE", "1")))
        state["ctsw1"].interfaces["atsw1"] = interface
        return [wrong for wrong in run_checks(lab, state) if wrong.check == "queue"]

    assert check_link(dataclasses.replace(facts, shape=wanted)) == []
    (gone,) = check_link(dataclasses.replace(facts, shape=None, queue="noqueue"))
    assert (gone.where, gone.observed) == ("ctsw1:atsw1", "noqueue, no rate and no delay")
    (other,) = check_link(slower)
    assert "0.008 Mb/s, 500 us" in other.observed


def test_rates_are_plain_numbers_for_ansible():
    shapes = plain_shapes(load(inventories() / "soft-zones.yml").shapes)
    assert json.loads(json.dumps(shapes)) == shapes
    assert set(shapes["rtsw1"]["ctsw1"]) == {"rate_bps", "packets", "delay_us"}


def used_paths(topology, lost):
    """Return all paths from the switch that announces a host's prefix to switches that learn it, without `lost` links.

    As in the lab, BGP uses all shortest AS paths, announces the first one, and rejects paths with the own ASN.
    """
    asn = {switch.name: switch.asn for switch in topology.switches}
    peers = {
        switch.name: [
            link.other(switch.name).node
            for link in topology.links_of(switch.name)
            if link.is_uplink and link.name not in lost
        ]
        for switch in topology.switches
    }
    for origin in (switch.name for switch in topology.switches if switch.role == "rtsw"):
        best, order = {origin: [origin]}, [origin]
        for name in order:
            for peer in peers[name]:
                if asn[peer] in {asn[passed] for passed in best[name]}:
                    continue
                if peer not in best:
                    best[peer] = [*best[name], peer]
                    order.append(peer)
                if len(best[peer]) == len(best[name]) + 1:
                    yield [*best[name], peer]


def valleys(topology, lost):
    """Return the paths that go down to a lower tier and then up again."""
    level = {switch.name: ("rtsw", "ctsw", "atsw").index(switch.role) for switch in topology.switches}
    for path in used_paths(topology, lost):
        steps = [level[b] - level[a] for a, b in itertools.pairwise(path)]
        if any(before < 0 < after for before, after in itertools.pairwise(steps)):
            yield path


def test_routing_has_no_valley_when_a_link_or_spine_is_lost():
    topology = load(inventories() / "soft-zones.yml").topology
    losses = [{link.name} for link in topology.uplinks]
    losses += [
        {x.name for x in topology.links_of(switch.name) if x.is_uplink}
        for switch in topology.switches
        if switch.role != "rtsw"
    ]
    for lost in losses:
        assert list(valleys(topology, lost)) == []
        # No switch loses a rack, because each has another path up.
        origins = {path[0] for path in used_paths(topology, lost) if path[-1].startswith("rtsw")}
        assert origins == {"rtsw1", "rtsw2", "rtsw3", "rtsw4"}
    apart = dataclasses.replace(
        topology,
        switches=tuple(dataclasses.replace(one, asn=65000 + index) for index, one in enumerate(topology.switches)),
    )
    assert any(list(valleys(apart, lost)) for lost in losses)  # with an ASN for each switch there are such paths


def test_tiers_that_choose_paths_have_distinct_hash_seeds():
    """With one seed for all tiers, ctsw1 would send all flows from rtsw1 over the same uplink."""
    zones, two = load(inventories() / "soft-zones.yml"), load(inventories() / "soft.yml")
    assert len({zones.hash_seed(name) for name in ("rtsw1", "ctsw1", "atsw1")}) == 3
    assert len({zones.hash_seed(f"ctsw{number}") for number in (1, 2, 3, 4)}) == 1
    assert {two.hash_seed(switch.name) for switch in two.topology.switches} == {two.ecmp_hash_seed}


def test_switches_of_one_asn_are_not_expected_to_reach_each_other():
    topology = load(inventories() / "soft-zones.yml").topology
    result = expected_next_hops(topology, "ctsw1")
    assert "10.78.0.102" not in result  # ctsw2, of the same zone
    assert result["10.78.0.103"] == 2  # ctsw3, of the other zone, over both ATSWs
    assert expected_next_hops(topology, "rtsw1")["10.77.3.0/31"] == 2


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda g: switch(g, "rtsw", "rtsw2").update(faultbed_asn=65101), "rtsw.rtsw2.asn"),
        (lambda g: switch(g, "ctsw", "ctsw3").update(faultbed_asn=65201), "ctsw.ctsw3.asn"),
        (lambda g: switch(g, "atsw", "atsw1").update(faultbed_asn=65201), "atsw.atsw1.asn"),
    ],
    ids=["two racks", "two zones", "two roles"],
)
def test_asn_is_shared_by_spines_of_one_zone_only(changed, edit, place):
    findings = audit(changed(lambda g, _: edit(g)))
    actual = {finding.place: finding.what for finding in findings}
    assert "is already" in actual[place]


def test_asn_shared_so_that_it_hides_a_rack_is_reported(changed):
    """Spines of two planes that meet only above reject each other's announcements."""

    def edit(groups, variables):
        variables.pop("faultbed_tiers")
        variables.pop("faultbed_rate_scale")
        for rack, own in (("rtsw1", "ctsw1"), ("rtsw2", "ctsw2")):
            ports = switch(groups, "rtsw", rack)["faultbed_ports"]
            ports[:] = [port for port in ports if port["peer"] not in {"ctsw1", "ctsw2"} - {own}]
        for spine, rack in (("ctsw1", "rtsw1"), ("ctsw2", "rtsw2")):
            ports = switch(groups, "ctsw", spine)["faultbed_ports"]
            ports[:] = [port for port in ports if port["peer"] not in {"rtsw1", "rtsw2"} - {rack}]

    (finding,) = audit(changed(edit))
    assert finding.place in {"ctsw.ctsw1.asn", "ctsw.ctsw2.asn"}
    assert "so that rtsw2 never learns routes of" in finding.what
