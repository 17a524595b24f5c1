"""Rack code against public sources: each test states what a source says that the code once contradicted.

Sources: mstflint, sonic-swss, sonic-buildimage, sonic-utilities, DMTF's Redfish schema, recorded tool outputs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import threading
from dataclasses import replace

import pytest
from house import HOUSE

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.mechanism import Request
from faultbed.inject.mechanisms.rack import MECHANISMS, gpu, linux, resolve
from faultbed.inject.mechanisms.rack.rack_mechanism import retransmissions
from faultbed.inject.node.actuator import Refused, make
from faultbed.inject.node.network import interface
from faultbed.testbed.backends.rack import power_cycle
from faultbed.testbed.errors import Unsupported
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.inventory.schema import BmcVars, SafetyVars
from faultbed.testbed.node.asic_ports import port_counts
from faultbed.testbed.preflight import collect
from faultbed.testbed.preflight.rack_formats import link_wrong
from faultbed.testbed.shipped import inventories, playbooks

RACK = lab_inventory.load(inventories() / "rack-h100.example.yml")


def planned(kind, target, *, for_s=5.0, topology=RACK.topology, **params):
    return plan(FaultSpec(kind=kind, target=target, for_s=for_s, params=params), topology, lab_kind="rack")


def actuator(kind, target, **params):
    shot = planned(kind, target, **params)
    return make(shot.request["actuator"], dict(shot.request["args"]))


def edit(tools, **fields):
    tools.write_text(json.dumps(json.loads(tools.read_text()) | fields))


def test_rnic_port_down_at_400g_is_armed_by_its_state_line(tools):
    """mlxlink prints the physical state ETH_AN_FSM_ENABLE both for ports that are up and for ports that are down."""
    link = actuator("link.down", "host1:mlx5_0")
    assert not link.prepare()["applied"]
    link.on()
    assert "ETH_AN_FSM_ENABLE" in link.read()["said"]
    assert link.read()["applied"]
    link.off()
    assert not link.read()["applied"]


def test_rnic_port_that_firmware_keeps_up_is_refused_with_the_switch_port_instead(tools):
    edit(tools, keep_up="True(1)")
    with pytest.raises(Refused, match=r"KEEP_ETH_LINK_UP_P1=0.*rtsw1:host1:mlx5_0"):
        actuator("link.down", "host1:mlx5_0").prepare()
    assert json.loads(tools.read_text())["port"] == "Active"


@pytest.mark.parametrize("answer", ["false", ""])
def test_hash_policy_of_an_asic_that_does_not_report_the_capability_is_refused(tools, answer):
    """SWITCH_HASH begins with 202311, and Broadcom's SAI has no such capability (sonic-mgmt skips its test there)."""
    state = json.loads(tools.read_text())
    state["STATE_DB"]["SWITCH_CAPABILITY|switch"]["ECMP_HASH_CAPABLE"] = answer
    edit(tools, **state)
    with pytest.raises(Refused, match=r"cannot be changed.*Linux switch"):
        actuator("switch.hash-policy", "rtsw1").prepare()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link.oneway", "packets of the switch's CPU may pass"),
        ("link.rate", "`config apply-patch` refuses meanwhile"),
        ("packet.drop", "share 1, any opcode"),
        ("gpu.xid", "a value injected into its cache"),
    ],
)
def test_catalogue_documents_the_limits_of_each_mechanism(kind, words):
    assert words in MECHANISMS[kind].by


def test_xid_has_the_current_time_and_dcgms_number_of_the_gpu(tools):
    """dcgmi dates an injected value a second ahead, and numbers GPUs in another order than NVML."""
    xid = actuator("gpu.xid", "host1:gpu0", xid=79)
    xid.prepare()
    xid.on()
    assert xid.read()["applied"]
    assert json.loads(tools.read_text())["injected"] == {"gpuid": "1", "offset": "0"}


