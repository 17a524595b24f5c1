"""Rack tools: parsers of their documented and publicly recorded output, and the checks based on them."""

import dataclasses
import json
import os
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preflight_states import healthy
from rack_state import CHRONY, FIRST, LAST, MLNX_QOS, MLXLINK, PCIE, RACK, gpu_report, rack_state, sonic_tables
from samples import samples

from faultbed.testbed import shipped
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory import ansible_listing
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.schema import GoldenVars
from faultbed.testbed.preflight import fec
from faultbed.testbed.preflight.checks import CHECKS, run_checks, unchecked_parts
from faultbed.testbed.preflight.collect import Facts, parse, read_facts, script
from faultbed.testbed.preflight.rack_checks import RACK_CHECKS
from faultbed.testbed.preflight.rack_formats import (
    chrony_offset_s,
    gpu_wrong,
    gpus,
    key_values,
    link_unreported,
    link_wrong,
    pcie_unreported,
    pcie_wrong,
    qos,
    qos_unreported,
    qos_wrong,
)
from faultbed.testbed.remote.remote_node import Completed


def test_mlxlink_healthy_link_has_no_finding():
    assert link_wrong(key_values(MLXLINK)) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Active", "Polling", "State Polling"),
        ("Standard RS-FEC - RS(528,514)", "No FEC", "no FEC"),
        (
            "Raw Physical BER                   : 15E-255",
            "Raw Physical BER                   : 2E-4",
            "Raw Physical BER 2E-4",
        ),
        (
            "Effective Physical BER             : 15E-255",
            "Effective Physical BER : 3E-13",
            "Effective Physical BER 3E-13",
        ),
        (
            "Effective Physical Errors          : 0\nEffective Physical BER             : 15E-255",
            "Effective Physical Errors : 17\nEffective Physical BER : N/A",
            "17 errors that FEC did not correct",
        ),
    ],
)
def test_mlxlink_faulty_link_is_reported(old, new, words):
    assert words in [message for message, _ in link_wrong(key_values(MLXLINK.replace(old, new)))]


@pytest.mark.parametrize(
    ("old", "new", "untold"),
    [
        ("Raw Physical BER ", "Raw Physical BER Per Lane ", "Raw Physical BER"),
        ("Raw Physical BER                   : 15E-255", "Raw Physical BER : N/A", "Raw Physical BER"),
        ("FEC  ", "Codec", "FEC"),
        ("Effective Physical Errors ", "Effective Errors ", "Effective Physical Errors"),
    ],
)
def test_mlxlink_missing_value_is_unknown_and_neither_good_nor_bad(old, new, untold):
    values = key_values(MLXLINK.replace(old, new))
    assert (link_wrong(values), link_unreported(values)) == ([], [untold])


def test_mlxlink_colours_in_pipes_are_ignored():
    """mstflint's MlxlinkRecord::changeColorOS prints a colour before a value and the reset before the next line's
    name.
    """
    coloured = MLXLINK
    for value in ("Active", "LinkUp", "100G", "4x", "Standard RS-FEC - RS(528,514)"):
        coloured = coloured.replace(f": {value}\n", f": \x1b[32m{value}\n\x1b[0m")
    assert coloured.count("\x1b") == 10
    assert key_values(coloured) == key_values(MLXLINK)
    assert link_wrong(key_values(coloured.replace("mActive", "mPolling"))) == [("State Polling", "Active")]


def test_mlxlink_usual_raw_ber_is_no_finding():
    """Links of 50 Gb/s per lane or more always have bit errors before FEC."""
    assert (
        link_wrong(
            key_values(MLXLINK.replace("Raw Physical BER                   : 15E-255", "Raw Physical BER : 2E-9"))
        )
        == []
    )


def test_mlnx_qos_output_is_decoded():
    have = qos(MLNX_QOS)
    assert (have.trust, have.pfc, have.priority[26], have.priority[48]) == ("dscp", {3}, 3, 6)
    assert qos_wrong(have, trust="dscp", pfc=[3], priority={26: 3, 48: 6}) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("state: dscp", "state: pcp", "trusts pcp"),
        ("0   0   0   1   0", "0   0   0   0   1", "PFC on [4]"),
        ("prio:3 dscp", "prio:4 dscp", "DSCP 26 in priority 4"),
    ],
)
def test_mlnx_qos_deviation_is_reported(old, new, words):
    wrong = qos_wrong(qos(MLNX_QOS.replace(old, new)), trust="dscp", pfc=[3], priority={26: 3})
    assert words in [message for message, _ in wrong]


def test_mlnx_qos_missing_value_is_neither_right_nor_wrong():
    for old, new, untold in (
        ("Priority trust", "Trust", "trust"),
        ("PFC configuration", "Pause", "PFC"),
        ("dscp:", "codepoint:", "the DSCP map"),
    ):
        have = qos(MLNX_QOS.replace(old, new))
        assert qos_wrong(have, trust="dscp", pfc=[3], priority={26: 3}) == []
        assert qos_unreported(have, trust="dscp") == [untold]


