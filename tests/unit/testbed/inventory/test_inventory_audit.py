"""Tests of `faultbed inventory check`, of the rack example and of the schema for editors."""

import copy
import dataclasses
import json
import socket
import threading

import pytest
import yaml
from jsonschema import Draft202012Validator

from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory import ansible_listing, json_schema, rack_preset
from faultbed.testbed.inventory import audit as inventory_audit
from faultbed.testbed.inventory.audit import audit, unreachable
from faultbed.testbed.inventory.lab_inventory import Management, load
from faultbed.testbed.inventory.rules.unsupported_parts import UNSUPPORTED
from faultbed.testbed.inventory.schema import BmcVars, PduVars
from faultbed.testbed.shipped import inventories, playbooks

RACK = inventories() / "rack-h100.example.yml"
LISTING = {}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    LISTING.update(ansible_listing.listing(RACK))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTBED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def findings(monkeypatch):
    """Return (place, problem) of each finding after an edit of the rack example's variables."""

    def audit_edited(edit):
        answer = copy.deepcopy(LISTING)
        hosts = answer["_meta"]["hostvars"]
        edit(hosts)
        monkeypatch.setattr(inventory_audit, "listing", lambda _path: answer)
        result = audit(RACK)
        assert all(finding.do for finding in result)
        return [(finding.place, finding.what) for finding in result]

    return audit_edited


def everywhere(name, change):
    """Return an edit that sets a variable of every node."""

    def edit(hosts):
        for variables in hosts.values():
            if "faultbed_schema" in variables:
                change(variables[f"faultbed_{name}"])

    return edit


def port(hosts, switch, index):
    return hosts[switch]["faultbed_ports"][index]


def rnic(hosts, host, index):
    return hosts[host]["faultbed_rnics"][index]


def put(target, **values):
    target.update(values)


@pytest.mark.process
def test_audit_of_shipped_inventories_finds_nothing():
    for path in sorted(inventories().glob("*.yml")):
        assert audit(path) == [], path


@pytest.mark.process
def test_audit_accepts_one_mac_on_all_ports_of_a_switch(findings):
    """SONiC uses the MAC of the switch for all its ports."""

    def as_sonic(hosts):
        for name in ("rtsw1", "rtsw2", "ctsw1"):
            for one in hosts[name]["faultbed_ports"]:
                one["mac"] = port(hosts, name, 0)["mac"]

    assert findings(as_sonic) == []


def test_audit_accepts_rails_without_uplinks(findings):
    """If no switch has an uplink, the lab is built that way, and no cable is missing."""

    def edit(hosts):
        for name in ("rtsw1", "rtsw2"):
            hosts[name]["faultbed_ports"] = hosts[name]["faultbed_ports"][:16]
        for number in range(1, 5):
            hosts[f"ctsw{number}"]["faultbed_ports"] = []

    assert findings(edit) == []


def test_audit_accepts_two_machines_behind_one_forwarded_address(findings):
    """The two machines differ by port. A machine may also be reached at its own front end."""

    def edit(hosts):
        put(hosts["host1"], ansible_host="192.0.2.250", ansible_port=2201)
        put(hosts["host2"], ansible_host="192.0.2.250", ansible_port=2202)
        for variables in hosts.values():
            if "faultbed_networks" in variables:
                variables["faultbed_networks"].append({"use": "management", "prefix": "203.0.113.128/25"})
        put(hosts["host3"], ansible_host="203.0.113.133")
        put(hosts["host3"]["faultbed_front_end"], address="10.79.0.3/24")

    assert findings(edit) == []


