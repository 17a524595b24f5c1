"""Fingerprints: the state of a machine as the kernel reports it, and the comparison of two fingerprints."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_namespace import answer_of
from systemd_server import Systemd
from waiting import until

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed import shipped
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.model import fault_names
from faultbed.testbed.node import state, systemd_units
from faultbed.testbed.node.netlink import attribute
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.reservation import WHOLE_LAB, covered

UP, LOWER_UP = 1, 1 << 16
BGP, RA = 186, 9
LINKDOWN = 16


def link(*, flags, index):
    actual = {
        1: bytes.fromhex("02fb00000001"), 3: b"be0\0", 4: struct.pack("=I", 4200), 6: b"pfifo\0",
    }  # fmt: skip
    return state.link_fact(flags, actual, {index: "be0"})


def netem(*, rate=0, seed=1, loss=0):
    """A netem below a prio's second band, as the kernel dumps it: rate in bytes/s."""
    options = struct.pack("=6I", 0, 640, loss, 0, 0, 0)
    options += attribute(1, bytes(12)) + attribute(6, struct.pack("=IiIi", rate, 0, 0, 0))
    options += attribute(10, struct.pack("=q", 500_000)) + attribute(14, struct.pack("=Q", seed))
    body = struct.pack("=B3xiIII", 0, 2, 0x200000, 0x10002, 0) + attribute(1, b"netem\0") + attribute(2, options)
    return state.qdisc_fact(body, {2: "ctsw1"})


def test_fingerprint_has_a_ports_rate_and_not_its_unused_seed():
    subject, text = netem(rate=2_500_000)
    assert subject == "qdisc ctsw1 parent 1:2"
    assert text == "netem limit 640 delay_ns 500000 bytes_per_s 2500000"
    assert netem(rate=2_500_000, seed=99) == netem(rate=2_500_000)
    assert netem(rate=1_250_000) != netem(rate=2_500_000)
    assert netem(rate=2_500_000, loss=5) != netem(rate=2_500_000)


def route(*, nhid, order, protocol=BGP, hop_flags=0):
    """10.77.2.0/31 over two uplinks, each next hop an IPv6 link-local address."""
    hops = b""
    for number in (1, 2)[::order]:
        via = struct.pack("=H", socket.AF_INET6) + socket.inet_pton(socket.AF_INET6, f"fe80::{number}")
        inside = attribute(18, via)
        hops += struct.pack("=HBBi", 8 + len(inside), hop_flags, 0, number) + inside
    header = struct.pack("=BBBBBBBBI", socket.AF_INET, 31, 0, 0, 254, protocol, 0, 1, 0)
    attributes = (
        attribute(1, socket.inet_aton("10.77.2.0"))
        + attribute(6, struct.pack("=I", 20))
        + attribute(30, struct.pack("=I", nhid))
        + attribute(9, hops)
    )
    return list(state.route_facts(header + attributes, {1: "ctsw1", 2: "ctsw2"}))


def taken(*, flags=UP | LOWER_UP, index=2, **hops):
    facts = [link(flags=flags, index=index), *route(**hops)]
    return Fingerprint(nodes={"host1": state.gathered(iter(facts))})


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 999), st.integers(1, 999))
def test_fingerprint_ignores_numbers_the_kernel_assigns(one, two, three, four):
    """Interface indexes, next-hop ids and the order of equal next hops change freely."""
    before, after = taken(index=one, nhid=three, order=1), taken(index=two, nhid=four, order=-1)
    assert fingerprint.diff(before, after) == []


def test_fingerprint_lost_carrier_is_one_readable_line():
    """The line has the node, the link, its old state and its new state."""
    lines = fingerprint.diff(taken(nhid=1, order=1), taken(flags=UP, nhid=1, order=1))
    assert lines == [
        (
            "host1: link be0 was LOWER_UP UP mtu 4200 qdisc pfifo 02:fb:00:00:00:01, "
            "is UP mtu 4200 qdisc pfifo 02:fb:00:00:00:01"
        )
    ]