def test_mlnx_qos_with_pcp_trust_needs_no_dscp_map():
    """With trust pcp, mlnx_qos prints no map, and every DSCP of the inventory used to be reported as wrong."""
    have = qos("Priority trust state: pcp\n" + MLNX_QOS[MLNX_QOS.index("PFC") :])
    assert qos_wrong(have, trust="pcp", pfc=[3], priority={26: 3}) == []
    assert qos_unreported(have, trust="pcp") == []


def test_pcie_link_below_its_maximum_is_reported():
    good = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16", "max_link_width": "16"}  # fmt: skip
    assert pcie_wrong(good) == []
    assert pcie_wrong({**good, "current_link_width": "8"}) == [("PCIe width 8", "16")]
    assert pcie_wrong({**good, "current_link_speed": "16.0 GT/s PCIe"}) == [
        ("PCIe speed 16.0 GT/s PCIe", "32.0 GT/s PCIe")
    ]
    assert pcie_wrong({}) == []
    assert len(pcie_unreported({})) == 4


def change(facts, index, **changed):
    """Replace fields of one GPU of a host."""
    decoded = json.loads(facts.raw["gpu"])
    decoded["gpus"][index] |= changed
    facts.raw["gpu"] = json.dumps(decoded)


def test_gpu_healthy_has_no_finding():
    (gpu,) = gpus(gpu_report({})).gpus
    assert (gpu.bus_id, gpu.sm_mhz, gpu.place) == ("00000000:19:00.0", 1980, "gpu0 (00000000:19:00.0)")
    assert gpu_wrong(gpu) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reasons": 0x48}, "throttled: hardware slowdown"),
        ({"reasons": 0x4}, "throttled: software power cap"),
        ({"pcie": [5, 8]}, "PCIe width 8"),
        ({"persistence": False}, "persistence mode off, so the first job waits for the driver to load"),
        ({"ecc": False}, "ECC off, so bit flips are not detected"),
        ({"why": "NVML: GPU is lost"}, "does not answer: NVML: GPU is lost"),
    ],
)
def test_gpu_fault_is_reported(changed, words):
    (gpu,) = gpus(gpu_report(changed)).gpus
    assert words in [message for message, _ in gpu_wrong(gpu)]


def test_gpu_idle_has_no_finding():
    (gpu,) = gpus(gpu_report({"reasons": 0x1, "sm_mhz": 345, "pcie": [1, 16]})).gpus
    assert gpu_wrong(gpu) == []


def test_gpu_unsupported_value_is_unknown_and_named():
    state = rack_state()
    lacking = dict.fromkeys(("ecc", "reasons", "power_limit_w", "persistence"))
    change(state["host1"], 4, **lacking)
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unchecked,) = unchecked_parts(RACK, state, RACK_CHECKS)
    assert unchecked.where == "host1:gpu4 (00000000:19:00.0)"
    assert unchecked.why == ("NVML does not report ECC mode, persistence mode, reasons for lowered clocks, power limit")


def test_rack_checks_of_a_healthy_rack_find_nothing():
    assert run_checks(RACK, rack_state(), RACK_CHECKS) == []
    assert unchecked_parts(RACK, rack_state(), RACK_CHECKS) == []


@pytest.mark.parametrize(
    ("check", "where", "key", "old", "new"),
    [
        ("pcie", "host2:mlx5_3", "pcie mlx5_3", "current_link_width: 16", "current_link_width: 4"),
        (
            "link-quality",
            "host2:mlx5_3",
            "mlxlink mlx5_3",
            "Effective Physical BER             : 15E-255",
            "Effective Physical BER             : 3E-9",
        ),
        ("qos", "host2:mlx5_3", "qos mlx5_3", "state: dscp", "state: pcp"),
        ("firmware", "host2:mlx5_3", "firmware mlx5_3", "28.39.1002", "28.36.1010"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "symbol_err_phy: 17", "symbol_err_phy: 19"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "bits_phy: 9000", "bits_phy: 90000000"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "encoding: RS", "encoding: Off"),
        ("speed", "host2:mlx5_3", "fec-last mlx5_3", "speed: 400000", "speed: 200000"),
        ("golden", "host2:gpu3 (00000000:19:00.0)", "gpu", '"vbios": "96.00.74.00.01"', '"vbios": "96.00.5E.00.01"'),
        ("golden", "host2", "gpu", "550.54.15", "535.161.08"),
        (
            "affinity",
            "host2:mlx5_3",
            "pci",
            "pci0000:35/0000:35:01.0/0000:36:00.0/0000:37:01.0",
            "pci0000:95/0000:95:01.0",
        ),
        ("affinity", "host2:mlx5_3", "device mlx5_3", None, "/sys/devices/pci0000:25/0000:25:01.0/0000:2a:00.0"),
        ("gpu", "host2", "gpu", None, '{"why": "no NVIDIA driver is loaded", "gpus": []}'),
        ("gpu", "host2:gpu3 (00000000:19:00.0)", "gpu", '"reasons": 0', '"reasons": 8'),
        ("time", "host2", "chrony", "0.000001234", "-0.5"),
    ],
)
def test_rack_checks_find_each_fault_at_its_place(check, where, key, old, new):
    state = rack_state()
    if ":gpu3" in where:
        whole = json.loads(state["host2"].raw[key])
        assert old in json.dumps(whole["gpus"][3])
        whole["gpus"][3] = json.loads(json.dumps(whole["gpus"][3]).replace(old, new))
        state["host2"].raw[key] = json.dumps(whole)
    else:
        assert old is None or old in state["host2"].raw[key]
        state["host2"].raw[key] = new if old is None else state["host2"].raw[key].replace(old, new)
    actual = {(finding.check, finding.where) for finding in run_checks(RACK, state, RACK_CHECKS)}
    # A narrow PCIe link and old firmware also differ from the golden configuration.
    assert actual - {("golden", where)} == {(check, where)} - {("golden", where)}
    assert check != "golden" or actual