CASES = [
    (
        "duplicate address",
        lambda h: put(rnic(h, "host2", 0), address="10.77.1.1/31"),
        "hosts.host2.rnics[0].address",
        "address 10.77.1.1 is already used at hosts.host1.rnics[0].address",
    ),
    (
        "duplicate MAC",
        lambda h: put(rnic(h, "host2", 0), mac="02:fb:01:01:01:00"),
        "hosts.host2.rnics[0].mac",
        "already used at hosts.host1.rnics[0].mac",
    ),
    (
        "a switch's one MAC on another machine",
        lambda h: [
            put(one, mac=port(h, "rtsw1", 0)["mac"]) for one in (*h["rtsw1"]["faultbed_ports"], rnic(h, "host3", 0))
        ],
        "rtsw.rtsw1.ports[0].mac",
        "already used at hosts.host3.rnics[0].mac",
    ),
    (
        "cabling that does not match",
        lambda h: put(rnic(h, "host1", 3), switch="rtsw2"),
        "rtsw.rtsw1.ports[3]",
        "names rtsw2 as its switch",
    ),
    (
        "cable that leads back to nowhere",
        lambda h: h["ctsw1"]["faultbed_ports"].pop(0),
        "rtsw.rtsw1.ports[16]",
        "has no port with peer rtsw1",
    ),
    (
        "port narrower than its RNIC",
        lambda h: put(port(h, "rtsw1", 2), mtu=4200),
        "rtsw.rtsw1.ports[2].mtu",
        "4200 bytes, but packets from host1 may have 9000",
    ),
    (
        "uplink narrower than the hosts",
        lambda h: [put(port(h, "rtsw2", 17), mtu=1500), put(port(h, "ctsw2", 1), mtu=1500)],
        "ctsw.ctsw2.ports[1].mtu",
        "1500 bytes, but packets from rtsw2 may have 9000",
    ),
    (
        "uplink with two MTUs",
        lambda h: put(port(h, "ctsw1", 0), mtu=9100),
        "ctsw.ctsw1.ports[0].mtu",
        "rtsw1's end of the cable has 9216",
    ),
    (
        "RDMA MTU that does not fit",
        lambda h: put(rnic(h, "host4", 7), mtu=4100),
        "hosts.host4.rnics[mlx5_7].mtu",
        "too few for an RDMA MTU of 4096",
    ),
    (
        "cable with two speeds",
        lambda h: put(port(h, "rtsw1", 0), speed_gbps=200),
        "hosts.host1.rnics[mlx5_0].speed_gbps",
        "is 200",
    ),
    (
        "address outside the plan",
        lambda h: put(h["host3"]["faultbed_front_end"], address="10.99.0.3/24"),
        "hosts.host3.front_end.address",
        "in no front-end network",
    ),
    (
        "one BMC for two machines",
        lambda h: put(h["host2"]["faultbed_bmc"], address="198.51.100.11"),
        "hosts.host2.bmc.address",
        "already used at hosts.host1.bmc.address",
    ),
    (
        "one management address for two machines",
        lambda h: put(h["host2"], ansible_host="192.0.2.11"),
        "host2.ansible_host",
        "SSH at 192.0.2.11 is already used at host1.ansible_host",
    ),
    (
        "jump host at a switch's address",
        lambda h: put(h["jump1"], ansible_host="192.0.2.101"),
        "jump1.ansible_host",
        "already used at rtsw1.ansible_host",
    ),
    (
        "management address in no management network",
        lambda h: put(h["rtsw1"], ansible_host="10.79.0.9"),
        "rtsw1.ansible_host",
        "in no management network",
    ),
    (
        "management address that is another host's front end",
        lambda h: put(h["host2"], ansible_host="10.79.0.1"),
        "host2.ansible_host",
        "already used at hosts.host1.front_end.address",
    ),
    (
        "template without its values",
        lambda h: put(h["host2"], ansible_host="{{ net }}.12"),
        "host2.ansible_host",
        "not an address",
    ),
    (
        "command that a playbook would run on this machine",
        lambda h: put(h["host2"]["faultbed_gpus"][0], kind="{{ lookup('pipe', 'id') }}"),
        "hosts.host2.gpus[0].kind",
        "a template is not resolved here",
    ),
    (
        "statement of Jinja in the name of a rack",
        lambda h: put(h["host2"], faultbed_rack="{% if true %}rack1{% endif %}"),
        "hosts.host2.rack",
        "a template is not resolved here",
    ),
    ("port in quotes", lambda h: put(h["host2"], ansible_port="22"), "host2.ansible_port", 'not a port "22"'),
    (
        "BMC where a machine is",
        lambda h: put(h["host2"]["faultbed_bmc"], address="192.0.2.11"),
        "hosts.host2.bmc.address",
        "BMC at 192.0.2.11 is already used at host1.ansible_host",
    ),
    (
        "BMC with a prefix length",
        lambda h: put(h["host2"]["faultbed_bmc"], address="198.51.100.12/24"),
        "hosts.host2.bmc.address",
        "not an address",
    ),
    (
        "PDU where a switch is",
        everywhere("pdus", lambda pdus: pdus[1].update(address="192.0.2.101")),
        "all.pdus[1].address",
        "PDU at 192.0.2.101 is already used at rtsw1.ansible_host",
    ),
    (
        "two PDUs of one name",
        everywhere("pdus", lambda pdus: pdus[1].update(name="pdu1a")),
        "all.pdus[1].name",
        "PDU pdu1a is already",
    ),
    (
        "switch that nothing leads to",
        lambda h: [
            h["rtsw2"].update(faultbed_ports=h["rtsw2"]["faultbed_ports"][:16]),
            *(h[f"ctsw{number}"]["faultbed_ports"].pop(1) for number in range(1, 5)),
        ],
        "rtsw.rtsw2.ports",
        "no uplinks lead from rtsw2 (host3, host4) to rtsw1",
    ),
    (
        "subnet of one cable within another's",
        lambda h: [
            put(port(h, "rtsw1", 0), address="10.77.1.50/24"),
            put(rnic(h, "host1", 0), address="10.77.1.1/24", gateway="10.77.1.50"),
        ],
        "rtsw.rtsw1.ports[1].address",
        "its subnet 10.77.1.2/31 overlaps 10.77.1.0/24 of rtsw.rtsw1.ports[0].address",
    ),
    (
        "front ends of two lengths",
        lambda h: put(h["host1"]["faultbed_front_end"], address="10.79.0.1/25"),
        "hosts.host1.front_end.address",
        "overlaps 10.79.0.0/24",
    ),
    (
        "address of a whole subnet",
        lambda h: put(h["host1"]["faultbed_front_end"], address="10.79.0.255/24"),
        "hosts.host1.front_end.address",
        "first or last address of its subnet",
    ),
    (
        "loopback that draws others' traffic",
        lambda h: put(h["rtsw1"], faultbed_loopback="10.78.0.1/24"),
        "rtsw.rtsw1.loopback",
        "all of its /24",
    ),
    ("AS 0", lambda h: put(h["rtsw2"], faultbed_asn=0), "rtsw.rtsw2.asn", "1 to 4294967294"),
    ("AS too large", lambda h: put(h["rtsw2"], faultbed_asn=2**40), "rtsw.rtsw2.asn", "1 to 4294967294"),
    ("no VLAN", everywhere("networks", lambda n: n[1].update(vlan=4095)), "all.networks[1].vlan", "4095 is not a VLAN"),
    ("MTU of nothing", lambda h: put(port(h, "rtsw1", 0), mtu=0), "rtsw.rtsw1.ports[0].mtu", "not 0"),
    ("MTU of too much", lambda h: put(rnic(h, "host1", 0), mtu=90000), "hosts.host1.rnics[0].mtu", "not 90000"),
    ("speed backwards", lambda h: put(rnic(h, "host1", 0), speed_gbps=-4), "hosts.host1.rnics[0].speed_gbps", "not -4"),
    (
        "PCIe address in capitals",
        lambda h: put(rnic(h, "host1", 1), pcie="0000:2A:00.0"),
        "hosts.host1.rnics[1].pcie",
        "is not a PCIe address",
    ),
    (
        "PCIe address that YAML reads as a number",
        lambda h: put(rnic(h, "host1", 1), pcie=1080.0),
        "hosts.host1.rnics[1].pcie",
        "put it in quotes",
    ),
    (
        "name that a shell would run",
        lambda h: [put(rnic(h, "host1", 0), name="x;reboot"), put(port(h, "rtsw1", 0), rnic="x;reboot")],
        "hosts.host1.rnics[0].name",
        "is not a device name",
    ),
    (
        "name that leads out of a folder",
        lambda h: [put(one, faultbed_name="../lab") for one in h.values() if "faultbed_name" in one],
        "hosts.host1.name",
        "not a lab's name",
    ),
    (
        "number for a version",
        everywhere("golden", lambda one: one["rnic_firmware"].update(MT_0000000838=28.39)),
        "hosts.host1.golden.rnic_firmware[...]",
        "expected str, got float",
    ),
    (
        "CNPs among the data",
        everywhere("qos", lambda qos: qos.update(cnp_dscp=26, pfc_priorities=[])),
        "all.qos.cnp_dscp",
        "share priority 3",
    ),
    (
        "everybody's traffic paused",
        everywhere("dscp_map", lambda lines: lines[0].update(priority=3)),
        "all.qos.pfc_priorities",
        "(DSCP 0) is in priority 3",
    ),
    ("no time", everywhere("qos", lambda qos: qos.update(pfc_watchdog_ms=0)), "all.qos.pfc_watchdog_ms", "0 ms"),
    (
        "collective that no program measures",
        everywhere("busbw", lambda lines: lines[0].update(collective="allreduce")),
        "all.busbw[0].collective",
        'no collective "allreduce"',
    ),
    ("rate below nothing", everywhere("busbw", lambda b: b[0].update(ranks=1)), "all.busbw[0]", "is no bound"),
    (
        "seed of more than 32 bits",
        lambda h: [put(one, faultbed_ecmp_hash_seed=2**40) for one in h.values() if "faultbed_name" in one],
        "all.ecmp_hash_seed",
        "32 bits",
    ),
    (
        "fault without end",
        everywhere("safety", lambda one: one.update(longest_fault_s=float("inf"))),
        "hosts.host1.safety.longest_fault_s",
        "inf is not a finite number",
    ),
    (
        "one outlet for two machines",
        lambda h: put(h["host2"]["faultbed_power"][0], outlet=1),
        "hosts.host2.power[0]",
        "outlet pdu1a:1 is already used at hosts.host1.power[0]",
    ),
    (
        "outlet that is not there",
        lambda h: put(h["host2"]["faultbed_power"][0], outlet=99),
        "hosts.host2.power[0]",
        "1 to 24",
    ),
    (
        "no such PDU",
        lambda h: put(h["host2"]["faultbed_power"][0], pdu="pdu9"),
        "hosts.host2.power[0]",
        'no PDU "pdu9"',
    ),
    ("no such GPU", lambda h: put(rnic(h, "host1", 0), gpu="gpu9"), "hosts.host1.rnics[mlx5_0].gpu", 'no GPU "gpu9"'),
    (
        "one PCIe address for two devices",
        lambda h: put(rnic(h, "host1", 1), pcie="0000:18:00.0"),
        "hosts.host1.rnics[1].pcie",
        "already used at hosts.host1.rnics[0].pcie",
    ),
    (
        "PFC beside RoCE",
        everywhere("qos", lambda qos: qos.update(pfc_priorities=[4])),
        "all.qos.pfc_priorities",
        "RoCE is in priority 3, but PFC pauses only [4]",
    ),
    (
        "CNPs that are paused",
        everywhere("qos", lambda qos: qos.update(pfc_priorities=[3, 6])),
        "all.qos.cnp_dscp",
        "CNPs are in priority 6, which PFC pauses",
    ),
    (
        "no headroom",
        everywhere("qos", lambda qos: qos.update(buffer={"xon_kib": 19, "xoff_kib": 0})),
        "all.qos.buffer",
        "(headroom) 0",
    ),
    (
        "a share beyond what SONiC knows",
        everywhere("qos", lambda qos: qos.update(buffer={"xon_kib": 19, "xoff_kib": 160, "alpha": 9})),
        "all.qos.buffer.alpha",
        "9 is not an alpha",
    ),
    (
        "no PCIe",
        everywhere("golden", lambda one: one.update(pcie_speed_gts=30)),
        "all.golden.pcie_speed_gts",
        "30 GT/s",
    ),
    ("odd lanes", everywhere("golden", lambda one: one.update(pcie_width=12)), "all.golden.pcie_width", "12 lanes"),
    ("DCQCN without marks", everywhere("qos", lambda qos: qos.pop("ecn")), "all.qos.ecn", "no switch marks"),
    ("DSCP not in the map", everywhere("qos", lambda qos: qos.update(roce_dscp=24)), "all.qos.roce_dscp", "priority 0"),
    ("ECN upside down", everywhere("qos", lambda qos: qos["ecn"].update(min_kib=5000)), "all.qos.ecn", "is 5000"),
    (
        "networks that overlap",
        everywhere("networks", lambda networks: networks[5].update(prefix="10.77.8.0/24")),
        "all.networks[5].prefix",
        "overlaps 10.77.0.0/16",
    ),
    (
        "one VLAN twice",
        everywhere("networks", lambda n: n[1].update(vlan=10)),
        "all.networks[1].vlan",
        "VLAN 10 is already",
    ),
    ("DSCP too large", everywhere("dscp_map", lambda m: m[0].update(dscp=64)), "all.dscp_map[0].dscp", "64 is not a"),
    (
        "unknown key",
        lambda h: put(rnic(h, "host1", 0), colour="red"),
        "hosts.host1.rnics[0]",
        'unknown key "colour"',
    ),
    (
        "one node of another lab",
        lambda h: put(h["host4"], faultbed_mtu=1500),
        "hosts.host4.mtu",
        "set it once",
    ),
]