def test_fingerprint_route_lists_its_next_hops_and_which_are_down():
    """Both next hops are listed with their gateways; a lost one is a difference."""
    assert route(nhid=7, order=1) == [
        ("route main unicast 10.77.2.0/31 metric 20 bgp", "via fe80::1 dev ctsw1, via fe80::2 dev ctsw2")
    ]
    lines = fingerprint.diff(taken(nhid=7, order=1), taken(nhid=7, order=1, hop_flags=LINKDOWN))
    assert len(lines) == 1
    assert "dev ctsw1 linkdown" in lines[0]


def test_fingerprint_ignores_router_advertisements():
    """Routes from router advertisements appear and expire without any fault."""
    assert route(nhid=1, order=1, protocol=RA) == []


def exception(*, mtu, flags=0x200):
    """Return a route exception that the kernel learnt by ICMP, as in a dump of routes."""
    header = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, 100, 3, 0, 1, flags)
    known = {10: 10} | ({2: mtu} if mtu else {})
    metrics = attribute(8, b"".join(attribute(number, struct.pack("=I", value)) for number, value in known.items()))
    to, by = attribute(1, socket.inet_aton("10.77.2.1")), attribute(4, struct.pack("=I", 1))
    return header + to + by + metrics


def test_fingerprint_has_a_learnt_path_mtu_on_rdma_interfaces():
    """A cached route without an MTU, or a configured route with one, is not a learnt path MTU."""
    names, learnt = {1: "be0"}, exception(mtu=1500)
    assert list(state.path_mtu_facts(learnt, names, {"be0"})) == [("path mtu be0 10.77.2.1/32", "1500")]
    assert list(state.path_mtu_facts(learnt, names, {"be1"})) == list(state.route_facts(learnt, names)) == []
    for other in (exception(mtu=0), exception(mtu=1500, flags=0)):
        assert list(state.path_mtu_facts(other, names, {"be0"})) == []


def test_fingerprint_keeps_both_facts_of_one_subject():
    """Of two routes to one prefix, neither hides the other."""
    assert state.gathered(iter([("route x", "b"), ("route x", "a")])) == {"route x": "a and b"}


def test_fingerprint_names_facts_that_are_gone_or_new():
    one, none = Fingerprint(nodes={"host1": {"nft table netdev faultbed_x": "there"}}), Fingerprint(nodes={})
    assert fingerprint.diff(none, one) == ["host1: nft table netdev faultbed_x is new (there)"]
    assert fingerprint.diff(one, none) == ["host1: nft table netdev faultbed_x is gone (was there)"]


def test_fingerprint_ended_program_is_no_difference_and_a_new_one_is():
    """A manual flow that ended during a manual fault used to make the lab DIRTY, which heal could not change."""
    none, one, two = (
        Fingerprint(nodes={"host1": {"program faultbed.traffic.node.engine": f"{count} running"} if count else {}})
        for count in range(3)
    )
    assert fingerprint.diff(one, none) == fingerprint.diff(two, one) == fingerprint.diff(one, one) == []
    assert fingerprint.diff(none, one) == ["host1: program faultbed.traffic.node.engine is new (1 running)"]
    assert fingerprint.diff(one, two) == ["host1: program faultbed.traffic.node.engine was 1 running, is 2 running"]


def test_fingerprint_reads_this_machine():
    """On a real kernel, the fingerprint has every interface of sysfs with its MTU, and some sysctl."""
    here = state.read_nodes({"here": None})["here"]
    for device in Path("/sys/class/net").iterdir():
        if (device / "mtu").exists():
            assert f"mtu {(device / 'mtu').read_text().strip()} " in here[f"link {device.name}"]
    assert here["sysctl net.ipv4.ip_forward"] in ("0", "1")


