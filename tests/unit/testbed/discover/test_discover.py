"""Discovery: the machines' answers reproduce the inventory, and gaps are reported, never guessed."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.testbed import shipped
from faultbed.testbed.discover import live
from faultbed.testbed.discover.affinity import gpu_beside
from faultbed.testbed.discover.answers import SCRIPT, Answers, split
from faultbed.testbed.discover.draft import Draft, Gap, draft, text
from faultbed.testbed.discover.facts import machine_of
from faultbed.testbed.errors import LabError, Unreachable, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module

INVENTORIES = ["soft.yml", "soft-mini.yml", "soft-3rack.yml", "rack-h100.example.yml"]


def answers_of(inventory, *, lldp=False, neighbours=True, sessions=True):
    """Return each machine's answers, by tool, in a lab that equals its inventory."""
    topology, raw = inventory.topology, yaml.safe_load(inventory.path.read_text())
    variables = {}
    _collect(raw["all"], variables)
    answers = {}
    for host in topology.hosts:
        own, hostvars = _host(inventory, host, variables[host.name]), variables[host.name]
        if lldp:
            own["lldp"] = _lldp(topology, host.name)
        answers[host.name] = Answers(own=own)
        assert hostvars["faultbed_rnics"]
    namespaces = {}
    for switch in topology.switches:
        namespace = _switch(inventory, switch, neighbours=neighbours, sessions=sessions)
        if switch.carrier:
            namespaces[switch.name] = namespace
        else:
            own = {**namespace, "os": "debian\nsonic", "ssh": "", "rdma": "[]"}
            own["speed"] = "".join(
                f"/sys/class/net/{port['netdev']}/speed:{port['speed_gbps']}000\n"
                for port in variables[switch.name]["faultbed_ports"]
            )
            if lldp:
                own["lldp"] = _lldp(topology, switch.name)
            answers[switch.name] = Answers(own=own)
    for carrier in inventory.carriers:
        hosts = topology.host_by_name
        ports = [_link(port.netdev, port.mac, master="fe") for port in carrier.front_end_ports]
        bridge = _link("fe", "02:00:00:00:00:99") | {"linkinfo": {"info_kind": "bridge"}}
        heard = [
            {"mac": hosts[port.peer].front_end_mac, "ifname": port.netdev, "state": ""}
            for port in carrier.front_end_ports
        ]
        own = _machine(inventory, carrier.name, [])
        front = {"ip": json.dumps([bridge, *ports]), "fdb": json.dumps(heard)}
        answers[carrier.name] = Answers(own=own, namespaces={**namespaces, "fe": front})
    return answers


def _collect(group, into):
    for name, variables in (group.get("hosts") or {}).items():
        into.setdefault(name, {}).update(variables or {})
    for child in (group.get("children") or {}).values():
        _collect(child, into)


def _link(name, mac, *, mtu=1500, address=None, master=None):
    ip, _, prefix = (address or "").partition("/")
    info = [{"family": "inet", "local": ip, "prefixlen": int(prefix)}] if address else []
    return {"ifname": name, "link_type": "ether", "address": mac, "mtu": mtu, "addr_info": info} | (
        {"master": master} if master else {}
    )