@pytest.mark.parametrize("lockdown", ["none [integrity] confidentiality", "[none] integrity confidentiality"])
def test_kernel_lockdown_without_mfts_driver_refuses_the_port_of_an_rnic(tools, tmp_path, lockdown):
    """kernel_lockdown(7): no access to PCI devices from user space."""
    planned_args = planned("link.down", "host1:mlx5_0").request["args"]
    (words, pattern, missing), *rest = planned_args["able"]
    (tmp_path / "lockdown").write_text(lockdown)
    words = [word.replace("/sys/kernel/security/lockdown", str(tmp_path / "lockdown")) for word in words]
    link = make("commands", {**planned_args, "able": [[words, pattern, missing], *rest]})
    if "[none]" in lockdown:
        link.prepare()
    else:
        with pytest.raises(Refused, match=r"locked down.*target the switch port"):
            link.prepare()


LINUX_BOX = lab_inventory.load(inventories() / "linux-box.example.yml").topology


@pytest.mark.parametrize(
    ("driver", "function", "keeps", "words"),
    [
        ("mlx5_core", "0000:18:00.0", "True(1)", "KEEP_ETH_LINK_UP_P1=0.*link.oneway.*other end"),
        ("mlx5_core", "0000:18:00.1", "True(1)", r"KEEP_ETH_LINK_UP_P2=0 for PCI function \.1"),
        ("mlx5_core", "0000:18:00.1", "False(0)", None),
        ("mlx5_core", "0000:18:00.2", "False(0)", "does not report"),  # no such setting: mlxconfig fails
        ("ice", "0000:18:00.0", "True(1)", None),
        (None, None, "True(1)", None),  # not a bus device, such as a bridge or a VLAN
    ],
)
@pytest.mark.parametrize("kind", ["link.down", "link.flap"])
def test_linux_switch_port_that_firmware_keeps_up_is_refused(
    tools, tmp_path, monkeypatch, kind, driver, function, keeps, words
):
    """If firmware keeps a port up, `ip link set down` changes nothing on the wire."""
    edit(tools, keep_up=keeps)
    port = LINUX_BOX.resolve("box1:ctsw1").port.netdev
    if driver is not None:
        (tmp_path / "pci" / function).mkdir(parents=True)
        (tmp_path / "pci" / function / "driver").symlink_to(f"../../drivers/{driver}")
        (tmp_path / "net" / port).mkdir(parents=True)
        (tmp_path / "net" / port / "device").symlink_to(tmp_path / "pci" / function)
    monkeypatch.setattr(linux, "SYS_NET", str(tmp_path / "net"))
    monkeypatch.setattr(interface, "management_interfaces", frozenset)  # `lo` stands for the port
    shot = planned(kind, "box1:ctsw1", topology=LINUX_BOX)
    down = make(shot.request["actuator"], dict(shot.request["args"]) | {"device": "lo"})
    try:
        if words is None:
            assert not down.prepare()["applied"]
        else:
            with pytest.raises(Refused, match=words):
                down.prepare()
    finally:
        down.close()


def test_packet_drop_by_opcode_on_an_asic_is_refused_with_a_linux_switch_instead():
    """SONiC has a match BTH_OPCODE, but does not report whether the ASIC supports it."""
    with pytest.raises(Unsupported, match=r"match an opcode.*target a Linux switch"):
        planned("packet.drop", "host1:mlx5_0", share=1, opcode="ack")
    assert "any opcode" in MECHANISMS["packet.drop"].by


def test_second_port_of_a_card_uses_its_own_setting():
    shot = planned("link.down", "host1:mlx5_0")
    assert "KEEP_ETH_LINK_UP_P1" in json.dumps(shot.request["args"]["able"])
    host = RACK.topology.host_by_name["host1"]
    second = replace(host.rnics[0], pcie="0000:18:00.1")
    hosts = tuple(replace(x, rnics=(second, *x.rnics[1:])) if x is host else x for x in RACK.topology.hosts)
    shot = planned("link.down", "host1:mlx5_0", topology=replace(RACK.topology, hosts=hosts))
    assert "KEEP_ETH_LINK_UP_P2" in json.dumps(shot.request["args"]["able"])