def test_program_of_returns_our_module_and_ignores_the_watcher():
    """Leftover programs must be visible: a script that held a GPU once delayed a later job by a minute."""
    for command, program in (
        ("python3 -m faultbed.traffic.node.engine", "faultbed.traffic.node.engine"),
        ("/usr/bin/python3 -m faultbed.inject.node.holder 0.5 17", "faultbed.inject.node.holder"),
        ("python3 -c import time", "-c"),
        ("python3 -m faultbed.testbed.node.watch", None),
        ("python3 -m http.server", None),
        ("python3 /usr/lib/frr/frr-reload.py -m", None),
    ):
        assert state.program_of(command.replace(" ", "\0") + "\0") == program


RACK = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
QUIET = {
    "rtsw1": {"link Ethernet0": "UP", "link Ethernet8": "UP", "unit ssh": "active", "route main x bgp": "via a"},
    "host1": {
        "link ens1f0np0": "UP",
        "rdma mlx5_0/1": "ACTIVE",
        "rdma mlx5_01/1": "ACTIVE",
        "route main y static": "b",
    },
    "host3": {"link ens1f0np0": "UP"},
}


def shared(covers, nodes, moved=()):
    """Return the fingerprint of a rack for a user who reserved `covers`, and the machines that were queried.

    `moved` has pairs of a node and a subject that changed a second before.
    """
    requests = []

    def request(machine, _request, **_):
        requests.append(machine)
        if nodes[machine] is None:
            raise Unreachable(f"{machine} boots")
        subjects = {subject: 1.0 for node, subject in moved if node == machine}
        return {"nodes": {machine: nodes[machine]}, "heard_s": 9.0, "moved": {machine: subjects} if subjects else {}}

    lab = SimpleNamespace(
        nodes=lambda: tuple(nodes), topology=RACK.topology, netns=lambda _: None, request=request, reserved=covers,
        state_dir=Path("/nowhere"),
        carried=lambda names: {name: {name: None} for name in names},
    )  # fmt: skip
    return fingerprint.capture(lab), sorted(requests)


def test_fingerprint_of_a_reservation_ignores_other_users_changes():
    """Another user's faults leave a unit and a rule on the same switch, change links and routes, and reboot a host."""
    link = next(link for link in RACK.topology.links if link.b.node == "host1" and link.rnic == "mlx5_0")
    nodes = {name: dict(facts) for name, facts in QUIET.items()}
    nodes["rtsw1"] = {f"link {link.a.netdev}": "UP", "link EthernetX": "UP"} | nodes["rtsw1"]
    nodes["host1"] |= {f"link {link.b.netdev}": "UP"}
    before, queried = shared((link.name,), nodes)
    assert queried == ["host1", "rtsw1"]
    theirs = {**nodes, "host3": None}
    theirs["rtsw1"] = nodes["rtsw1"] | {"unit faultbed-fault-x": "active", "link EthernetX": "down"}
    theirs["host1"] = nodes["host1"] | {"rdma mlx5_01/1": "DOWN"}
    assert fingerprint.diff(before, shared((link.name,), theirs)[0]) == []
    ours = {**theirs, "host1": nodes["host1"] | {f"link {link.b.netdev}": "down", "rdma mlx5_0/1": "DOWN"}}
    ours["rtsw1"] = nodes["rtsw1"] | {f"link {link.a.netdev}": "down"}
    assert len(fingerprint.diff(before, shared((link.name,), ours)[0])) == 3


def test_changes_of_others_do_not_make_a_reserved_part_restless():
    link = next(link for link in RACK.topology.links if link.b.node == "host1" and link.rnic == "mlx5_0")
    theirs = (("rtsw1", "link EthernetX"), ("rtsw1", "route main 10.0.0.0/24 bgp"))
    assert shared((link.name,), QUIET, theirs)[0].still_s == 9.0
    assert shared((link.name,), QUIET, (*theirs, ("host1", f"link {link.b.netdev}")))[0].still_s == 1.0
    assert shared((WHOLE_LAB,), QUIET, theirs)[0].still_s == 1.0


