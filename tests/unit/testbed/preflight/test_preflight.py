"""Preflight: a healthy lab has no finding, each misconfiguration is found at its place, and outliers of the burn-in."""

import dataclasses
import json
import os
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preflight_states import INVENTORY, PLANTED, healthy, interface

from faultbed.harness.run.prepare.preflight import broken
from faultbed.testbed import shipped
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.preflight import collect
from faultbed.testbed.preflight.checks import CHECKS, expected_next_hops, run_checks, unchecked_parts
from faultbed.testbed.preflight.collect import Interface, parse, read_facts, script
from faultbed.traffic.flows import burnin
from faultbed.traffic.flows.burnin import Pair, _better, outliers, pairs_of


def test_preflight_healthy_lab_has_no_finding():
    for path in ("soft.yml", "soft-mini.yml", "soft-3rack.yml", "soft-tapered.yml", "soft-zones.yml"):
        inventory = inventory_module.load(shipped.inventories() / path)
        assert run_checks(inventory, healthy(inventory)) == []


@pytest.mark.parametrize(("plant", "check", "where"), PLANTED.values(), ids=PLANTED)
def test_preflight_each_misconfiguration_is_found_by_its_check_only(plant, check, where):
    state = healthy()
    plant(state)
    findings = run_checks(INVENTORY, state)
    assert [(finding.check, finding.where) for finding in findings] == [(check, where)]
    assert all(finding.do and finding.observed and finding.expected for finding in findings)


def test_preflight_every_check_has_a_planted_misconfiguration():
    assert {check for _, check, _ in PLANTED.values()} == {check.name for check in CHECKS}


def test_preflight_slow_clock_reading_is_no_skew():
    state = healthy()
    state["host1"].offset_s, state["host1"].offset_error_s = 38.0, 9.0
    assert run_checks(INVENTORY, state) == []


def test_preflight_rack_clock_is_read_apart_from_slow_tools(monkeypatch):
    """A clock that is 2 s off used to look correct if the tools took 5 s. A skew within SSH's delay counts as
    unchecked.
    """
    now = [1000.0]
    monkeypatch.setattr(collect.time, "time", lambda: now[0])

    class Node:
        def run(self, argv, **_options):
            took = 0.01 if argv[0] == "date" else 5.0
            now[0] += took
            wall = f"{now[0] - took / 2 + 2.0:.6f}\n"
            stdout = wall if argv[0] == "date" else f"@@node host1\n@@clock\n{wall}@@end\n"
            return SimpleNamespace(stdout=stdout, stderr="")

    rack = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
    lab = SimpleNamespace(
        nodes=lambda: ["host1"],
        node=lambda _name: Node(),
        request=lambda *_, **__: {"why": None, "gpus": []},
        inventory_model=rack,
        topology=rack.topology,
    )
    state = read_facts(lab)
    assert state["host1"].offset_error_s == pytest.approx(0.005)
    clock = [check for check in CHECKS if check.name == "clock"]
    (finding,) = run_checks(rack, state, clock)
    assert (finding.where, finding.observed[:8]) == ("host1", "+2.000 s")
    (unchecked,) = unchecked_parts(rack, state, clock)
    assert unchecked.why == "SSH is too slow to show a skew of less than 0.01 s"


def test_preflight_expected_number_of_next_hops():
    topology = INVENTORY.topology
    assert expected_next_hops(topology, "rtsw1")["10.77.2.0/31"] == 2
    assert expected_next_hops(topology, "ctsw1")["10.77.2.0/31"] == 1
    assert "10.77.1.0/31" not in expected_next_hops(topology, "rtsw1")
    assert expected_next_hops(topology, "rtsw1")["10.78.0.101"] == 1