def test_rnic_without_pcie_address_is_refused_with_the_switch_port_instead():
    """mstflint accepts `mlx5_0` or a PCI address, but not the device names of current hosts."""
    host = RACK.topology.host_by_name["host1"]
    nameless = replace(host.rnics[0], pcie=None)
    hosts = tuple(replace(x, rnics=(nameless, *x.rnics[1:])) if x is host else x for x in RACK.topology.hosts)
    with pytest.raises(Unsupported, match=r"no pcie.*rtsw1:host1:mlx5_0"):
        planned("link.down", "host1:mlx5_0", topology=replace(RACK.topology, hosts=hosts))


def test_inbox_host_with_mstflint_alone_can_take_its_port_down(tools, tmp_path):
    """The package of the distribution has mstlink and mstconfig, but no mlxlink."""
    for old, new in (("mlxlink", "mstlink"), ("mlxconfig", "mstconfig")):
        text = (tmp_path / old).read_text().replace('"$0"', f'"$(dirname "$0")/{old}"')
        (tmp_path / new).write_text(text)
        (tmp_path / new).chmod(0o755)
        (tmp_path / old).unlink()
    link = actuator("link.down", "host1:mlx5_0")
    link.prepare()
    link.on()
    assert link.read()["applied"]
    link.off()
    assert "{ml" not in link.revert_script()


@pytest.mark.parametrize(
    ("kind", "target", "for_s", "params", "words"),
    [
        ("link.flap", "host1:mlx5_0", 5.0, {"period": 2}, "over 2 s"),
        ("link.down", "host1:mlx5_0", 1.0, {}, "over 2 s"),
        ("link.flap", "rtsw1:host1:mlx5_0", 5.0, {"period": 0.1}, "about a second"),
        ("link.oneway", "host1:mlx5_0", 2.0, {}, "once a second"),
        ("packet.drop", "host1:mlx5_0", 2.0, {"share": 1}, "once a second"),
    ],
)
def test_fault_faster_than_its_tool_is_rejected(kind, target, for_s, params, words):
    with pytest.raises(Unsupported, match=words):
        planned(kind, target, for_s=for_s, **params)


FORBIDDEN = {"pairwise": "itertools.pairwise", "bit_count": "int.bit_count"}


def later_than_3_9(path):
    """Return the parts of a module's text that Python 3.9 does not support."""
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = {word.arg for word in node.keywords}
            if name == "zip" and "strict" in words:
                yield f"{path.name}:{node.lineno}: zip(strict=)"
            if name.endswith("dataclass") and words & {"slots", "kw_only"}:
                yield f"{path.name}:{node.lineno}: dataclass({words})"
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            yield f"{path.name}:{node.lineno}: {FORBIDDEN[node.attr]}"
        if isinstance(node, ast.Match):
            yield f"{path.name}:{node.lineno}: match"


def test_code_that_runs_on_switches_is_python_3_9():
    """SONiC up to 202311 is Debian bullseye (sonic-buildimage, slave.mk)."""
    paths = [*(HOUSE / "testbed/node").rglob("*.py"), *(HOUSE / "inject/node").rglob("*.py")]
    assert len(paths) > 20
    assert [wrong for path in paths for wrong in later_than_3_9(path)] == []


def interval(tools):
    return json.loads(tools.read_text())["CONFIG_DB"]["FLEX_COUNTER_TABLE|ACL"]["POLL_INTERVAL"]


def test_acl_counters_are_polled_every_second_while_any_acl_fault_is_on(tools):
    """aclorch polls every 10 s, so a shorter fault would count nothing. The last ACL fault restores the interval."""
    one, two = actuator("link.oneway", "host1:mlx5_0"), actuator("packet.drop", "host1:mlx5_0", share=1)
    one.prepare()
    one.on()
    assert interval(tools) == "1000"
    two.prepare()
    two.on()
    one.off()
    assert interval(tools) == "1000"
    two.off()
    assert interval(tools) == "10000"