def test_fingerprint_of_a_whole_node_covers_all_but_learnt_routes():
    before, queried = shared(covered(RACK.topology, ["rtsw1"]), QUIET)
    assert "rtsw1" in queried
    changed = {**QUIET, "rtsw1": {**QUIET["rtsw1"], "route main x bgp": "via b"}}
    assert fingerprint.diff(before, shared(before.covers, changed)[0]) == []
    changed = {**QUIET, "rtsw1": {**QUIET["rtsw1"], "unit faultbed-fault-x": "active"}}
    assert len(fingerprint.diff(before, shared(before.covers, changed)[0])) == 1


def test_fingerprint_of_an_unshared_lab_covers_everything():
    before, queried = shared((WHOLE_LAB,), QUIET)
    assert (before.nodes, queried) == (QUIET, sorted(QUIET))
    with pytest.raises(Unreachable):
        shared((WHOLE_LAB,), {**QUIET, "host3": None})


def test_dirty_mark_keeps_the_covered_nodes(tmp_path):
    taken_of_part = Fingerprint(nodes={"host1": {"link be0": "UP"}}, covers=("host1",))
    dirty.mark(tmp_path, ["x"], taken_of_part)
    assert dirty.baseline(tmp_path) == taken_of_part


def test_fingerprint_has_cpu_hogs_and_stopped_programs(tmp_path):
    """With real processes: one has the name of the faults' busy processes, and a program is stopped."""
    hog = tmp_path / "faultbed-hog"
    shutil.copy(shutil.which("sleep"), hog)
    before = dict(state._process_facts())
    with subprocess.Popen([hog, "60"]) as busy, subprocess.Popen([sys.executable, "-c", "input()"]) as program:
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        until(lambda: "process faultbed-hog" in dict(state._process_facts()), within_s=5)
        lines = fingerprint.diff(*(Fingerprint(nodes={"h": facts}) for facts in (before, dict(state._process_facts()))))
        for process in (busy, program):
            process.kill()
    assert any(line.startswith("h: process faultbed-hog") for line in lines)
    assert any(line.startswith("h: stopped -c") for line in lines)


def test_fingerprint_resources_of_an_ended_program_are_no_difference_and_more_are():
    """Manual traffic may end before the manual fault that began during it."""
    none, some, more = (
        Fingerprint(nodes={"h": {"rdma resources faultbed.traffic.node.engine": resources} if resources else {}})
        for resources in ("", "2 mr, 4 qp", "2 mr, 5 qp")
    )
    assert fingerprint.diff(some, none) == fingerprint.diff(more, some) == []
    assert fingerprint.diff(some, more) == [
        "h: rdma resources faultbed.traffic.node.engine was 2 mr, 4 qp, is 2 mr, 5 qp"
    ]
    assert len(fingerprint.diff(none, some)) == 1


@pytest.mark.parametrize(
    ("answers", "words"),
    [((b"REJECTED EXTERNAL\r\n",), "it rejected user"),
     ((b"OK 1f\r\n", None), "timed out"),
     ((b"OK 1f\r\n", b""), "it closed the connection")],
)  # fmt: skip
def test_fingerprint_with_units_that_could_not_be_listed_is_never_equal(monkeypatch, tmp_path, answers, words):
    """If systemd fails before and after, no unit is listed both times, and a leftover unit would look CLEAN."""
    path = tmp_path / "private"
    monkeypatch.setattr(state, "_UNITS_S", 0.2)
    monkeypatch.setattr(systemd_units, "SOCKET", str(path))
    with Systemd(path, answers):
        before, after = (Fingerprint(nodes={"h": dict(state._unit_facts())}) for _ in range(2))
    (line,) = fingerprint.diff(before, after)
    assert line.startswith(f"h: units is unknown: systemd at {path}: ")
    assert words in line
    assert fingerprint.unknown(before) == [line]