def test_rack_checks_of_a_host_without_tool_output_are_not_passed():
    """Such checks are listed as not done, without a finding. A missing tool used to exclude the host."""
    state = rack_state() | {"host1": Facts(), "rtsw1": Facts()}
    wrong = {finding.check for finding in run_checks(RACK, state, RACK_CHECKS)}
    unchecked_names = {unchecked.check for unchecked in unchecked_parts(RACK, state, RACK_CHECKS)}
    # The example's inventory has no lanes, FEC or cable lengths, which are compared only where it has some.
    assert wrong | unchecked_names == {check.name for check in RACK_CHECKS} - {"switch-port"}
    assert wrong == {"gpu"}
    assert {unchecked.where.partition(":")[0] for unchecked in unchecked_parts(RACK, state, RACK_CHECKS)} == {
        "host1",
        "rtsw1",
    }


def test_rack_checks_report_why_a_tool_printed_nothing():
    state = rack_state()
    raw = state["host1"].raw
    raw["mlxlink mlx5_0"] = "sh: 27: mlxlink: not found\n"
    raw["mlxlink mlx5_1"] = "\x1b[31m \n-E- Permission denied\n\x1b[0m \n"
    raw["qos mlx5_0"] = "sh: 1: mlnx_qos: not found"
    raw["firmware mlx5_0"] = ""
    raw["pcie mlx5_0"] = "current_link_speed: 32.0 GT/s PCIe\nmax_link_speed: 32.0 GT/s PCIe"
    raw["chrony"] = "sh: 1: chronyc: not found"
    assert run_checks(RACK, state, RACK_CHECKS) == []
    reasons = {(part.check, part.where): part.why for part in unchecked_parts(RACK, state, RACK_CHECKS)}
    assert reasons["link-quality", "host1:mlx5_0"] == "mlxlink: mlxlink: not found"
    assert reasons["link-quality", "host1:mlx5_1"] == "mlxlink: -E- Permission denied"
    assert reasons["qos", "host1:mlx5_0"] == "mlnx_qos: mlnx_qos: not found"
    assert reasons["firmware", "host1:mlx5_0"].startswith("board and firmware")
    assert reasons["pcie", "host1:mlx5_0"] == "sysfs does not report current_link_width, max_link_width"
    assert "phc2sys" in reasons["time", "host1"]
    raw["chrony"] = "506 Cannot talk to daemon"
    (finding,) = run_checks(RACK, state, RACK_CHECKS)
    assert finding.observed == "not synchronised (chronyc: 506 Cannot talk to daemon)"


def test_clocks_that_are_their_own_source_are_not_within_a_millisecond_of_it():
    """In chrony's local mode the offset is 0, so each host was right, although no two of them had the same time."""
    state = rack_state()
    own = "7F7F0101,,10,1764200000.000000000,0.000000000,0.000000000,0.0,0.0,0.0,0.0,0.0,0.0,0.0,Normal"
    state["host1"].raw["chrony"] = own
    assert [finding for finding in run_checks(RACK, state, RACK_CHECKS) if finding.check == "time"] == []
    (part,) = [part for part in unchecked_parts(RACK, state, RACK_CHECKS) if part.check == "time"]
    assert (part.where, part.why.partition(";")[0]) == ("host1", "its own clock is its source")
    state["host2"].raw["chrony"] = own
    wrong = [finding for finding in run_checks(RACK, state, RACK_CHECKS) if finding.check == "time"]
    assert [finding.where for finding in wrong] == ["host1", "host2"]


def test_firmware_two_versions_equally_frequent_blame_no_host():
    state = rack_state()
    for host in RACK.topology.hosts[:2]:
        for rnic in host.rnics:
            state[host.name].raw[f"firmware {rnic.name}"] = "MT_0000000838\n28.36.1010"
    (actual,) = [finding for finding in run_checks(RACK, state, RACK_CHECKS) if finding.check == "firmware"]
    assert (actual.where, actual.observed) == (
        "rack-h100",
        "RNICs of MT_0000000838 have firmware 28.36.1010, 28.39.1002, without a majority",
    )