def _machine(inventory, name, links):
    management = inventory.management[name]
    resources = inventory.vms.get(name)
    own = {"ssh": "10.0.2.2 40000 10.0.2.15 22", "os": "debian"}
    loopback = {"ifname": "lo", "link_type": "loopback", "mtu": 65536,
                "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]}  # fmt: skip
    ways_in = [_link(management.netdev, management.mac, address="10.0.2.15/24")] if management.mac else []
    own["ip"] = json.dumps([loopback, *ways_in, *links])
    if resources:
        top = resources.memory_mib * 2**20 - 0x20001
        own |= {"memory": f"00001000-0009fbff : System RAM\n00100000-{top:08x} : System RAM\n", "cpus": "1"}
    return own


def _host(inventory, host, variables):
    gateways = {rnic["netdev"]: rnic["gateway"] for rnic in variables["faultbed_rnics"]}
    links = [_link(host.front_end_netdev, host.front_end_mac, address=host.front_end_address)]
    links += [_link(rnic.netdev, rnic.mac, mtu=inventory.mtu, address=rnic.address) for rnic in host.rnics]
    own = _machine(inventory, host.name, links)
    own["ip"] += json.dumps([{"dst": "default", "gateway": way, "dev": dev} for dev, way in gateways.items()])
    own["rdma"] = json.dumps(
        [{"ifindex": 0, "ifname": x.name, "port": 1, "state": "ACTIVE", "netdev": x.netdev} for x in host.rnics]
    )
    if inventory.kind == "soft":
        own["softgpu"] = "\n".join(f"/sys/fs/cgroup/faultbed.slice/faultbed-{gpu.name}.service" for gpu in host.gpus)
        return own
    own["bmc"] = f"IP Address Source       : Static\nIP Address              : {variables['faultbed_bmc']['address']}\n"
    own["speed"] = "".join(f"/sys/class/net/{rnic.netdev}/speed:400000\n" for rnic in host.rnics)
    pcie = {rnic["name"]: rnic["pcie"] for rnic in variables["faultbed_rnics"]}
    root = {rnic["pcie"]: rnic["gpu"] for rnic in variables["faultbed_rnics"]}
    at = {gpu["pcie"]: gpu["name"] for gpu in variables["faultbed_gpus"]}
    paths = {
        address: f"/sys/devices/pci0000:00/0000:00:0{int(name[3:])}.0/0000:0{int(name[3:]) + 1}:00.0/{address}"
        for address, name in (root | at).items()
    }
    own["pci"] = "\n".join(paths.values())
    own["device"] = "\n".join(f"{name} {paths[address]}" for name, address in pcie.items())
    own["gpu"] = "\n".join(
        f"{gpu['name'][3:]}, NVIDIA H100 80GB HBM3, 0000{gpu['pcie'].upper()}" for gpu in variables["faultbed_gpus"]
    )
    return own


def _switch(inventory, switch, *, neighbours, sessions):
    topology, items, peers = inventory.topology, [], {}
    local, _, prefix = switch.loopback.partition("/")
    items.append({"ifname": "lo", "link_type": "loopback", "mtu": 65536,
                  "addr_info": [{"family": "inet", "local": local, "prefixlen": int(prefix)}]})  # fmt: skip
    heard = []
    mtu = 9216 if inventory.kind == "rack" else inventory.mtu
    for link in topology.links_of(switch.name):
        near, far = link.end(switch.name), link.other(switch.name)
        items.append(_link(near.netdev, near.mac, mtu=mtu, address=near.address))
        if link.is_uplink:
            peer = topology.switch_by_name[far.node]
            peers[near.netdev] = {"remoteAs": peer.asn, "remoteRouterId": peer.loopback.partition("/")[0]}
            heard.append({"dst": "fe80::1", "dev": near.netdev, "lladdr": far.mac, "state": ["REACHABLE"]})
    own = {"ip": json.dumps(items), "seed": f"{inventory.ecmp_hash_seed}\n"}
    if neighbours:
        own["ip"] += json.dumps(heard)
    if sessions or not neighbours:
        own["bgp"] = json.dumps({"routerId": local, "as": switch.asn, "peers": {}})
        own["sessions"] = json.dumps(peers if sessions else {})
    return own


def _lldp(topology, name):
    """Return lldpd's JSON for a machine: one interface is an object, several are a list."""
    messages = []
    for link in topology.links_of(name):
        near, far = link.end(name), link.other(name)
        chassis = {f"{far.node}.example.net": {"id": {"type": "mac", "value": "b8:59:9f:00:00:01"}, "descr": "Linux"}}
        port = {"id": {"type": "local", "value": "etp1"}, "descr": far.netdev, "ttl": "120"}
        messages.append({near.netdev: {"via": "LLDP", "rid": "1", "chassis": chassis, "port": port}})
    return json.dumps({"lldp": {"interface": messages[0] if len(messages) == 1 else messages}})


def drafted(answers, name="lab", access=None):
    return draft([machine_of(each, reply) for each, reply in answers.items()], name=name, access=access)


def loaded(inventory_draft, tmp_path):
    path = tmp_path / "drafted.yml"
    path.write_text(text(inventory_draft))
    return inventory_module.load(path)


@pytest.mark.parametrize("file", INVENTORIES)
@pytest.mark.parametrize("ways", [{}, {"neighbours": False}, {"lldp": True, "neighbours": False}], ids=str)
def test_discover_reproduces_the_topology(file, ways, tmp_path):
    inventory = inventory_module.load(shipped.inventories() / file)
    inventory_draft = drafted(answers_of(inventory, **ways), inventory.name)
    assert inventory_draft.gaps == ()
    assert loaded(inventory_draft, tmp_path).topology == inventory.topology
    assert sum(inventory_draft.cables.values()) == len(inventory.topology.links)


@pytest.mark.parametrize("file", INVENTORIES[:3])
def test_discover_finds_everything_of_a_soft_lab(file, tmp_path):
    inventory = inventory_module.load(shipped.inventories() / file)
    again = loaded(drafted(answers_of(inventory), inventory.name), tmp_path)
    assert replace(again, path=inventory.path) == inventory


def test_discover_keeps_pcie_speed_gpu_mtu_and_bmc_of_a_rack(tmp_path):
    path = shipped.inventories() / "rack-h100.example.yml"
    inventory, wanted = inventory_module.load(path), {}
    _collect(yaml.safe_load(path.read_text())["all"], wanted)
    reached = {name: {"ansible_host": one.address} for name, one in inventory.management.items()}
    inventory_draft = drafted(answers_of(inventory, lldp=True), "rack", reached)

    def short(value):
        """Return an MTU as the draft has it: only if it differs from the lab's."""
        usual = isinstance(value, list) and [{k: v for k, v in x.items() if (k, v) != ("mtu", 9000)} for x in value]
        return usual or value

    collected = {}
    _collect(inventory_draft.tree["all"], collected)
    for name in ("host1", "host4", "rtsw2", "ctsw3"):
        for key in ("ansible_host", "faultbed_rnics", "faultbed_gpus", "faultbed_ports", "faultbed_front_end"):
            assert collected[name].get(key) == short(wanted[name].get(key)), (name, key)
    assert collected["host1"]["faultbed_bmc"] == {"address": "198.51.100.11"}
    assert collected["rtsw1"]["faultbed_nos"] == "sonic"
    assert inventory_draft.cables == {"lldp": len(inventory.topology.links)}


@pytest.fixture
def sonic(tmp_path):
    """Return the rack example with SONiC's MACs: one for all ports of a switch."""
    tree = yaml.safe_load((shipped.inventories() / "rack-h100.example.yml").read_text())
    groups = tree["all"]["children"]["rack_h100"]["children"]
    roles = groups["switches"]["children"].values()
    for entry in (entry for role in roles for entry in role["hosts"].values()):
        for port in entry["faultbed_ports"]:
            port["mac"] = entry["faultbed_ports"][0]["mac"]
    shutil.copytree(shipped.inventories() / "group_vars", tmp_path / "group_vars")
    path = tmp_path / "sonic.yml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return inventory_module.load(path)


def test_discover_switches_with_one_mac_are_cabled_by_lldp(sonic, tmp_path):
    inventory_draft = drafted(answers_of(sonic, lldp=True), "sonic")
    assert inventory_draft.gaps == ()
    assert loaded(inventory_draft, tmp_path).topology == sonic.topology
    assert inventory_draft.cables == {"lldp": len(sonic.topology.links)}


def as_lldpmgrd(inventory, *, hostnames):
    """Return what SONiC's ports announce if ConfigDB describes them: alias and description, never the interface.

    `hostnames` is what each machine calls itself; the inventory has its own names.
    """
    answers, topology = answers_of(inventory, lldp=True), inventory.topology
    actual = {}
    for name, answer in answers.items():
        own = dict(answer.own)
        own["hostname"] = hostnames(name) + "\n"
        messages = []
        for link in topology.links_of(name):
            near, far = link.end(name), link.other(name)
            if far.node in topology.switch_by_name:
                port = {"id": {"type": "local", "value": f"etp-{far.netdev}"}, "descr": f"to {name}"}
            else:  # lldpd on a host announces the port's MAC
                port = {"id": {"type": "mac", "value": far.mac}, "descr": "whatever"}
            chassis = {f"{hostnames(far.node)}.example.net": {"id": {"type": "mac", "value": "b8:59:9f:00:00:01"}}}
            messages.append({near.netdev: {"via": "LLDP", "chassis": chassis, "port": port}})
        own["lldp"] = json.dumps({"lldp": {"interface": messages}})
        if name in topology.switch_by_name:
            netdevs = [link.end(name).netdev for link in topology.links_of(name)]
            own["ports"] = json.dumps({dev: {"alias": f"etp-{dev}"} for dev in netdevs})
        actual[name] = Answers(own=own)
    return actual


def test_discover_machines_keep_their_own_names_in_lldp(sonic, tmp_path):
    """LLDP has SONiC's aliases for switch ports, MACs for host ports, and host names that the inventory lacks."""
    inventory_draft = drafted(as_lldpmgrd(sonic, hostnames=lambda name: f"DC7-{name}"), "sonic")
    assert inventory_draft.gaps == ()
    assert inventory_draft.cables == {"lldp": len(sonic.topology.links)}
    assert loaded(inventory_draft, tmp_path).topology == sonic.topology


def test_discover_sonic_port_speed_comes_from_configdb():
    own = {
        "speed": "/sys/class/net/Ethernet0/speed:10000",
        "ports": '{"Ethernet0": {"alias": "etp1", "speed": "400000"}}',
    }
    result = machine_of("rtsw1", Answers(own=own))
    assert (result.speeds_gbps, result.aliases) == ({"Ethernet0": 400}, {"etp1": "Ethernet0"})


def test_discover_numbered_uplinks_keep_their_addresses(sonic, tmp_path):
    """SONiC's default: each uplink has a /31, and BGP_NEIGHBOR the other address of it."""
    uplink = next(link for link in sonic.topology.links if link.is_uplink)
    numbered = replace(uplink, a=replace(uplink.a, address="10.81.0.0/31"), b=replace(uplink.b, address="10.81.0.1/31"))
    links = tuple(numbered if link is uplink else link for link in sonic.topology.links)
    inventory = replace(sonic, topology=replace(sonic.topology, links=links))
    inventory_draft = drafted(answers_of(inventory), "sonic")
    assert inventory_draft.gaps == ()
    assert loaded(inventory_draft, tmp_path).topology == inventory.topology
    half = tuple(replace(link, b=uplink.b) if link is numbered else link for link in links)
    one_end = drafted(answers_of(replace(sonic, topology=replace(sonic.topology, links=half))), "sonic")
    assert [gap.what for gap in one_end.gaps] == ["the address 10.81.0.0/31 of this uplink has no counterpart"]


def test_discover_switches_with_the_default_name_are_not_identified_by_it(sonic):
    """All switches are called `sonic`, so hosts' neighbour names are ambiguous. Only the switches' own neighbours
    count.
    """
    answers = as_lldpmgrd(sonic, hostnames=lambda name: "sonic" if "tsw" in name else f"DC7-{name}")
    inventory_draft = drafted(answers, "sonic")
    assert inventory_draft.cables == {"lldp": 32, "bgp": 8}
    deaf = {"host1": answers["host1"]}
    whats = [one.what for one in drafted(deaf, "sonic").gaps if one.place == "hosts.host1.rnics[mlx5_0].switch"]
    assert len(whats) == 1
    assert "LLDP reports sonic.example.net (etp-Ethernet0, to host1)" in whats[0]


def test_discover_mac_of_several_ports_identifies_none(sonic):
    """Without LLDP, switches know their hosts by MAC; a MAC does not show which port of another switch they face."""
    answers = answers_of(sonic)
    for switch in sonic.topology.switches:
        answers[switch.name] = Answers(own={**answers[switch.name].own, "sessions": "{}"})
    inventory_draft = drafted(answers, "sonic")
    assert inventory_draft.cables == {"address": 32}
    places = {one.place: one for one in inventory_draft.gaps}
    uplinks = [link for link in sonic.topology.links if link.is_uplink]
    for end in (uplinks[0].a, uplinks[-1].b):
        assert "several ports" in places[f"{end.node}:{end.netdev}"].what
        assert "lldpd" in places[f"{end.node}:{end.netdev}"].do
    by_bgp = drafted(answers_of(sonic), "sonic")
    assert by_bgp.gaps == ()
    assert by_bgp.cables["bgp"] == len(uplinks)


SOFT = inventory_module.load(shipped.inventories() / "soft.yml")


def opened(answers):
    return {one.place: one for one in drafted(answers).gaps}


def test_discover_gaps_are_reported_with_their_place():
    answers = answers_of(SOFT)
    host1 = dict(answers["host1"].own)
    host1["ip"] = host1["ip"].replace('"10.77.1.1"', '"10.66.0.1"')
    answers["host1"] = Answers(own=host1)
    assert "hosts.host1.rnics[rxe0].switch" in opened(answers)
    fabric = answers["fabric"]
    unheard = {**fabric.namespaces, "fe": {**fabric.namespaces["fe"], "fdb": ""}}
    gaps = opened(answers | {"fabric": replace(fabric, namespaces=unheard)})
    assert {f"carriers.fabric:host{n}-fe0" for n in range(1, 5)} <= set(gaps)
    dumb = {**fabric.namespaces, "ctsw2": {"ip": "[]", "bgp": '{"as": 65201, "peers": {}}'}}
    gaps = opened(answers | {"fabric": replace(fabric, namespaces=dumb)})
    assert "no cable" in gaps["ctsw2"].what
    assert "ctsw2.loopback" in gaps
    assert "neither a host" in opened(answers | {"printer": Answers(own={})})["printer"].what
    assert all(gap.do for gap in gaps.values())


def test_discover_rack_switches_of_several_zones_with_one_number_have_a_rack_each():
    """The second one's rack used to replace the first one's, with all hosts of both, and nothing was open."""
    answers, name_of = answers_of(SOFT), {"rtsw1": "pod1-leaf1", "rtsw2": "pod2-leaf1"}
    namespaces = {name_of.get(name, name): namespace for name, namespace in answers["fabric"].namespaces.items()}
    found = drafted(answers | {"fabric": replace(answers["fabric"], namespaces=namespaces)})
    racks = found.tree["all"]["children"]["racks"]["children"]
    assert {rack: list(group["hosts"]) for rack, group in racks.items()} == {
        "rack-pod1-leaf1": ["host1", "host2", "pod1-leaf1"], "rack-pod2-leaf1": ["host3", "host4", "pod2-leaf1"],
    }  # fmt: skip


def test_discover_draft_lists_its_gaps_at_its_head():
    answers = answers_of(SOFT)
    written = text(drafted({name: answers[name] for name in ("host1", "host2")}))
    assert "# OPEN" in written
    assert "hosts.host1.rnics[rxe0].switch" in written.split("all:")[0]
    assert yaml.safe_load(written)["all"]["children"]["hosts"]["hosts"].keys() == {"host1", "host2"}


def test_discover_contradicting_ends_are_no_cable():
    """If the two ends name different far ends, no cable is assumed. A switch that hears its own LLDP can cause this."""
    answers = answers_of(SOFT)
    namespaces = {name: dict(namespace) for name, namespace in answers["fabric"].namespaces.items()}
    port = {each: SOFT.topology.resolve(f"rtsw1:{each}").link.other("rtsw1") for each in ("ctsw1", "ctsw2")}
    namespaces["rtsw1"]["ip"] = namespaces["rtsw1"]["ip"].replace(port["ctsw1"].mac, port["ctsw2"].mac)
    gaps = opened(answers | {"fabric": replace(answers["fabric"], namespaces=namespaces)})
    assert {"rtsw1:ctsw1", "ctsw1:rtsw1"} & set(gaps)


class Node:
    """A machine that gives one answer; None: it does not answer."""

    def __init__(self, answer):
        self.answer = answer

    def run(self, *_args, **_options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(stdout=self.answer, stderr="sudo: a password is required\n")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x85", "\u2028"])
def test_discover_name_with_a_line_break_stays_in_the_comment_of_its_gap(end):
    """Otherwise an LLDP neighbour's name could write variables into the inventory, such as a command for SSH."""
    name = f"leaf9{end}evil: {{hosts: {{host1: {{ansible_ssh_common_args: -oProxyCommand=id}}}}}}"
    gap = Gap(place="cables", what=f"leads to {name}", do="write it by hand")
    written = text(Draft(name="lab", tree={"all": {}}, gaps=(gap,), cables={}))
    assert yaml.safe_load(written) == {"all": {}}


def test_discover_silent_machine_is_open_and_the_others_are_drafted():
    silent = {}
    nodes = {
        "host1": Node("@@rdma\n[]\n@@end\n"),
        "host2": Node(Unreachable("host2 does not answer: no route to host")),
        "host3": Node(""),
    }
    result = live.query(nodes, lambda _said: None, unreachable=silent)
    assert [machine.name for machine in result] == ["host1"]
    actual = {one.place: one.what for one in draft(result, name="lab", unreachable=silent).gaps}
    assert actual["host2"] == "was not queried: host2 does not answer: no route to host"
    assert "its stderr: sudo: a password is required" in actual["host3"]
    with pytest.raises(LabError, match="no machine answers"):
        live.query({"host2": nodes["host2"]}, lambda _said: None, unreachable={})


def test_discover_rnics_outside_the_back_end_are_set_aside_and_reported():
    """An RNIC without an interface used to be dropped silently, and the front end's RNIC was taken for a rail."""
    answers = answers_of(SOFT)
    own = dict(answers["host1"].own)
    own["ip"] += json.dumps([_link("bond0", "02:00:00:00:00:77") | {"linkinfo": {"info_kind": "bond"}}])
    more = [{"ifname": "mlx5_7"}, {"ifname": "mlx5_8", "netdev": "mgmt0"}, {"ifname": "mlx5_bond_0", "netdev": "bond0"}]
    more[1]["netdev"] = SOFT.management["host1"].netdev
    own["rdma"] = json.dumps([*json.loads(own["rdma"]), *more])
    inventory_draft = drafted(answers | {"host1": Answers(own=own)})
    actual = {one.place.removeprefix("hosts.host1."): one.what for one in inventory_draft.gaps}
    assert set(actual) == {"rnics[mlx5_7]", "rnics[mlx5_8]", "rnics[mlx5_bond_0]"}
    assert "no Ethernet interface" in actual["rnics[mlx5_7]"]
    assert "SSH uses" in actual["rnics[mlx5_8]"]
    assert "bond" in actual["rnics[mlx5_bond_0]"]
    host = inventory_draft.tree["all"]["children"]["hosts"]["hosts"]["host1"]
    assert [rnic["name"] for rnic in host["faultbed_rnics"]] == ["rxe0", "rxe1"]


def test_discover_machine_with_rnics_and_bgp_is_neither_host_nor_switch():
    answers = answers_of(SOFT)
    own = answers["host1"].own | {"bgp": '{"as": 65001, "peers": {}}'}
    assert "has RNICs and speaks BGP" in opened(answers | {"host1": Answers(own=own)})["host1"].what


def test_discover_sudo_keeps_the_address_of_the_ssh_connection():
    """sudo removes SSH_CONNECTION from the environment, but the parent of the program still has it."""
    import os
    import subprocess

    program = ["sh", "-c", 'env -u SSH_CONNECTION sh -c "$1"; true', "sudo", SCRIPT]
    env = {**os.environ, "SSH_CONNECTION": "10.0.2.2 40000 10.0.2.15 22"}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert split("here", done.stdout).own["ssh"] == "10.0.2.2 40000 10.0.2.15 22"


def test_discover_port_with_several_lldp_neighbours_is_cabled_to_none(sonic):
    """The last neighbour used to win. Other sources may still identify the far end."""
    answers = answers_of(sonic, lldp=True)
    own = dict(answers["host1"].own)
    decoded = json.loads(own["lldp"])
    other = {
        "chassis": {"rtsw2": {"id": {"type": "mac", "value": "b8:59:9f:00:00:02"}}},
        "port": {"descr": "Ethernet0"},
    }
    decoded["lldp"]["interface"].append({"rail0": other})
    answers["host1"] = Answers(own={**own, "lldp": json.dumps(decoded)})
    inventory_draft = drafted(answers, "sonic")
    (gap,) = inventory_draft.gaps
    assert gap.place == "host1:rail0"
    assert "rtsw1.example.net (Ethernet0, etp1); rtsw2 (Ethernet0)" in gap.what
    rnic = inventory_draft.tree["all"]["children"]["hosts"]["hosts"]["host1"]["faultbed_rnics"][0]
    assert rnic["switch"] == "rtsw1", "that switch hears only host1"


def test_discover_bmc_without_an_address_is_none():
    assert machine_of("a", Answers(own={"bmc": "IP Address              : 0.0.0.0\n"})).bmc is None


def test_discover_two_equally_near_gpus_are_ambiguous():
    own = {
        "rdma": '[{"ifname": "mlx5_0", "netdev": "a"}]',
        "device": "mlx5_0 /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0",
        "pci": "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:19:00.0\n"
        "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:1a:00.0\n/sys/devices/pci0000:37/0000:37:01.0/0000:3b:00.0",
        "gpu": "0, NVIDIA H100 PCIe, 00000000:19:00.0\n1, NVIDIA H100 PCIe, 00000000:1A:00.0\nrubbish",
    }
    host = machine_of("a", Answers(own=own))
    assert [gpu.kind for gpu in host.gpus] == ["h100-pcie", "h100-pcie"]
    assert gpu_beside(host, "0000:18:00.0") is None
    assert gpu_beside(replace(host, gpus=host.gpus[:1]), "0000:18:00.0") == host.gpus[0]
    far = {"gpu": "0, NVIDIA H200, 00000000:3B:00.0"}
    assert gpu_beside(machine_of("a", Answers(own=own | far)), "0000:18:00.0") is None


def test_discover_answer_is_split_into_its_sections():
    reported = "@@ip\n[]\n@@ssh\nx\n@@namespace rtsw1\n@@ip\n[1]\n@@end\n"
    assert split("a", reported) == Answers(own={"ip": "[]", "ssh": "x"}, namespaces={"rtsw1": {"ip": "[1]"}})
    with pytest.raises(LabError, match=r"host1: .*ends in its section 'ip'"):
        split("host1", "@@ip\n[")


def test_discover_script_is_posix_shell(tmp_path):
    """The script also runs on this machine, where missing tools print nothing."""
    import subprocess

    done = subprocess.run(["sh", "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    machine_of("here", split("here", done.stdout))
    assert done.stderr == ""


def test_discover_machines_can_be_named_by_hand():
    name, way = live.parse_seed("rtsw1=admin@192.0.2.101:2222")
    assert (name, way.address, way.user, way.port) == ("rtsw1", "192.0.2.101", "admin", 2222)
    assert live.parse_seed("host1=h1.example.net")[1].port is None
    for wrong in ("host1", "host1=", "=a", "host1=a@b@c"):
        with pytest.raises(UsageError, match="NAME="):
            live.parse_seed(wrong)
    assert list(live.parse_seeds(["host1=192.0.2.11", "host2=192.0.2.12"])) == ["host1", "host2"]
    with pytest.raises(UsageError, match="host1 is named twice"):
        live.parse_seeds(["host1=192.0.2.11", "host1=192.0.2.12"])


JUNK = st.sampled_from(
    [None, True, -1, 1e308, "", "N/A", "\x1b[31m", [], [None], [[]], {}, {"value": []}, {"a": {"b": 1}}]
)


def changed(data, value):
    """Return a JSON value in which one part, drawn by `data`, is replaced or removed."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        copy = value.copy()
        if data.draw(st.booleans()):
            copy[key] = changed(data, value[key])
        else:
            del copy[key]
        return copy
    return data.draw(JUNK)


def documents(text):
    """Yield the JSON documents of a text: iproute2 prints one for each of its commands."""
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        yield value
        text = text[end:]


@settings(max_examples=samples(300))
@given(data=st.data())
def test_discover_unexpected_structure_is_an_error_that_names_the_tool(data):
    """A new version of a tool must not cause a traceback or an invented fact."""
    whole = RACK_ANSWERS[data.draw(st.sampled_from(sorted(RACK_ANSWERS)))]
    structured = [name for name, text in whole.own.items() if text.startswith(("[", "{"))]
    section = data.draw(st.sampled_from(structured))
    values = list(documents(whole.own[section]))
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = changed(data, values[place])
    text = "\n".join(map(json.dumps, values))
    try:
        machine = machine_of("m", replace(whole, own={**whole.own, section: text}))
    except LabError as error:
        assert re.match(r"m: [a-z -]+.* prints output that cannot be read", str(error))
        return
    before = machine_of("m", whole)
    assert {name for name, _ in machine.rdma} <= {name for name, _ in before.rdma} | {"", "N/A", "N", "\x1b[31m"}
    assert all(isinstance(name, str) for name in machine.own.interfaces)


RACK_ANSWERS = answers_of(inventory_module.load(shipped.inventories() / "rack-h100.example.yml"), lldp=True)


def linked(*interfaces):
    """Return what `ip -d -j addr show` prints of (name, addresses, further keys)."""
    return [
        {
            "ifname": name,
            "link_type": "ether",
            "address": f"02:00:00:00:00:{index:02x}",
            "mtu": 9000,
            "addr_info": [
                {
                    "family": "inet6" if ":" in address else "inet",
                    "local": address.partition("/")[0],
                    "prefixlen": int(address.partition("/")[2]),
                }
                for address in addresses
            ],
            **more,
        }
        for index, (name, addresses, more) in enumerate(interfaces)
    ]


BOND, BRIDGE, VLAN = ({"linkinfo": {"info_kind": kind}} for kind in ("bond", "bridge", "vlan"))
PORT = ("ens1f0", [], {})
V4 = "192.0.2.5 50000 192.0.2.11 22"


@pytest.mark.parametrize(
    ("ssh", "interfaces"),
    [
        (V4, [("ens1f0", ["192.0.2.11/24"], {})]),
        ("2001:db8::5 50000 2001:db8::11 22", [("ens1f0", ["2001:db8:0::11/64"], {})]),
        ("::ffff:192.0.2.5 50000 ::ffff:192.0.2.11 22", [("ens1f0", ["192.0.2.11/24"], {})]),
        ("fe80::5%ens1f0 50000 fe80::11%ens1f0 22", [("ens1f0", [], {}), ("eno1", ["fe80::11/64"], {})]),
        (V4, [("bond0", ["192.0.2.11/24"], BOND), ("ens1f0", [], {"master": "bond0"})]),
        (V4, [PORT, ("ens1f0.10", ["192.0.2.11/24"], VLAN)]),
        (V4, [PORT, ("front", ["192.0.2.11/24"], {"link": "ens1f0", **VLAN})]),
        (V4, [("br0", ["192.0.2.11/24"], BRIDGE), ("ens1f0", [], {"master": "br0"})]),
        (
            "2001:db8::5 50000 2001:db8::11 22",
            [
                ("br0", ["2001:db8::11/64"], BRIDGE),
                ("bond0.7", [], {"link": "bond0", "master": "br0", **VLAN}),
                ("bond0", [], BOND),
                ("ens1f0", [], {"master": "bond0"}),
            ],
        ),
    ],
)
def test_discover_rnic_that_carries_ssh_is_not_of_the_back_end(ssh, interfaces):
    """Whatever is between SSH's address and the port: address family, bond, bridge, VLAN."""
    rails = [("rail0", ["10.77.1.1/31"], {}), ("rail1.5", ["10.77.1.3/31"], VLAN), ("rail1", [], {})]
    ports = (("mlx5_0", "ens1f0"), ("mlx5_1", "rail0"), ("mlx5_2", "rail1"))
    rdma = [{"ifname": name, "port": 1, "netdev": netdev} for name, netdev in ports]
    own = {"ip": json.dumps(linked(*interfaces, *rails)), "rdma": json.dumps(rdma), "ssh": ssh, "os": "ubuntu"}
    machine = machine_of("host1", Answers(own=own))
    assert machine.rdma == (("mlx5_1", "rail0"), ("mlx5_2", "rail1"))
    assert "SSH uses" in machine.excluded_rnics["mlx5_0"]