def test_acl_of_a_switch_that_does_not_count_acls_is_refused(tools):
    state = json.loads(tools.read_text())
    state["CONFIG_DB"]["FLEX_COUNTER_TABLE|ACL"]["FLEX_COUNTER_STATUS"] = "disable"
    edit(tools, **state)
    with pytest.raises(Refused, match="counterpoll acl enable"):
        actuator("link.oneway", "host1:mlx5_0").prepare()


def test_acl_already_active_is_refused(tools):
    """`^(None)?$` used to match every answer that ends in a newline."""
    oneway = actuator("link.oneway", "host1:mlx5_0")
    oneway._applied, oneway._settle_s = "^never$", 0.2
    oneway.on()
    with pytest.raises(Refused, match="unexpected state"):
        oneway.prepare()


def test_withdraw_on_sonic_removes_the_line_of_our_own_role(tools):
    """TSC handles only route-maps named V4 or V6, and the role's route-map is named FAULTBED."""
    withdraw = actuator("switch.withdraw", "rtsw1")
    assert not withdraw.prepare()["applied"]
    withdraw.on()
    assert not json.loads(tools.read_text())["redistributes"]
    script = withdraw.revert_script()
    subprocess.run(["sh"], input=script, text=True, check=True, timeout=60)
    assert json.loads(tools.read_text())["redistributes"]
    edit(tools, redistributes=False)
    with pytest.raises(Refused, match="another role has configured it"):
        actuator("switch.withdraw", "rtsw1").prepare()


def test_bgp_kill_holds_and_its_revert_is_not_stopped_by_the_start_limit(tools):
    """The container restarts by itself after 30 s, and systemd refuses a fourth start within 20 minutes."""
    for starts in (1, 3):
        edit(tools, starts=starts)
        kill = actuator("switch.bgp-kill", "rtsw1")
        kill.prepare()
        kill.on()
        assert json.loads(tools.read_text())["CONFIG_DB"]["FEATURE|bgp"]["auto_restart"] == "disabled"
        assert kill.read()["applied"]
        kill.off()
        assert not kill.read()["applied"]
        assert json.loads(tools.read_text())["CONFIG_DB"]["FEATURE|bgp"]["auto_restart"] == "enabled"


def test_bgp_kill_is_refused_if_the_restart_cannot_be_disabled(tools):
    state = json.loads(tools.read_text())
    state["CONFIG_DB"]["FEATURE|bgp"]["auto_restart"] = "always_enabled"
    edit(tools, **state)
    with pytest.raises(Refused, match="always_enabled"):
        actuator("switch.bgp-kill", "rtsw1").prepare()


def test_bgp_kill_leaves_pid_1_the_time_that_a_container_needs():
    from faultbed.inject.leases.channels import START_S, unit_command

    words = unit_command(planned("switch.bgp-kill", "rtsw1"), ["python3"], instance="x")
    assert f"TimeoutStopSec={START_S + 60:g}" in words


def test_link_rate_is_refused_where_a_rejected_scheduler_would_end_orchagent(tools):
    edit(tools, asic="cisco-8000")
    with pytest.raises(Refused, match=r"orchagent ends.*Linux switch"):
        actuator("link.rate", "host1:mlx5_0", rate=100).prepare()


def test_link_rate_is_armed_by_the_asics_state_and_not_by_the_configuration(tools, monkeypatch):
    rate = actuator("link.rate", "host1:mlx5_0", rate=100)
    rate.prepare()
    rate.on()
    assert rate.read()["applied"]
    state = json.loads(tools.read_text())
    name = next(key for key in state["CONFIG_DB"] if key.startswith("SCHEDULER|"))
    del state["CONFIG_DB"][name]  # the port's entry names it, but orchagent has not created it
    edit(tools, **state)
    assert not rate.read()["applied"]


def test_hash_policy_on_sonic_is_witnessed_by_the_asics_own_counters():
    """The kernel's tx_packets of a front panel port are those of the switch's CPU."""
    shot = planned("switch.hash-policy", "rtsw1")
    keys = [key for witness in shot.mechanism.must_move for key in witness.any_of]
    assert keys
    assert all(key.endswith(".asic_tx_packets") for key in keys)