def test_golden_configuration_detects_firmware_that_is_wrong_on_every_rnic():
    """Comparing RNICs with each other (`firmware`) shows nothing, but `golden` names each RNIC."""
    state = rack_state()
    for host in RACK.topology.hosts:
        for rnic in host.rnics:
            state[host.name].raw[f"firmware {rnic.name}"] = "MT_0000000838\n28.36.1010"
            state[host.name].raw[f"pcie {rnic.name}"] = PCIE.replace("width: 16", "width: 8").replace("32.0", "16.0")
    findings = run_checks(RACK, state, RACK_CHECKS)
    assert {finding.check for finding in findings} == {"golden"}
    assert {finding.observed for finding in findings} == {"firmware 28.36.1010", "PCIe speed (GT/s) 16", "PCIe width 8"}
    assert len(findings) == 3 * 32


def test_golden_check_reports_a_missing_configuration_or_board():
    inventory = dataclasses.replace(RACK, golden=None)
    (unchecked,) = [
        unchecked for unchecked in unchecked_parts(inventory, rack_state(), RACK_CHECKS) if unchecked.check == "golden"
    ]
    assert (unchecked.where, unchecked.why) == ("rack-h100", "the inventory has no faultbed_golden to compare with")
    other = dataclasses.replace(RACK, golden=GoldenVars(rnic_firmware={"MT_0000000223": "20.36.1010"}))
    unchecked = {unchecked.why for unchecked in unchecked_parts(other, rack_state(), RACK_CHECKS)}
    assert unchecked == {"faultbed_golden.rnic_firmware has no board MT_0000000838"}


def test_gpu_affinity_reports_the_distance_to_its_rnic():
    state = rack_state()
    facts = state["host1"]
    facts.raw["pci"] = facts.raw["pci"].replace("0000:05:01.0/0000:06:00.0/0000:07:01.0/", "0000:05:02.0/")
    (near,) = run_checks(RACK, state, RACK_CHECKS)
    place, _, beside = near.observed.partition("; ")
    assert place == "gpu0 below another root port of NUMA node 0 (NODE)"
    assert beside == "below the RNIC's own PCIe switch: no GPU of the inventory"
    facts.raw["numa"] = facts.raw["numa"].replace("0000:19:00.0/numa_node:0", "0000:19:00.0/numa_node:1")
    (far,) = run_checks(RACK, state, RACK_CHECKS)
    assert far.observed.startswith("gpu0 on NUMA node 1, the RNIC on 0 (SYS)")
    facts.raw["numa"] = facts.raw["numa"].replace("numa_node:0", "numa_node:-1")
    (unknown,) = run_checks(RACK, state, RACK_CHECKS)
    assert "NUMA nodes are not reported" in unknown.observed


def test_gpu_affinity_of_a_swapped_pair_names_the_nearest_gpu():
    rnics = RACK.topology.hosts[0].rnics
    swapped = (dataclasses.replace(rnics[0], gpu="gpu1"), dataclasses.replace(rnics[1], gpu=None), *rnics[2:])
    hosts = (dataclasses.replace(RACK.topology.hosts[0], rnics=swapped), *RACK.topology.hosts[1:])
    inventory = dataclasses.replace(RACK, topology=dataclasses.replace(RACK.topology, hosts=hosts))
    (finding,) = run_checks(inventory, rack_state(), RACK_CHECKS)
    assert (finding.where, finding.observed.rpartition("; ")[2]) == (
        "host1:mlx5_0",
        "below the RNIC's own PCIe switch: gpu0",
    )
    (unchecked,) = unchecked_parts(inventory, rack_state(), RACK_CHECKS)
    assert (unchecked.where, unchecked.why) == (
        "host1:mlx5_1",
        "the inventory pairs it with no GPU (faultbed_rnics[].gpu)",
    )


def edited(state, switch, table, edit):
    tables = json.loads(state[switch].raw["configdb"])
    edit(tables[table])
    state[switch].raw["configdb"] = json.dumps(tables)
    wrong = [finding for finding in run_checks(RACK, state, RACK_CHECKS) if finding.check == "switch-qos"]
    return [(finding.where, finding.observed) for finding in wrong]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda ports: ports["Ethernet8"].pop("pfc_enable"), "PFC on no priority"),
        (lambda ports: ports["Ethernet8"].pop("dscp_to_tc_map"), "no map of DSCPs: it does not trust them"),
        (lambda ports: ports["Ethernet8"].update(dscp_to_tc_map="AZURE"), "no map of DSCPs AZURE: it does not trust"),
    ],
)
def test_switch_port_qos_deviation_is_reported(edit, words):
    ((where, message),) = edited(rack_state(), "rtsw1", "PORT_QOS_MAP", edit)
    assert where == "rtsw1:Ethernet8"
    assert message.startswith(words)