def test_fingerprint_shows_a_revert_stored_beside_qemu(tmp_path):
    """If a holder died with its guardian, the target may look unchanged while its revert waits for `heal`."""
    lab = SimpleNamespace(
        nodes=lambda: (), topology=RACK.topology, netns=lambda _: None, reserved=(WHOLE_LAB,), carried=lambda _: {},
        state_dir=tmp_path,
    )  # fmt: skip
    before = fingerprint.capture(lab)
    fingerprint.stored_reverts(tmp_path).mkdir()
    for name in ("a.revert", "a.claim", "rejoin.lock"):
        (fingerprint.stored_reverts(tmp_path) / name).touch()
    assert fingerprint.diff(before, fingerprint.capture(lab)) == ["controller: revert a is new (there)"]


def test_fingerprint_of_a_part_drops_learnt_routes_and_keeps_configuration():
    """Other users' faults change learnt routes. A line of configuration that ends with the same word must stay."""
    facts = {"route main unicast 10.0.0.0/8 metric 20 bgp": "via x", "frr bgpd router bgp 1 / redistribute bgp": "y"}
    partial = fingerprint.part({"rtsw1": facts}, RACK.topology, ("rtsw1",))
    assert list(partial["rtsw1"]) == ["frr bgpd router bgp 1 / redistribute bgp"]


@pytest.mark.parametrize(
    ("kind", "target", "params"),
    [
        ("link.down", "rtsw1:ctsw1", {}),
        ("link.down", "ctsw1:rtsw1", {}),
        ("link.down", "rtsw1:host1:mlx5_0", {}),
        ("link.flap", "host1:mlx5_0", {}),
        ("rnic.reset", "host1:mlx5_0", {}),
    ],
)
def test_fingerprint_of_a_link_has_the_units_and_reverts_of_faults_on_it(kind, target, params):
    """The lab was CLEAN after a fault on a link whose target could not revert: only interfaces were compared."""
    planned = plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), RACK.topology, lab_kind="rack")
    link = planned.target.link
    instance, node = f"{planned.id}-0a1b2c", link.a.node
    facts = {f"revert {instance}.revert": "there", f"unit faultbed-fault-{instance}.service": "failed failed"}
    after = fingerprint.part({node: facts}, RACK.topology, (link.name,))
    assert after == {node: facts}
    other = next(one for one in RACK.topology.links_of(node) if one is not link and one.rnic == link.rnic)
    assert fingerprint.part({node: facts}, RACK.topology, (other.name,)) == {node: {}}


def test_fingerprint_of_a_link_recognises_a_fault_whose_name_is_cut_off():
    name = "7-congestion-hash-collision-fabric-rack-01-0a1b2c-3d4e5f.revert"
    assert fault_names.is_fault_on(name, ["fabric-rack-01-rtsw1:ctsw1"])
    assert not fault_names.is_fault_on(name, ["fabric-rack-02-rtsw1:ctsw1"])
    assert not fault_names.is_fault_on("rejoin.lock", ["host1:rxe0"])


INTERFACE_SETTINGS = """
import json, subprocess
from pathlib import Path
from faultbed.testbed.node.state import network_facts

subprocess.run(["ip", "link", "add", "be0", "type", "veth", "peer", "name", "be1"], check=True)
conf = Path("/proc/sys/net/ipv4/conf/be0")
for name in ("forwarding", "rp_filter"):
    (conf / name).write_text("0")
found = []
for name, value in (("forwarding", "1"), ("rp_filter", "2"), ("forwarding", "0")):
    (conf / name).write_text(value)
    facts = {}
    try:
        for subject, text in network_facts():
            facts[subject] = text
    except OSError:  # nftables, which come last, may not be here
        pass
    found.append(facts["inet be0"])
print(json.dumps(found))
"""


def test_fingerprint_has_an_interfaces_own_forwarding_and_source_check():
    """A port whose forwarding was turned off by hand dropped every packet, and the lab was CLEAN."""
    assert answer_of(INTERFACE_SETTINGS) == [
        "forwarding 1 rp_filter 0", "forwarding 1 rp_filter 2", "forwarding 0 rp_filter 2",
    ]  # fmt: skip