PORTS = {"Ethernet0": ("oid:0x1", ["10", "2", "70", "5", "0", "1"]), "Ethernet8": ("oid:0x2", [None] * 6)}


def redis(path, *, cut=None):
    """Serve one connection as redis with SONiC's tables (RESP2), and end it after `cut` bytes."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def bulk(text):
        return b"$-1\r\n" if text is None else b"$%d\r\n%s\r\n" % (len(text.encode()), text.encode())

    def array(items):
        return b"*%d\r\n" % len(items) + b"".join(map(bulk, items))

    def serve():
        connection, _ = server.accept()
        with connection, server:
            output = array([word for name, (oid, _) in PORTS.items() for word in (name, oid)])
            text = b"+OK\r\n" + output
            connection.recv(65536)
            connection.sendall(text[:cut])
            if cut is None:
                connection.recv(65536)
                connection.sendall(b"".join(array(values) for _, values in PORTS.values()))

    threading.Thread(target=serve, daemon=True).start()


def test_asic_counters_are_read_by_port_name(tmp_path):
    redis(tmp_path / "redis.sock")
    assert dict(port_counts(str(tmp_path / "redis.sock"))) == {
        "Ethernet0.asic_rx_packets": 12,
        "Ethernet0.asic_tx_packets": 75,
        "Ethernet0.asic_rx_dropped": 0,
        "Ethernet0.asic_tx_dropped": 1,
    }


@pytest.mark.parametrize("cut", [0, 3, 5, 9, 20, 40])
def test_asic_counters_of_truncated_output_are_none(tmp_path, cut):
    redis(tmp_path / "redis.sock", cut=cut)
    assert dict(port_counts(str(tmp_path / "redis.sock"))) == {}


def test_machine_without_redis_has_no_asic_counters(tmp_path):
    assert dict(port_counts(str(tmp_path / "nothing"))) == {}


def test_silence_is_also_witnessed_by_adaptive_retransmission():
    """Adaptive retransmission is the first counter to move on a ConnectX with default registers."""
    assert "host1/mlx5_0.roce_adp_retrans" in retransmissions(["host1/mlx5_0"])


@pytest.fixture
def sonic_switch(program):
    return program("sonic_switch")


POOLS = {"in": {"mode": "dynamic", "size": "100"}, "out": {"mode": "static", "size": "32340992"}}


def profiles():
    return {
        "BUFFER_PROFILE": {
            "FAULTBED_LOSSLESS_IN": {"pool": "in", "size": "1", "xoff": "1", "dynamic_th": "0"},
            "FAULTBED_LOSSLESS_OUT": {"pool": "out", "size": "0", "dynamic_th": "3"},
        }
    }


def test_buffer_profile_takes_the_threshold_of_its_pools_mode(sonic_switch):
    """A dynamic threshold on Broadcom's static egress pool is rejected, and ends orchagent up to 202411."""
    tables = profiles()
    assert sonic_switch.fit_pools(tables, {"BUFFER_POOL": POOLS}) == []
    out = tables["BUFFER_PROFILE"]["FAULTBED_LOSSLESS_OUT"]
    assert out == {"pool": "out", "size": "0", "static_th": "32340992"}
    assert tables["BUFFER_PROFILE"]["FAULTBED_LOSSLESS_IN"]["dynamic_th"] == "0"


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({}, "no buffer pool in: the switch has none"),
        (POOLS | {"in": POOLS["out"]}, "needs a dynamic one"),
        (POOLS | {"out": {"mode": "static"}}, "has no size"),
        (POOLS | {"out": {}}, "neither static nor dynamic"),
    ],
)
def test_buffer_pool_that_does_not_fit_is_reported_before_anything_is_loaded(sonic_switch, pools, words):
    assert words in "; ".join(sonic_switch.fit_pools(profiles(), {"BUFFER_POOL": pools}))


def test_preflight_gives_mlxlink_the_pci_address(tmp_path):
    """mstflint does not find names such as rocep24s0."""
    lines = [line for line in collect.script(RACK, "host1").splitlines() if "raw mlxlink" in line]
    assert lines
    assert all("readlink -f" in line and "-d ${at##*/} -c" in line and "mstlink" in line for line in lines)
    assert "mstflint" in (playbooks() / "roles/rdma_stack/defaults/main.yml").read_text()