def test_switch_port_that_pauses_a_class_without_lossless_buffer_is_reported():
    actual = edited(rack_state(), "rtsw1", "PORT_QOS_MAP", lambda ports: ports["Ethernet8"].update(pfc_enable="3,4"))
    assert actual == [
        ("rtsw1:Ethernet8", "PFC on [3, 4]"),
        (
            "rtsw1:Ethernet8",
            "PFC pauses priority 4, but its group 0 has the profile ingress_lossy_profile, without headroom",
        ),
    ]


@pytest.mark.parametrize(
    ("table", "edit", "words"),
    [
        (
            "TC_TO_PRIORITY_GROUP_MAP",
            lambda maps: maps["FAULTBED"].update({"6": "6"}),
            "priority group 6 has no buffer, and traffic class 6 is stored there",
        ),
        (
            "BUFFER_QUEUE",
            lambda rows: [rows.pop(key) for key in [*rows] if key.endswith("|5-6")],
            "queue 6 has no buffer, and traffic class 6 is stored there",
        ),
        (
            "BUFFER_PG",
            lambda rows: rows.update({key[:-1] + "3": {"profile": "ingress_lossy_profile"} for key in [*rows]}),
            "PFC pauses priority 3, but its group 3 has the profile ingress_lossy_profile, without headroom",
        ),
        (
            "QUEUE",
            lambda rows: [rows.update({key: {"scheduler": "scheduler.1"}}) for key in [*rows] if key.endswith("|6")],
            "CNPs (DSCP 48) in queue 6, which has DWRR with weight 15",
        ),
        ("QUEUE", lambda rows: rows.clear(), "CNPs (DSCP 48) in queue 6, which has no scheduler"),
    ],
)
def test_switch_priority_without_its_buffer_or_scheduler_is_reported_at_each_port(table, edit, words):
    """The packets would be dropped or delayed while every map looks right."""
    actual = edited(rack_state(), "ctsw1", table, edit)
    assert actual == [("ctsw1:Ethernet0", words), ("ctsw1:Ethernet8", words)]


def test_switch_computes_its_lossless_buffers_in_the_dynamic_mode():
    """ConfigDB then names no profile (NULL), and one entry may be for several ports."""
    state = rack_state()
    state["ctsw1"].raw["appldb"] = "{}"
    whole = {"Ethernet0,Ethernet8|3-4": {"profile": "NULL"}}
    assert edited(state, "ctsw1", "BUFFER_PG", lambda rows: rows.update(whole)) == []


def test_switch_before_its_qos_was_loaded_is_one_finding():
    """The state of a factory-fresh switch: `config qos reload` makes its buffers."""
    observed = edited(rack_state(), "ctsw1", "BUFFER_POOL", lambda pools: pools.clear())
    assert observed == [("ctsw1", "ConfigDB has no BUFFER_POOL: its QoS was never loaded")]


def test_switch_without_readable_computed_buffers_is_not_checked():
    state = rack_state()
    state["ctsw1"].raw["appldb"] = "sh: 1: sonic-db-dump: not found"
    (unchecked,) = unchecked_parts(RACK, state, RACK_CHECKS)
    assert unchecked.where == "ctsw1"
    assert unchecked.why == "sonic-db-dump: sonic-db-dump: not found; buffers only from ConfigDB"
    assert run_checks(RACK, state, RACK_CHECKS) == []


def test_switch_dscp_map_deviation_is_reported_at_each_port():
    findings = edited(rack_state(), "ctsw1", "DSCP_TO_TC_MAP", lambda maps: maps["FAULTBED"].update({"26": "4"}))
    message = "DSCP 26 in traffic class 4 (FAULTBED)"
    assert findings == [("ctsw1:Ethernet0", message), ("ctsw1:Ethernet8", message)]


def test_switch_qos_accepts_every_sonic_syntax():
    """One row for several ports, a row for the whole switch, and references in the syntax before 2022."""

    def older(ports):
        for row in ports.values():
            row["dscp_to_tc_map"] = "[DSCP_TO_TC_MAP|FAULTBED]"

    def newer(ports):
        whole = ports.pop("Ethernet0")
        whole.pop("dscp_to_tc_map")
        ports["Ethernet0,Ethernet999"] = whole
        ports["global"] = {"dscp_to_tc_map": "FAULTBED"}

    for edit in (older, newer):
        assert edited(rack_state(), "rtsw1", "PORT_QOS_MAP", edit) == []


def test_switch_qos_that_cannot_be_read_is_not_checked():
    state = rack_state()
    state["rtsw1"].raw["configdb"] = "sh: 9: sonic-cfggen: not found\nTraceback (most recent call last):"
    state["rtsw2"].raw["configdb"] = ""
    assert run_checks(RACK, state, RACK_CHECKS) == []
    reasons = {unchecked.where: unchecked.why for unchecked in unchecked_parts(RACK, state, RACK_CHECKS)}
    assert reasons == {"rtsw1": "sonic-cfggen: sonic-cfggen: not found", "rtsw2": "sonic-cfggen printed nothing"}
    assert "sonic-cfggen" not in script(RACK, "host1")