ANSWER = """\
@@node host1
@@ip
[{"ifname":"be0","flags":["BROADCAST","UP","LOWER_UP"],"mtu":4200,"qdisc":"pfifo","address":"02:fb:01:01:01:00",
"addr_info":[{"family":"inet","local":"10.77.1.1","prefixlen":31},{"family":"inet6","local":"fe80::1","prefixlen":64}]},
{"ifname":"be1","flags":["BROADCAST"],"mtu":1500,"qdisc":"noop","address":"02:fb:01:01:01:01","addr_info":[]}][
{"dst":"10.77.2.0/31","protocol":"bgp","nexthops":[{"dev":"a"},{"dev":"b"}]},
{"dst":"10.77.3.0/31","protocol":"bgp","dev":"a"},{"dst":"default","gateway":"10.0.2.2","protocol":"dhcp"}]
@@qdisc
[{"kind":"tbf","handle":"1:","dev":"be0","root":true,"options":{}},{"kind":"pfifo","dev":"be0","parent":"1:1"}]
@@nft
{"nftables":[{"metainfo":{"version":"1.1.3"}},{"table":{"family":"netdev","name":"hop","handle":1}}]}
@@sysctl
net.ipv4.ip_forward = 1
@@clock
1763728000.250000000
@@rdma
[{"ifindex":0,"ifname":"rxe0","port":1,"state":"ACTIVE","physical_state":"LINK_UP","netdev":"be0"}]
@@gid
/sys/class/infiniband/rxe0/ports/1/gids/0:fe80:0000:0000:0000:0000:00ff:fe01:0100
/sys/class/infiniband/rxe0/ports/1/gids/1:0000:0000:0000:0000:0000:ffff:0a4d:0101
/sys/class/infiniband/rxe0/ports/1/gids/2:0000:0000:0000:0000:0000:0000:0000:0000
/sys/class/infiniband/rxe0/ports/1/gids/44:0000:0000:0000:0000:0000:ffff:0a4d:0102
@@gid-type
/sys/class/infiniband/rxe0/ports/1/gid_attrs/types/0:RoCE v2
/sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1:IB/RoCE v1
/sys/class/infiniband/rxe0/ports/1/gid_attrs/types/44:RoCE v2
@@cpu.max
/sys/fs/cgroup/faultbed.slice/faultbed-gpu0.service/cpu.max:max 100000
@@unit
faultbed-gpu0.service loaded active running /usr/bin/python3 -m faultbed.traffic.node.softgpu
@@revert
flap-1.json
@@sends
[{"dst":"192.0.2.1","from":"10.77.1.1","gateway":"10.77.1.0","dev":"be0","flags":[],"uid":0,"cache":[]}]
@@node rtsw1
@@bgp
{"peers":{"ctsw1":{"state":"Established","hostname":"ctsw1"}}}
@@end
"""


@pytest.mark.parametrize(
    ("nft", "systemctl", "failed"),
    [(0, 0, []), (1, 0, ["nft"]), (0, 1, ["systemctl"]), (1, 3, ["nft", "systemctl"]), (None, 0, [])],
)
def test_preflight_leftovers_of_a_tool_that_failed_are_not_right(tmp_path, nft, systemctl, failed):
    """No unit and no table because the tool failed is not the same as none. Without nft there is no table."""
    for name, rc in (("nft", nft), ("systemctl", systemctl)):
        if rc is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\nexit {rc}\n")
            (tmp_path / name).chmod(0o755)
    lines = [
        *collect._IN_NAMESPACE.splitlines()[1:2],
        *(line for line in collect._ON_MACHINE.splitlines() if "systemctl" in line),
    ]
    text = "\n".join(["echo @@node host1", *lines, "echo @@end"])
    path = str(tmp_path) if nft is None else f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True, env={"PATH": path})
    state = parse(done.stdout)
    assert state["host1"].failed == failed
    check = next(one for one in CHECKS if one.name == "leftovers")
    parts = unchecked_parts(INVENTORY, state, [check])
    assert [(part.where, part.why) for part in parts] == [
        ("host1", f"{one} failed, so leftovers of that kind are unknown") for one in failed
    ]


def test_preflight_answer_is_decoded():
    result = parse(ANSWER)
    host = result["host1"]
    assert host.interfaces["be0"] == Interface(
        up=True, carrier=True, mtu=4200, mac="02:fb:01:01:01:00", addresses=frozenset({"10.77.1.1/31"}), queue="tbf"
    )
    assert not host.interfaces["be1"].up
    assert host.next_hops == {"10.77.2.0/31": 2, "10.77.3.0/31": 1}
    assert host.nft_tables == ["netdev hop"]
    assert host.sysctls == {"net.ipv4.ip_forward": "1"}
    assert host.wall_s == 1763728000.25
    assert host.rdma == {"rxe0": ("ACTIVE", "be0")}
    assert host.gids == {"rxe0": {"fe80:0000:0000:0000:0000:00ff:fe01:0100", "0000:0000:0000:0000:0000:ffff:0a4d:0102"}}
    assert host.cpu_max == {"faultbed-gpu0.service": "max 100000"}
    assert host.units == {"faultbed-gpu0.service": "active"}
    assert host.reverts == ["flap-1.json"]
    assert host.route_by_source == {"10.77.1.1": ("be0", "10.77.1.0")}
    assert result["rtsw1"].sessions == {"ctsw1": "Established"}