CURL = """\
#!/bin/sh
echo "$@" >>{said}
[ ! -e {house}/denied ] || {{ echo "curl: (22) The requested URL returned error: 401" >&2; exit 22; }}
for word; do case $word in
*/Systems) cat {house}/systems.json;;
*/Actions/*) ;;
*/Systems/*) cat {house}/system.json;;
esac; done
"""


def collection(*names):
    return {"Members": [{"@odata.id": f"/redfish/v1/Systems/{name}"} for name in names]}


def system(name, *offers):
    reset = {"target": f"/redfish/v1/Systems/{name}/Actions/ComputerSystem.Reset"}
    if offers:
        reset["ResetType@Redfish.AllowableValues"] = list(offers)
    return {"Actions": {"#ComputerSystem.Reset": reset}, "PowerState": "On"}


@pytest.fixture
def bmc(tmp_path, monkeypatch):
    """Run the planned commands in one shell against a BMC of files; return curl's arguments and the shell's result."""
    (tmp_path / "curl").write_text(CURL.format(said=tmp_path / "said", house=tmp_path))
    (tmp_path / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def cycle(systems, one, **fields):
        (tmp_path / "systems.json").write_text(json.dumps(systems))
        (tmp_path / "system.json").write_text(json.dumps(one))
        (tmp_path / "said").write_text("")
        lab = replace(
            RACK,
            safety=SafetyVars(power_cycle="after-heal", may_disrupt=["host?"]),
            bmcs={"host1": BmcVars(address="198.51.100.11", **fields)},
        )
        commands = power_cycle.plan(lab, "host1", dirty=True).commands
        done = subprocess.run(
            ["bash", "-e"], input="\n".join(commands), text=True, check=False, timeout=60, capture_output=True
        )
        return done, (tmp_path / "said").read_text()

    return cycle


@pytest.mark.parametrize(
    ("systems", "name", "offers", "wanted"),
    [
        (collection("1"), "1", ["On", "ForceOff", "ForceRestart", "PowerCycle"], "PowerCycle"),
        (collection("System.Embedded.1"), "System.Embedded.1", ["On", "ForceRestart", "PowerCycle"], "PowerCycle"),
        (collection("DGX", "HGX_Baseboard_0"), "DGX", ["On", "GracefulShutdown", "ForceRestart"], "ForceRestart"),
        (collection("1"), "1", [], "ForceRestart"),
    ],
)
def test_power_cycle_finds_the_system_and_uses_the_best_reset_it_offers(bmc, systems, name, offers, wanted):
    done, output = bmc(systems, system(name, *offers))
    assert done.returncode == 0, done.stderr
    (post,) = [line for line in output.splitlines() if "POST" in line]
    assert f'{{"ResetType": "{wanted}"}}' in post
    assert post.endswith(f"https://198.51.100.11/redfish/v1/Systems/{name}/Actions/ComputerSystem.Reset")


@pytest.mark.parametrize(
    ("systems", "offers", "words"),
    [
        (collection("node1", "node2"), ["PowerCycle"], "2 systems.*faultbed_bmc.system"),
        (collection(), ["PowerCycle"], "0 systems"),
        (collection("1"), ["On", "Nmi"], "neither PowerCycle nor ForceRestart"),
    ],
)
def test_power_cycle_of_a_bmc_that_is_not_clear_posts_nothing(bmc, systems, offers, words):
    done, output = bmc(systems, system("1", *offers))
    assert done.returncode != 0
    assert re.search(words, done.stderr)
    assert "POST" not in output


def test_power_cycle_with_a_wrong_password_is_one_sentence(bmc, tmp_path):
    (tmp_path / "denied").touch()
    done, output = bmc(collection("1"), system("1", "PowerCycle"))
    assert done.returncode != 0
    assert done.stderr == "curl: (22) The requested URL returned error: 401\n"
    assert "POST" not in output
    (tmp_path / "denied").unlink()
    (tmp_path / "curl").write_text("#!/bin/sh\necho '<html>'\n")
    done, _ = bmc(collection("1"), system("1", "PowerCycle"))
    assert done.stderr == "the BMC did not answer in JSON: <html>\n"


def test_power_cycle_of_a_named_system_with_the_labs_own_authority(bmc):
    done, output = bmc(collection("a", "b"), system("b", "PowerCycle"), system="b", cacert="/etc/lab ca.pem")
    assert done.returncode == 0, done.stderr
    assert all("--cacert /etc/lab ca.pem" in line for line in output.splitlines())
    assert "/redfish/v1/Systems/b/Actions/" in output


def test_firmware_settings_are_read_from_three_columns(program):
    """`mlxconfig -e query` has default, current and next boot, as mstflint's printSingleParam prints them."""
    read = program("rnic_host").firmware_settings
    wide = (
        "Configurations:                                          Default             Current             Next Boot\n"
        "        MEMIC_BAR_SIZE                                  0                   0                   0         \n"
        "*       ROCE_ADAPTIVE_ROUTING_EN                        False(0)            False(0)            True(1)   \n"
        " RO     SRIOV_EN                                        True(1)             True(1)             True(1)   \n"
    )
    assert read(wide) == {"MEMIC_BAR_SIZE": "0", "ROCE_ADAPTIVE_ROUTING_EN": "1", "SRIOV_EN": "1"}
    narrow = "Configurations:                    Next Boot\n        SRIOV_EN              True(1)    \n"
    assert read(narrow) == {"SRIOV_EN": "1"}


@pytest.mark.parametrize(("asic", "named"), [("mellanox", True), ("barefoot", True), ("broadcom", False)])
def test_pause_groups_are_named_on_the_asics_that_have_such_a_map(sonic_switch, asic, named):
    tables = {"PORT_QOS_MAP": {"Ethernet0": {"pfc_enable": "3"}}, "PFC_WD": {}}
    sonic_switch.pause_groups(tables, asic)
    assert ("pfc_to_pg_map" in tables["PORT_QOS_MAP"]["Ethernet0"]) == named
    assert ("PFC_PRIORITY_TO_PRIORITY_GROUP_MAP" in tables) == named
    if named:
        order = list(tables)
        assert order.index("PFC_PRIORITY_TO_PRIORITY_GROUP_MAP") < order.index("PORT_QOS_MAP")


@pytest.mark.parametrize("reasons", [0x4, 0x8, 0x20, 0x40, 0x80])
def test_gpu_already_throttled_is_not_treated_as_locked(tools, reasons):
    """If a power cap holds the clock below the requested value, the readback used to show faultbed's own lock."""
    throttle = actuator("gpu.throttle", "host1:gpu0", percent=20)
    edit(tools, reasons=reasons)
    with pytest.raises(Refused, match="not set by faultbed: 'slowed"):
        throttle.prepare()


def test_gpu_open_in_a_daemon_is_refused_with_the_daemons_name(tools, monkeypatch, tmp_path):
    (tmp_path / "pci").mkdir()
    (tmp_path / "pci/rescan").write_text("")
    monkeypatch.setattr(gpu, "PCI", str(tmp_path / "pci"))
    edit(tools, daemons=["nvidia-fabricmanager"])
    request = Request(
        spec=FaultSpec(kind="gpu.lost", target="host1:gpu0", for_s=5.0),
        id="0-x-abc123",
        target=RACK.topology.resolve("host1:gpu0"),
        topology=RACK.topology,
        where="fault",
    )
    lost = make("commands", dict(resolve(request).request["args"]))
    with pytest.raises(Refused, match="nvidia-fabricmanager"):
        lost.prepare()


def test_errors_from_link_training_are_no_finding():
    values = {"State": "Active", "FEC": "RS", "Effective Physical Errors": "12", "Effective Physical BER": "15E-255"}
    assert link_wrong(values) == []
    assert link_wrong(values | {"Effective Physical BER": "2E-9"})
    assert link_wrong(values | {"Effective Physical BER": "N/A"})