def test_switch_without_any_qos_is_wrong_at_every_port(tmp_path):
    """ConfigDB then has no QoS tables and the script prints empty ones. The script prints no other table."""
    state = rack_state()
    tables = {"PORT": {"Ethernet0": {}}, "TACPLUS": {"global": {"passkey": "x"}}}
    state["ctsw1"].raw["configdb"] = configdb_of(tmp_path, tables)
    assert "passkey" not in state["ctsw1"].raw["configdb"]
    actual = {(finding.where, finding.observed) for finding in run_checks(RACK, state, RACK_CHECKS)}
    assert {where for where, _ in actual} == {"ctsw1", "ctsw1:Ethernet0", "ctsw1:Ethernet8"}
    assert {observed for _, observed in actual} == {
        "PFC on no priority",
        "no map of DSCPs: it does not trust them",
        "ConfigDB has no BUFFER_POOL: its QoS was never loaded",
    }


def configdb_of(tmp_path, tables):
    """Return the output of the script's own line for this ConfigDB, with a stand-in for sonic-cfggen."""
    lines = script(RACK, "ctsw1").split("@@raw configdb\n")[1].split("\necho @@")[0]
    tool = tmp_path / "sonic-cfggen"
    tool.write_text(f"#!/bin/sh\necho {shlex.quote(json.dumps(tables))}\n")
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", lines], env=env, capture_output=True, text=True, check=True).stdout


def test_switch_qos_written_by_the_role_satisfies_the_check(tmp_path):
    """The check decodes the ConfigDB that the role itself writes."""
    import importlib.util

    path = shipped.playbooks() / "filter_plugins" / "faultbed_sonic.py"
    spec = importlib.util.spec_from_file_location("faultbed_sonic", path)
    role = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(role)
    hostvars = ansible_listing.listing(RACK.path)["_meta"]["hostvars"]
    state = rack_state()
    for switch in RACK.topology.switches:
        ports = [link.end(switch.name).netdev for link in RACK.topology.links_of(switch.name)]
        made = role.sonic_config_db(hostvars[switch.name], switch.name)
        assert made["TC_TO_PRIORITY_GROUP_MAP"]["FAULTBED"]["6"] == "0", "only paused groups have a buffer of their own"
        generated = sonic_tables(ports)
        generated["QUEUE"] = {key: row for key, row in generated["QUEUE"].items() if not key.endswith("|6")}
        made = {table: {**generated.get(table, {}), **made.get(table, {})} for table in {*generated, *made}}
        state[switch.name].raw["configdb"] = configdb_of(tmp_path, made)
    assert run_checks(RACK, state, RACK_CHECKS) == []


GIVEN = {"lanes": (1, 2, 3, 4, 5, 6, 7, 8), "breakout": "1x400G", "fec": "rs", "autoneg": False, "cable_m": 5}


@pytest.mark.parametrize(
    ("given", "observed"),
    [
        ({}, []),
        ({"lanes": (1, 2, 3, 4)}, ["lanes 1,2,3,4,5,6,7,8"]),
        ({"breakout": "2x200G"}, ["breakout 1x400G"]),
        ({"fec": "fc"}, ["FEC rs"]),
        ({"autoneg": True}, ["autonegotiation off"]),
        ({"cable_m": 40}, ["cable length 5m"]),
    ],
)
def test_switch_port_differs_from_what_the_inventory_gives(given, observed):
    inventory = with_port(RACK, "rtsw1", "Ethernet0", **{**GIVEN, **given})
    found = run_checks(inventory, rack_state(), RACK_CHECKS)
    assert [(one.check, one.where, one.observed) for one in found] == [
        ("switch-port", "rtsw1:Ethernet0", text) for text in observed
    ]
    state = rack_state()
    state["rtsw1"].raw["configdb"] = ""
    unchecked = [one.where for one in unchecked_parts(inventory, state, RACK_CHECKS) if one.check == "switch-port"]
    assert unchecked == ["rtsw1:Ethernet0"]


def with_port(inventory, switch, netdev, **values):
    """Return the inventory with values of one switch port; `address` may be one of an uplink's end."""
    links = tuple(
        dataclasses.replace(
            link,
            **{
                end: dataclasses.replace(getattr(link, end), **values)
                for end in ("a", "b")
                if (getattr(link, end).node, getattr(link, end).netdev) == (switch, netdev)
            },
        )
        for link in inventory.topology.links
    )
    return dataclasses.replace(inventory, topology=dataclasses.replace(inventory.topology, links=links))