@given(st.integers(0, len(ANSWER) - 2))
def test_preflight_truncated_answer_is_rejected(at):
    if not ANSWER[:at].endswith("@@end"):
        with pytest.raises(LabError):
            parse(ANSWER[:at])


@pytest.mark.parametrize(
    ("section", "output"),
    [
        ("ip", '[{"ifname": "be0", "flags": ["UP"]}]'),
        ("ip", "[{broken"),
        ("rdma", '[{"ifindex": 0}]'),
        ("nft", "Error: syntax error"),
        ("clock", "date: invalid option"),
        ("gid", "/sys/class:fe80"),
        ("sends", "[1, 2]"),
    ],
)
def test_preflight_unreadable_section_is_an_error_that_names_it(section, output):
    """An unreadable section used to end in a traceback."""
    with pytest.raises(LabError, match=f"the answer to '{section}' cannot be parsed"):
        parse(f"@@node host1\n@@{section}\n{output}\n@@end\n")


def test_preflight_machine_that_denies_access_is_named_with_its_message():
    refused = SimpleNamespace(stdout="", stderr="sudo: a password is required\n")
    node = SimpleNamespace(run=lambda *_args, **_options: refused)
    lab = SimpleNamespace(
        nodes=lambda: ["host1"], node=lambda _name: node, inventory_model=INVENTORY, topology=INVENTORY.topology
    )
    with pytest.raises(LabError, match=r"^host1: .*sudo: a password is required"):
        read_facts(lab)


def test_preflight_script_queries_every_switch_of_a_carrier():
    text = script(INVENTORY, "fabric")
    for switch in INVENTORY.topology.switch_by_name:
        assert f"ip netns exec {switch}" in text
        assert f"vtysh -N {switch}" in text
    assert "route get 192.0.2.1 from 10.77.1.1" in script(INVENTORY, "host1")
    assert "tc -j qdisc" in text


def pair(src="a:x", dst="b:x", latency_us=100.0, goodput_bps=1e8, kind="same rack"):
    return Pair(src=src, dst=dst, kind=kind, latency_us=latency_us, goodput_bps=goodput_bps)


def test_burnin_pairs_join_different_hosts_in_both_directions():
    pairs = pairs_of(INVENTORY.topology)
    assert len(pairs) == len(set(pairs)) == 8 * 6
    assert ("host1:rxe0", "host3:rxe1", "across racks") in pairs
    assert ("host2:rxe0", "host1:rxe1", "same rack") in pairs
    zones = inventory_module.load(shipped.inventories() / "soft-zones.yml")
    apart = {(src, dst): kind for src, dst, kind in pairs_of(zones.topology)}
    assert apart["host1:rxe0", "host2:rxe0"] == "across racks"
    assert apart["host1:rxe0", "host3:rxe0"] == "across zones"


def done_of(pairs, *, dead=()):
    """Return the results of an attempt: those of all pairs before the first dead one."""
    done = {}
    for src, dst, _ in pairs:
        if (src, dst) in dead:
            return done
        done |= {f"{test} {src} {dst}": {"start_ns": 0, "end_ns": 10**6} for test in ("latency", "bandwidth")}
    return done


SHAPE = burnin.SHAPES["soft"]


def test_burnin_dead_pair_is_reported_and_later_pairs_are_measured(monkeypatch):
    pairs, dead = pairs_of(INVENTORY.topology), {("host1:rxe0", "host2:rxe1"), ("host4:rxe1", "host3:rxe1")}
    monkeypatch.setattr(burnin, "_attempt", lambda _lab, left, _shape, _on_event: done_of(left, dead=dead))
    result = burnin._round(None, pairs, SHAPE, None)
    assert [(one.src, one.dst) for one in result] == [pair[:2] for pair in pairs]
    assert {(one.src, one.dst) for one in result if one.goodput_bps is None} == dead