@pytest.mark.parametrize(("edit", "place", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_audit_finds_each_mistake_at_its_place(findings, edit, place, words):
    all_findings = findings(edit)
    assert any(at == place and words in message for at, message in all_findings), all_findings


def test_audit_reports_all_mistakes_at_once(findings):
    def edit(hosts):
        put(rnic(hosts, "host1", 0), mac="nonsense")
        put(rnic(hosts, "host3", 2), address="10.77.2.5/29")
        hosts["ctsw4"]["faultbed_ports"].pop()

    places = {place for place, _ in findings(edit)}
    assert {"hosts.host1.rnics[0].mac", "rtsw.rtsw2.ports[19]"} <= places
    assert any(place.startswith("hosts.host3.rnics[2]") for place in places)


@pytest.mark.process
def test_audit_reports_an_unreachable_machine(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        inventory = load(RACK)
        closed = Management(
            netdev=None, mac=None, address="127.0.0.1", port=free.getsockname()[1], user=None, private_key_file=None
        )
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            open_ = dataclasses.replace(closed, port=listener.getsockname()[1])
            object.__setattr__(inventory, "management", {"host1": closed, "host2": open_})
            for name, none in (("jump", None), ("bmcs", {}), ("pdus", ())):
                object.__setattr__(inventory, name, none)
            all_findings = unreachable(inventory)
    assert [finding.place for finding in all_findings] == ["host1.ansible_host"]
    assert unreachable(load(inventories() / "soft.yml")) == []


@pytest.mark.process
def test_audit_reports_an_unreachable_bmc_or_pdu(monkeypatch):
    """The check uses the protocol of the inventory; for IPMI it sends the same ping as ipmitool."""
    inventory = load(RACK)
    with (
        socket.create_server(("127.0.0.1", 0)) as https,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ipmi,
        socket.create_server(("127.0.0.1", 0)) as shut,
    ):
        ipmi.bind(("127.0.0.1", 0))
        open_, closed = https.getsockname()[1], shut.getsockname()[1]
        shut.close()

        def answer():
            request, asker = ipmi.recvfrom(64)
            ipmi.sendto(request, asker)

        threading.Thread(target=answer, daemon=True).start()
        here = {"address": "127.0.0.1"}
        bmcs = {"host1": BmcVars(**here), "host2": BmcVars(**here, protocol="ipmi")}
        pdus = tuple(PduVars(name=name, outlets=1, **here) for name in ("a", "b"))
        changed = dataclasses.replace(inventory, management={}, jump=None, bmcs=bmcs, pdus=pdus)
        monkeypatch.setattr(inventory_audit, "_REDFISH_PORT", open_)
        monkeypatch.setattr(inventory_audit, "_IPMI_PORT", ipmi.getsockname()[1])
        monkeypatch.setattr(inventory_audit, "_PDU_PORTS", (closed, open_))
        assert unreachable(changed) == []
        monkeypatch.setattr(inventory_audit, "_REDFISH_PORT", closed)
        monkeypatch.setattr(inventory_audit, "_IPMI_PORT", closed)
        monkeypatch.setattr(inventory_audit, "_PDU_PORTS", (closed,))
        places = ["hosts.host1.bmc.address", "hosts.host2.bmc.address", "all.pdus[a].address", "all.pdus[b].address"]
        assert [finding.place for finding in unreachable(changed)] == places
    assert len(inventory.pdus) == 4


def test_rack_example_matches_its_generator_and_size():
    assert RACK.read_text() == rack_preset.inventory_text()
    inventory = load(RACK)
    topology = inventory.topology
    assert inventory.kind == "rack"
    assert [len(host.rnics) for host in topology.hosts] == [len(host.gpus) for host in topology.hosts] == [8] * 4
    assert (len(topology.racks), len(topology.uplinks)) == (2, 8)
    assert inventory.jump is not None
    assert inventory.jump[0] == "jump1"
    assert "jump1" not in inventory.machines
    assert set(inventory.machines) == {host.name for host in topology.hosts} | set(topology.switch_by_name)


def test_schema_for_editors_is_up_to_date():
    assert (inventories() / "schema.json").read_text() == json_schema.schema_text()


@pytest.mark.parametrize("path", sorted(inventories().glob("*.yml")), ids=lambda path: path.stem)
def test_schema_accepts_the_shipped_inventories(path):
    schema = json.loads(json_schema.schema_text())
    assert refused(yaml.safe_load(path.read_text()), schema) == []


def test_schema_rejects_what_the_loader_rejects():
    schema = json.loads(json_schema.schema_text())
    tree = yaml.safe_load((inventories() / "soft-mini.yml").read_text())
    host = tree["all"]["children"]["hosts"]["hosts"]["host1"]
    for edit in (
        lambda: host.update(faultbed_rnic=[]),
        lambda: host["faultbed_rnics"][0].update(colour="red"),
        lambda: host["faultbed_rnics"][0].update(mtu="large"),
        lambda: host["faultbed_front_end"].pop("mac"),
    ):
        kept = copy.deepcopy(host)
        edit()
        assert refused(tree, schema)
        host.clear()
        host.update(kept)
    assert refused(tree, schema) == []


def refused(value, schema):
    """Return the errors of a JSON schema validator, after it has checked the schema itself."""
    Draft202012Validator.check_schema(schema)
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def test_inventory_check_command_exit_code_and_json(faultbed, tmp_path):
    good = faultbed("--lab", str(RACK), "inventory", "check", "--json")
    assert (good.returncode, json.loads(good.stdout)) == (0, [])
    tree = yaml.safe_load((inventories() / "soft-mini.yml").read_text())
    tree["all"]["children"]["hosts"]["hosts"]["host2"]["faultbed_rnics"][0]["mac"] = "02:fb:01:01:01:00"
    bad = tmp_path / "bad.yml"
    bad.write_text(yaml.safe_dump(tree, sort_keys=False))
    done = faultbed("--lab", str(bad), "inventory", "check", "--json")
    assert done.returncode == 1
    assert [finding["place"] for finding in json.loads(done.stdout)] == ["hosts.host2.rnics[0].mac"]
    assert "hosts.host2.rnics[0].mac" in faultbed("--lab", str(bad), "inventory", "check").stdout
    assert faultbed("--lab", "nowhere.yml", "inventory", "check").returncode == 4


@pytest.mark.process
def test_audit_rejects_a_file_that_is_no_inventory(tmp_path):
    path = tmp_path / "x.yml"
    path.write_text("all: {hosts: {web1: {}}}\n")
    with pytest.raises(ConfigError, match="not a faultbed inventory"):
        audit(path)


def test_misspelt_role_variable_is_reported_with_the_nearest_name(findings):
    """Ansible ignores it, and the switch would silently keep its old setting."""
    for name, nearest in (
        ("sonic_switch_laod", "sonic_switch_load"),
        ("sonic_swich_load", "sonic_switch_load"),
        ("rnic_host_dcqn", "rnic_host_dcqcn"),
    ):

        def edit(hosts, name=name):
            for switch in ("ctsw1", "ctsw2", "rtsw1", "rtsw2"):
                hosts[switch][name] = True

        what = f"no role has the variable {name} (given for ctsw1, ctsw2, rtsw1 and 1 more)"
        assert findings(edit) == [(f"ctsw1.{name}", what)]
        assert audit(RACK)[0].do == f"did you mean {nearest}?"
    for name in ("sonic_switch_load", "sonic_user", "rack_hosts_at_once", "gpu_room"):
        assert findings(lambda hosts, name=name: hosts["rtsw1"].update({name: True})) == []


def test_role_variables_are_declared_once_with_a_default():
    for role, path in {path.parent.parent.name: path for path in playbooks().glob("roles/*/defaults/main.yml")}.items():
        specs = yaml.safe_load((playbooks() / "roles" / role / "meta/argument_specs.yml").read_text())
        assert set(specs["argument_specs"]["main"]["options"]) == set(yaml.safe_load(path.read_text())), role


def test_trust_that_sonic_ignores_is_reported(findings):
    what = "pcp, but no packet has a VLAN tag on the routed ports of SONiC switches (rtsw1, rtsw2, ctsw1 and 3 more)"
    assert findings(everywhere("qos", lambda qos: put(qos, trust="pcp"))) == [("all.qos.trust", what)]


def test_cnp_in_the_class_of_unmarked_traffic_is_reported(findings):
    def edit(hosts):
        for variables in hosts.values():
            variables["faultbed_dscp_map"][2]["priority"] = 0

    what = "CNPs and unmarked traffic (DSCP 0) share priority 0, so that CNPs wait behind it"
    assert findings(edit) == [("all.qos.cnp_dscp", what)]


def numbered(hosts, *, near="10.81.0.0/31", far="10.81.0.1/31"):
    """Give the uplink between rtsw1 and ctsw1 addresses, as SONiC's factory configuration has them."""
    for switch, peer, address in (("rtsw1", "ctsw1", near), ("ctsw1", "rtsw1", far)):
        uplink = next(port for port in hosts[switch]["faultbed_ports"] if port["peer"] == peer)
        if address:
            uplink["address"] = address


def test_numbered_uplink_is_described(findings):
    assert findings(numbered) == []


@pytest.mark.parametrize(
    ("near", "far", "what"),
    [
        ("10.81.0.0/31", None, "rtsw.rtsw1.ports[16] has an address, but ctsw.ctsw1 has none"),
        ("10.81.0.0/31", "10.81.0.8/31", "10.81.0.0/31 and 10.81.0.8/31 of ctsw.ctsw1 are not the two addresses"),
        ("10.81.0.1/24", "10.81.0.2/24", "10.81.0.1/24 and 10.81.0.2/24 of ctsw.ctsw1 are not the two addresses"),
    ],
)
def test_uplink_numbered_at_one_end_only_is_reported(findings, near, far, what):
    found = findings(lambda hosts: numbered(hosts, near=near, far=far))
    assert found[0][1].startswith(what)


REFUSED = [
    *(("rnic", driver, "traffic") for driver in ("bnxt_re", "irdma", "ionic")), ("rnic", "efa", "captures"),
    ("gpu", "mi300x", "host memory"), ("gpu", "gaudi3", "host memory"), ("gpu", "max-1550", "host memory"),
    *(("switch", nos, "faults at hosts") for nos in ("eos", "nxos", "junos", "nvue", "fboss")),
]  # fmt: skip


@pytest.mark.parametrize(("part", "value", "works"), REFUSED)
def test_part_without_support_is_refused_with_what_still_works(findings, part, value, works):
    def edit(hosts):
        if part == "switch":
            hosts["ctsw1"]["faultbed_nos"] = value
        elif part == "gpu":
            hosts["host1"]["faultbed_gpus"][0]["kind"] = value
        else:
            hosts["host1"]["faultbed_rnics"][0]["driver"] = value

    ((_, what),) = findings(edit)
    assert what.startswith(f'"{value}" is ')
    assert ": faultbed does not support its " in what or "does not support traffic" in what
    (finding,) = audit(RACK)
    assert works in finding.do
    assert "still work" in finding.do


def test_every_part_without_support_has_its_row_tested():
    assert len(REFUSED) == len(UNSUPPORTED) == 12


def test_part_without_support_is_known_by_its_default_name(findings):
    def edit(hosts):
        hosts["host1"]["faultbed_rnics"][0]["name"] = "bnxt_re0"
        hosts["rtsw1"]["faultbed_ports"][0]["rnic"] = "bnxt_re0"

    ((place, what),) = findings(edit)
    assert (place, what[:24]) == ("hosts.host1.rnics[bnxt_re0].name", '"bnxt_re0" is a Broadcom')


def test_value_that_is_not_allowed_is_answered_with_the_allowed_ones(findings):
    (found,) = findings(lambda hosts: hosts["ctsw1"].update(faultbed_nos="sonik"))
    assert found == ("ctsw.ctsw1.nos", '"sonik" is not allowed; did you mean sonic?')