@pytest.mark.parametrize("peer", ["Ethernet128", "10.81.0.1", "10.78.0.101"])
def test_bgp_session_is_known_by_interface_address_or_loopback(peer):
    """Unnumbered, numbered (SONiC's default) and loopback peering: FRR names the peer in three ways."""
    inventory = with_port(RACK, "rtsw1", "Ethernet128", address="10.81.0.0/31")
    inventory = with_port(inventory, "ctsw1", "Ethernet0", address="10.81.0.1/31")
    state = {switch.name: Facts() for switch in inventory.topology.switches}
    state["rtsw1"].sessions = {peer: "Established"}
    bgp = next(check for check in CHECKS if check.name == "bgp")
    assert "rtsw1:Ethernet128" not in {where for where, _, _ in bgp.problems(inventory, state)}
    state["rtsw1"].sessions = {peer: "Active"}
    assert ("rtsw1:Ethernet128", "BGP session Active", "Established") in bgp.problems(inventory, state)


def test_speed_check_finds_all_links_at_half_speed():
    """A burn-in cannot find this, because it has no outlier if all pairs are equally slow."""
    state = rack_state()
    for facts in state.values():
        for name in [name for name in facts.raw if name.startswith("fec-")]:
            facts.raw[name] = facts.raw[name].replace("speed: 400000", "speed: 200000")
    assert [finding.check for finding in run_checks(RACK, state, RACK_CHECKS)] == ["speed"] * 32
    state["host1"].raw["fec-last mlx5_0"] = "speed: \nActive FEC encoding: RS"
    (unchecked,) = [unchecked for unchecked in unchecked_parts(RACK, state, RACK_CHECKS) if unchecked.check == "speed"]
    assert (unchecked.where, unchecked.why[:28]) == ("host1:mlx5_0", "the kernel does not report i")


def test_mtu_check_uses_the_inventorys_mtu_of_each_port():
    """The role split_host sets the same values; a host with its own MTU used to be provisioned and then reported as
    wrong.
    """
    link = RACK.topology.rnic_link("host1", "mlx5_0")
    smaller = dataclasses.replace(link, b=dataclasses.replace(link.b, mtu=4200))
    links = (smaller, *(one for one in RACK.topology.links if one is not link))
    inventory = dataclasses.replace(RACK, topology=dataclasses.replace(RACK.topology, links=links))
    mtu = next(check for check in CHECKS if check.name == "mtu")
    state = healthy(RACK)
    (finding,) = run_checks(inventory, state, [mtu])
    assert (finding.where, finding.expected) == ("host1:rail0", "4200")
    facts = state["host1"].interfaces
    facts["rail0"] = dataclasses.replace(facts["rail0"], mtu=4200)
    assert run_checks(inventory, state, [mtu]) == []
    facts = state["rtsw1"].interfaces
    facts["Ethernet8"] = dataclasses.replace(facts["Ethernet8"], mtu=9100)
    (finding,) = run_checks(inventory, state, [mtu])
    assert (finding.where, finding.expected) == ("rtsw1:Ethernet8", "9216")


def test_fec_check_of_a_driver_without_counters_is_unknown():
    state = rack_state()
    output = "at: 1.0\nspeed: 400000\nnetlink error: Operation not supported\n"
    state["host1"].raw["fec-first mlx5_0"] = state["host1"].raw["fec-last mlx5_0"] = output
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unchecked,) = unchecked_parts(RACK, state, RACK_CHECKS)
    assert (unchecked.check, unchecked.where) == ("fec", "host1:mlx5_0")
    assert "which FEC is active" in unchecked.why
    assert "Operation not supported" in unchecked.why


def test_mlxlink_errors_from_link_training_are_no_finding():
    """Both readings show 17 errors. Only growth counts, and counters that were cleared in between did not grow."""
    assert fec.fec_wrong(fec.read(FIRST), fec.read(LAST)) == []
    assert fec.fec_wrong(fec.read(LAST.replace(": 17", ": 99")), fec.read(LAST)) == []


def test_fec_check_of_counters_that_were_reset_between_its_readings_is_unknown():
    state = rack_state()
    state["host1"].raw["fec-first mlx5_0"] = LAST.replace(": 17", ": 99")
    state["host1"].raw["fec-last mlx5_0"] = LAST.replace("at: ", "at: 9")
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unchecked,) = unchecked_parts(RACK, state, RACK_CHECKS)
    assert (unchecked.check, unchecked.where) == ("fec", "host1:mlx5_0")
    assert "errors beyond FEC, whose counters were reset meanwhile" in unchecked.why


def test_gpu_settings_check_reports_one_deviating_gpu_and_not_a_uniform_setting():
    state = rack_state()
    for host in RACK.topology.hosts:
        for index in range(8):
            change(state[host.name], index, reasons=0x2, power_limit_w=500)
    assert run_checks(RACK, state, RACK_CHECKS) == []
    state = rack_state()
    change(state["host3"], 5, reasons=0x0, sm_mhz=1410, sm_max_mhz=1755, power_limit_w=350)
    findings = run_checks(RACK, state, RACK_CHECKS)
    assert {finding.where for finding in findings} == {"host3:gpu5 (00000000:19:00.0)"}
    assert {finding.observed for finding in findings} == {
        "SM clock up to 1755 MHz",
        "its clocks are set or locked",
        "power limit 350 W",
    }