def test_burnin_stops_after_a_few_dead_pairs_without_blaming_the_rest(monkeypatch):
    lab, pairs = SimpleNamespace(topology=INVENTORY.topology), pairs_of(INVENTORY.topology)
    dead = {x[:2] for x in pairs}
    monkeypatch.setattr(burnin, "_attempt", lambda _lab, left, _shape, _on_event: done_of(left, dead=dead))
    assert len(burnin._round(None, pairs, SHAPE, None)) == burnin.MAX_DEAD
    done = burnin.measure(lab, worse_than=4)
    assert len(done.unmeasured) == 48 - burnin.MAX_DEAD
    assert not set(done.unmeasured) & {(pair.src, pair.dst) for pair in done.pairs}


def test_burnin_dead_rnic_is_not_tried_with_all_others(monkeypatch):
    """Each dead pair costs half a minute. Three of them used to end the burn-in before other hosts were measured."""
    lab, sick = SimpleNamespace(topology=INVENTORY.topology), "host2:rxe1"
    dead = {x[:2] for x in pairs_of(INVENTORY.topology) if sick in x}
    monkeypatch.setattr(burnin, "_attempt", lambda _lab, left, _shape, _on_event: done_of(left, dead=dead))
    done = burnin.measure(lab, worse_than=4)
    assert all(sick in pair for pair in done.unmeasured)
    assert {(outlier.pair.src, outlier.pair.dst) for outlier in done.outliers} | set(done.unmeasured) == dead
    assert len(done.pairs) == 48 - len(done.unmeasured)


def test_burnin_measures_a_large_lab_in_parts(monkeypatch):
    sizes = []
    monkeypatch.setattr(burnin, "_attempt", lambda _lab, some, _shape, _event: sizes.append(len(some)) or done_of(some))
    pairs = [(f"h{one}:x", f"h{other}:x", "same rack") for one in range(32) for other in range(32) if one != other]
    assert len(burnin._round(None, pairs, SHAPE, None)) == len(pairs) == sum(sizes) == 992
    assert sizes == [256, 256, 256, 224]


def test_burnin_rack_shape_keeps_a_link_busy_longer_than_its_poster():
    rack = burnin.SHAPES["rack"]
    assert 8 * rack.bandwidth_bytes * rack.bandwidth_messages / 400e9 > 5e-3


def test_burnin_skips_rnics_known_to_be_broken(monkeypatch):
    requests = []
    monkeypatch.setattr(burnin, "_attempt", lambda _lab, left, _shape, _event: requests.append(left) or done_of(left))
    lab = SimpleNamespace(topology=INVENTORY.topology)
    assert burnin.measure(lab, worse_than=4, leave_out={"host1:rxe0"}).outliers == ()
    assert len(requests[0]) == 48 - 12
    assert not any("host1:rxe0" in pair for pair in requests[0])


def test_burnin_noise_of_one_round_is_no_outlier(monkeypatch):
    """A pair that is slow once is measured again, and only that one."""
    rounds = []

    def attempt(_lab, left, _shape, _on_event):
        rounds.append(left)
        done = done_of(left)
        if len(rounds) == 1:
            done["bandwidth host1:rxe0 host3:rxe0"]["end_ns"] = 10**9
        return done

    monkeypatch.setattr(burnin, "_attempt", attempt)
    result = burnin.measure(SimpleNamespace(topology=INVENTORY.topology), worse_than=4)
    assert result.outliers == ()
    assert (result.rounds, rounds[1]) == (2, [("host1:rxe0", "host3:rxe0", "across racks")])


def test_broken_lists_the_rnics_of_each_finding():
    state = healthy()
    for name in ("port down", "missing GID", "wrong hash policy"):
        PLANTED[name][0](state)
    interface("rtsw2", "host3-rxe1", carrier=False)(state)
    assert broken(INVENTORY.topology, run_checks(INVENTORY, state)) == {"host4:rxe1", "host3:rxe1"}