def test_gpu_check_reports_why_there_are_no_gpus():
    state = rack_state()
    state["host1"].raw["gpu"] = json.dumps({"driver": None, "why": "NVML: Driver Not Loaded", "gpus": []})
    state["host2"].raw["gpu"] = "Traceback: no such thing"
    first, second = [finding for finding in run_checks(RACK, state, RACK_CHECKS) if finding.check == "gpu"]
    assert first.observed == "0 GPUs answer (NVML: Driver Not Loaded)"
    assert second.observed == "0 GPUs answer (the host did not report its GPUs: Traceback: no such thing)"


class Answering:
    """A rack lab with recorded answers of machines, and of watchers for GPUs; some do not answer."""

    inventory_model, topology = RACK, RACK.topology

    def __init__(self, gpus):
        self._gpus = gpus

    def nodes(self):
        return ("host1", "rtsw1")

    def node(self, name):
        return self

    def run(self, argv, *, check, timeout_s=None):
        name = argv[-1].partition("@@node ")[2].partition("\n")[0]
        output = f"@@node {name}\n@@clock\n1.0\n@@end\n" if name else "1.0\n"
        return Completed(argv=tuple(argv), rc=0, stdout=output, stderr="")

    def request(self, machine, request, *, timeout_s):
        assert (machine, request) == ("host1", {"do": "gpus"})
        if isinstance(self._gpus, Exception):
            raise self._gpus
        return self._gpus


def test_collect_queries_gpus_of_hosts_and_not_of_switches():
    decoded = json.loads(gpu_report({}))
    assert gpus(read_facts(Answering(decoded))["host1"].raw["gpu"]).gpus[0].sm_mhz == 1980
    silent = read_facts(Answering(LabError("host1: python3 is not there")))
    assert gpus(silent["host1"].raw["gpu"]).why == "host1: python3 is not there"
    assert "gpu" not in silent["rtsw1"].raw


def test_rack_check_on_a_soft_lab_reports_why_it_does_not_apply():
    soft = inventory_module.load(shipped.inventories() / "soft.yml")
    unchecked = unchecked_parts(soft, {}, RACK_CHECKS)
    assert [unchecked_item.check for unchecked_item in unchecked] == [check.name for check in RACK_CHECKS]
    assert {unchecked_item.where for unchecked_item in unchecked} == {"soft"}
    for check in (*CHECKS, *RACK_CHECKS):
        assert bool(check.inapplicable_why) == (len(check.labs) == 1), check.name


def test_rack_script_runs_the_tools_and_keeps_raw_output():
    text = script(RACK, "host1")
    assert "raw mlxlink mlx5_7; at=$(readlink -f /sys/class/infiniband/mlx5_7/device)" in text
    assert text.index("raw fec-first mlx5_7") < text.index("raw mlxlink mlx5_0") < text.index("raw fec-last mlx5_0")
    assert "\nnvidia-smi" not in text
    assert text.startswith("export LC_ALL=C\n")
    assert "mlxlink" not in script(inventory_module.load(shipped.inventories() / "soft.yml"), "host1")
    answer = f"@@node host1\n@@raw mlxlink mlx5_0\n{MLXLINK}@@end\n"
    raw = parse(answer)["host1"].raw
    assert link_wrong(key_values(raw["mlxlink mlx5_0"])) == []


def test_chrony_offset_is_decoded():
    assert chrony_offset_s(CHRONY) == pytest.approx(1.234e-6)
    assert chrony_offset_s(CHRONY.replace("Normal", "Not synchronised")) is None
    assert chrony_offset_s("506 Cannot talk to daemon") is None


@st.composite
def spoilt(draw):
    """Return any text, or a tool's output in which a part is cut out or replaced."""
    output = draw(st.sampled_from(["", MLXLINK, MLNX_QOS, gpu_report({}), CHRONY, FIRST]))
    begin = draw(st.integers(0, len(output)))
    return output[:begin] + draw(st.text(max_size=20)) + output[begin + draw(st.integers(0, 20)) :]


@settings(max_examples=samples(500))
@given(spoilt())
def test_rack_parsers_accept_any_text(text):
    """Parsers leave out what they cannot read. They never raise, and never invent a value."""
    values = key_values(text)
    assert all(name == name.strip() and value.strip() for name, value in values.items())
    assert link_wrong(values) or link_unreported(values) or values["State"] == "Active"
    result = qos(text)
    assert result.pfc is None or result.pfc <= set(range(8))
    assert set(result.priority.values()) <= set(range(10))
    output = gpus(text)
    assert output.gpus or output.why
    for gpu in output.gpus:
        assert all(right for _, right in gpu_wrong(gpu))
    offset_s = chrony_offset_s(text)
    assert offset_s is None or offset_s >= 0
    assert all(count >= 0 for count in fec.read(text).counters.values())
    assert all(right for _, right in fec.fec_wrong(fec.read(FIRST), fec.read(text)))


def test_chrony_offset_that_is_no_number_is_far_off():
    assert chrony_offset_s(CHRONY.replace("0.000001234", "nan")) > 1