def test_outliers_are_slow_dead_or_late_pairs():
    usual = [pair(src=f"h{number}:x") for number in range(6)]
    assert outliers(usual, worse_than=4) == []
    slow, dead, late = pair("s:x", goodput_bps=1e6), pair("d:x", goodput_bps=None), pair("l:x", latency_us=900.0)
    actual = {
        outlier.pair.src: (outlier.what, outlier.ratio)
        for outlier in outliers([*usual, slow, dead, late], worse_than=4)
    }
    assert actual == {"s:x": ("goodput_bps", 100.0), "d:x": ("goodput_bps", None), "l:x": ("latency_us", 9.0)}


def test_outliers_compare_each_kind_with_itself_only():
    near = [pair(src=f"h{number}:x") for number in range(4)]
    far = [pair(src=f"h{number}:x", kind="across racks", latency_us=1000.0, goodput_bps=1e7) for number in range(4)]
    assert outliers([*near, *far], worse_than=4) == []


@given(st.lists(st.floats(1e6, 1e9), min_size=1, max_size=20), st.floats(1.1, 10))
def test_outliers_are_relative_to_the_best_quarter(rates, worse_than):
    outlying = outliers([pair(src=f"h{i}:x", goodput_bps=rate) for i, rate in enumerate(rates)], worse_than=worse_than)
    usual = sorted(rates, reverse=True)[(len(rates) - 1) // 4]
    assert [one.value for one in outlying] == [rate for rate in rates if usual > worse_than * rate]


def lab_of(hosts, sick, *, times, both_ways=True):
    """Return the pairs of a rack; host `sick` (if any) is this many times slower, as a receiver or both ways."""
    names = [f"h{number}:x" for number in range(hosts)]
    return [
        pair(src=src, dst=dst, goodput_bps=1e11 / (times if dst == sick or (both_ways and src == sick) else 1))
        for src in names
        for dst in names
        if src != dst
    ]


@pytest.mark.parametrize("hosts", [3, 4, 5, 32])
@pytest.mark.parametrize("times", [1.25, 2.0, 40.0])
def test_outliers_are_the_pairs_of_one_slow_host_among_few_hosts(hosts, times):
    """With 3 hosts, two of three pairs include the slow host, so a median would be slow, and no pair an outlier."""
    outlying = outliers(lab_of(hosts, "h1:x", times=times), worse_than=1.15)
    assert len(outlying) == 2 * (hosts - 1)
    assert all("h1:x" in (one.pair.src, one.pair.dst) for one in outlying)


@pytest.mark.parametrize("hosts", [2, 3, 32])
def test_outliers_are_the_pairs_of_one_slow_direction(hosts):
    outlying = outliers(lab_of(hosts, "h1:x", times=1.25, both_ways=False), worse_than=1.15)
    assert {one.pair.dst for one in outlying} == {"h1:x"}
    assert len(outlying) == hosts - 1


@pytest.mark.parametrize("hosts", [2, 4, 32])
def test_outliers_of_equal_pairs_are_none(hosts):
    assert outliers(lab_of(hosts, None, times=1.0), worse_than=1.15) == []
    dead = [dataclasses.replace(one, goodput_bps=None) for one in lab_of(hosts, None, times=1.0)]
    assert len(outliers(dead, worse_than=1.15)) == len(dead)


def test_burnin_keeps_the_better_of_two_measurements():
    assert _better(pair(latency_us=900.0, goodput_bps=None), pair(latency_us=None, goodput_bps=5e7)) == pair(
        latency_us=900.0, goodput_bps=5e7
    )


def test_preflight_result_is_json():
    from faultbed.harness.run.prepare.preflight import Preflight, names
    from faultbed.traffic.flows.burnin import Burnin

    findings = run_checks(INVENTORY, healthy() | {"host1": dataclasses.replace(healthy()["host1"], rdma={})})
    done = Burnin(pairs=(pair(),), outliers=tuple(outliers([pair(goodput_bps=None)], worse_than=4)), rounds=1)
    result = Preflight(lab="soft", checked=names(INVENTORY), findings=tuple(findings), burnin=done)
    decoded = json.loads(json.dumps(result.to_dict(), allow_nan=False))  # JSON has no Infinity
    assert decoded["bad_nodes"] == ["host1"]
    assert decoded["burnin"]["outliers"][0]["ratio"] is None
    assert decoded["burnin"]["pairs"][0]["goodput_bps"] == 1e8
