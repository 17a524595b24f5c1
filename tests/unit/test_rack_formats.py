"""What the tools of racks print, as recorded from their documentation and from public logs; and what is wrong in it."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed import inventory as inventory_module
from testbed import shipped
from testbed.errors import LabError
from testbed.inventory_schema import GoldenVars
from testbed.node import Completed
from testbed.preflight import fec
from testbed.preflight.checks import CHECKS, not_looked, run_checks
from testbed.preflight.looks import Facts, look, parse, script
from testbed.preflight.rack_checks import RACK_CHECKS
from testbed.preflight.rack_formats import (
    chrony_offset_s,
    gpu_wrong,
    gpus,
    key_values,
    link_wrong,
    pcie_wrong,
    qos,
    qos_wrong,
)

# The sections and names of mlxlink 4.x; values of a healthy 100 Gb/s port.
MLXLINK = """\
Operational Info
----------------
State                              : Active
Physical state                     : LinkUp
Speed                              : 100G
Width                              : 4x
FEC                                : Standard RS-FEC - RS(528,514)
Loopback Mode                      : No Loopback
Auto Negotiation                   : ON

Physical Counters and BER Info
------------------------------
Time Since Last Clear [Min]        : 25074.8
Effective Physical Errors          : 0
Effective Physical BER             : 15E-255
Raw Physical Errors Per Lane       : 0,0,0,0
Link Down Counter                  : 0
Link Error Recovery Counter        : 0
Raw Physical BER                   : 15E-255
"""

MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:6 dscp:55,54,53,52,51,50,49,48,
Cable len: 10
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: ets, bw: 10%
\t priority:  1
"""

# As a host's watcher tells of a healthy H100 (testbed.onnode.nvml.look, which test_nvml.py holds to NVML's functions).
GPU = {
    "index": 0,
    "bus_id": "00000000:19:00.0",
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.74.00.01",
    "persistence": True,
    "ecc": True,
    "ecc_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "reasons": 0,
    "sm_mhz": 1980,
    "sm_max_mhz": 1980,
    "power_limit_w": 700,
    "pcie": [5, 16],
    "pcie_max": [5, 16],
}
CHRONY = (
    "A9FEA97B,169.254.169.123,4,1763728000.1,0.000001234,-0.0000004,0.0000021,-5.1,0.001,0.03,0.0004,0.0003,16.1,Normal"
)


def test_a_healthy_link_has_nothing_wrong():
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
            "Effective Physical Errors          : 0",
            "Effective Physical Errors : 17",
            "17 errors that FEC did not correct",
        ),
        ("Raw Physical BER ", "Raw Physical BER Per Lane ", "Raw Physical BER not told"),
        (
            "Raw Physical BER                   : 15E-255",
            "Raw Physical BER                   : N/A",
            "Raw Physical BER N/A",
        ),
    ],
)
def test_a_sick_link_is_told(old, new, words):
    assert words in [found for found, _ in link_wrong(key_values(MLXLINK.replace(old, new)))]


def test_a_usual_raw_ber_is_no_sickness():
    """Links of 50 Gb/s a lane and more always have errors before FEC."""
    assert (
        link_wrong(
            key_values(MLXLINK.replace("Raw Physical BER                   : 15E-255", "Raw Physical BER : 2E-9"))
        )
        == []
    )


def test_qos_of_an_rnic():
    have = qos(MLNX_QOS)
    assert (have.trust, have.pfc, have.priority[26], have.priority[48]) == ("dscp", {3}, 3, 6)
    assert qos_wrong(have, trust="dscp", pfc=[3], priority={26: 3, 48: 6}) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("state: dscp", "state: pcp", "trusts pcp"),
        ("0   0   0   1   0", "0   0   0   0   1", "PFC on [4]"),
        ("prio:3 dscp", "prio:4 dscp", "DSCP 26 in priority 4"),
        ("Priority trust", "Trust", "trusts nothing that it tells"),
    ],
)
def test_an_rnic_that_does_otherwise_is_told(old, new, words):
    wrong = qos_wrong(qos(MLNX_QOS.replace(old, new)), trust="dscp", pfc=[3], priority={26: 3})
    assert words in [found for found, _ in wrong]


def test_pcie():
    good = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16", "max_link_width": "16"}  # fmt: skip
    assert pcie_wrong(good) == []
    assert pcie_wrong({**good, "current_link_width": "8"}) == [("PCIe width 8", "16")]
    assert pcie_wrong({**good, "current_link_speed": "16.0 GT/s PCIe"}) == [
        ("PCIe speed 16.0 GT/s PCIe", "32.0 GT/s PCIe")
    ]
    assert len(pcie_wrong({})) == 2


def told(*changed, driver="550.54.15"):
    """What a host's watcher says of GPUs that are healthy but for what is changed, one a dict."""
    return json.dumps({"event": "gpus", "driver": driver, "why": None, "gpus": [GPU | each for each in changed]})


def change(facts, index, **changed):
    """Make one GPU of a host another."""
    said = json.loads(facts.raw["gpu"])
    said["gpus"][index] |= changed
    facts.raw["gpu"] = json.dumps(said)


def test_a_healthy_gpu_has_nothing_wrong():
    (gpu,) = gpus(told({})).gpus
    assert (gpu.bus_id, gpu.sm_mhz, gpu.place) == ("00000000:19:00.0", 1980, "gpu0 (00000000:19:00.0)")
    assert gpu_wrong(gpu) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reasons": 0x48}, "throttled: hardware slowdown"),
        ({"reasons": 0x4}, "throttled: software power cap"),
        ({"ecc_uncorrected": 2}, "2 uncorrected ECC errors since the driver was loaded"),
        ({"pcie": [5, 8]}, "PCIe width 8"),
        ({"persistence": False}, "persistence mode off: the first job pays for the driver's start"),
        ({"ecc": False}, "ECC off: a bit that flips is not seen"),
        ({"remap_pending": True}, "a row of its memory waits to be remapped"),
        ({"remap_pending": True, "remap_failed": True}, "a row of its memory could not be remapped"),
        ({"why": "NVML: GPU is lost"}, "does not answer: NVML: GPU is lost"),
    ],
)
def test_a_sick_gpu_is_told(changed, words):
    (gpu,) = gpus(told(changed)).gpus
    assert words in [found for found, _ in gpu_wrong(gpu)]


def test_an_idle_gpu_is_no_sick_gpu():
    (gpu,) = gpus(told({"reasons": 0x1, "sm_mhz": 345, "pcie": [1, 16]})).gpus
    assert gpu_wrong(gpu) == []


def test_what_the_gpu_cannot_tell_is_not_zero_and_is_named():
    state = rack_state()
    lacking = dict.fromkeys(("ecc", "ecc_uncorrected", "reasons", "power_limit_w", "persistence"))
    change(state["host1"], 4, **lacking)
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unseen,) = not_looked(RACK, state, RACK_CHECKS)
    assert unseen.where == "host1:gpu4 (00000000:19:00.0)"
    assert unseen.why == (
        "NVML does not tell ECC mode, ECC errors, persistence mode, what holds its clocks, power limit"
    )


RACK = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
PCIE = "current_link_speed: 32.0 GT/s PCIe\ncurrent_link_width: 16\nmax_link_speed: 32.0 GT/s PCIe\nmax_link_width: 16"


# A port of mlx5 as ethtool's man page and mlx5/counters.rst have it, 2.5 s apart in the fixture below.
FEC = """\
at: {at}
speed: 400000
FEC parameters for rail0:
Supported/Configured FEC encodings: Auto RS LLRS
Active FEC encoding: RS
Statistics:
  corrected_blocks: 256
    Lane 0: 125
    Lane 1: 131
  uncorrectable_blocks: 3
     rx_crc_errors_phy: 0
     rx_pcs_symbol_err_phy: {beyond}
     rx_corrected_bits_phy: {mended}
     rx_symbol_err_phy: 0
"""
FIRST = FEC.format(at="1763728000.500000000", beyond=17, mended=1000)
LAST = FEC.format(at="1763728003.000000000", beyond=17, mended=9000)


def bus(host):
    """Paths and NUMA nodes of a host whose RNICs each have their GPU below one PCIe switch, two NUMA nodes."""
    paths, numa = [], []
    for index, rnic in enumerate(host.rnics):
        gpu = next(gpu for gpu in host.gpus if gpu.name == rnic.gpu)
        for port, address in enumerate((rnic.pcie, gpu.pcie)):
            paths.append(
                f"/sys/devices/pci0000:{index}5/0000:{index}5:01.0/0000:{index}6:00.0/0000:{index}7:0{port}.0/{address}"
            )
            numa.append(f"/sys/bus/pci/devices/{address}/numa_node:{index // 4}")
    return "\n".join(paths), "\n".join(numa)


def rack_state():
    """What the tools of a healthy rack say, host by host."""
    state = {}
    for host in RACK.topology.hosts:
        facts = state[host.name] = Facts()
        for rnic in host.rnics:
            facts.raw[f"pcie {rnic.name}"] = PCIE
            facts.raw[f"mlxlink {rnic.name}"] = MLXLINK
            facts.raw[f"qos {rnic.name}"] = MLNX_QOS
            facts.raw[f"firmware {rnic.name}"] = "MT_0000000838\n28.39.1002"
            facts.raw[f"fec-first {rnic.name}"] = FIRST
            facts.raw[f"fec-last {rnic.name}"] = LAST
            facts.raw["pci"], facts.raw["numa"] = bus(host)
            path = next(path for path in facts.raw["pci"].split() if path.endswith(rnic.pcie))
            facts.raw[f"device {rnic.name}"] = path
        facts.raw["gpu"] = told(*({"index": index} for index in range(8)))
        facts.raw["chrony"] = CHRONY
    return state


def test_a_healthy_rack_has_nothing_wrong():
    assert run_checks(RACK, rack_state(), RACK_CHECKS) == []
    assert not_looked(RACK, rack_state(), RACK_CHECKS) == []


@pytest.mark.parametrize(
    ("check", "where", "key", "old", "new"),
    [
        ("pcie", "host2:mlx5_3", "pcie mlx5_3", "current_link_width: 16", "current_link_width: 4"),
        ("link-quality", "host2:mlx5_3", "mlxlink mlx5_3", "Errors          : 0", "Errors          : 9"),
        ("qos", "host2:mlx5_3", "qos mlx5_3", "state: dscp", "state: pcp"),
        ("firmware", "host2:mlx5_3", "firmware mlx5_3", "28.39.1002", "28.36.1010"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "symbol_err_phy: 17", "symbol_err_phy: 19"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "bits_phy: 9000", "bits_phy: 90000000"),
        ("fec", "host2:mlx5_3", "fec-last mlx5_3", "encoding: RS", "encoding: Off"),
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
def test_each_sick_part_of_a_rack_is_found_where_it_is(check, where, key, old, new):
    state = rack_state()
    if ":gpu3" in where:
        whole = json.loads(state["host2"].raw[key])
        assert old in json.dumps(whole["gpus"][3])
        whole["gpus"][3] = json.loads(json.dumps(whole["gpus"][3]).replace(old, new))
        state["host2"].raw[key] = json.dumps(whole)
    else:
        assert old is None or old in state["host2"].raw[key]
        state["host2"].raw[key] = new if old is None else state["host2"].raw[key].replace(old, new)
    found = {(wrong.check, wrong.where) for wrong in run_checks(RACK, state, RACK_CHECKS)}
    # What is narrow or old is not the golden configuration either.
    assert found - {("golden", where)} == {(check, where)} - {("golden", where)}
    assert check != "golden" or found


def test_a_host_whose_tools_say_nothing_is_not_healthy():
    """Each check says so: what must answer is wrong, what need not be there was not looked at."""
    state = rack_state() | {"host1": Facts()}
    wrong = {one.check for one in run_checks(RACK, state, RACK_CHECKS)}
    unseen = {one.check for one in not_looked(RACK, state, RACK_CHECKS)}
    assert wrong | unseen == {check.name for check in RACK_CHECKS}
    assert unseen == {"fec", "golden", "affinity"}
    assert {one.where.partition(":")[0] for one in not_looked(RACK, state, RACK_CHECKS)} == {"host1"}


def test_firmware_that_is_wrong_on_every_rnic_is_found_by_the_golden_one():
    """The majority cannot tell that: `firmware` is silent, `golden` names each."""
    state = rack_state()
    for host in RACK.topology.hosts:
        for rnic in host.rnics:
            state[host.name].raw[f"firmware {rnic.name}"] = "MT_0000000838\n28.36.1010"
            state[host.name].raw[f"pcie {rnic.name}"] = PCIE.replace("width: 16", "width: 8").replace("32.0", "16.0")
    found = run_checks(RACK, state, RACK_CHECKS)
    assert {one.check for one in found} == {"golden"}
    assert {one.found for one in found} == {"firmware 28.36.1010", "PCIe speed (GT/s) 16", "PCIe width 8"}
    assert len(found) == 3 * 32


def test_without_a_golden_configuration_nothing_is_compared_and_that_is_told():
    inventory = dataclasses.replace(RACK, golden=None)
    (told,) = [one for one in not_looked(inventory, rack_state(), RACK_CHECKS) if one.check == "golden"]
    assert (told.where, told.why) == ("rack-h100", "the inventory has no faultbed_golden to compare with")
    other = dataclasses.replace(RACK, golden=GoldenVars(rnic_firmware={"MT_0000000223": "20.36.1010"}))
    told = {one.why for one in not_looked(other, rack_state(), RACK_CHECKS)}
    assert told == {"faultbed_golden.rnic_firmware has no board MT_0000000838"}


def test_how_far_a_gpu_is_from_its_rnic():
    state = rack_state()
    facts = state["host1"]
    facts.raw["pci"] = facts.raw["pci"].replace("0000:05:01.0/0000:06:00.0/0000:07:01.0/", "0000:05:02.0/")
    (near,) = run_checks(RACK, state, RACK_CHECKS)
    assert near.found == "gpu0 below another root port of NUMA node 0 (NODE); beside it: no GPU of the inventory"
    facts.raw["numa"] = facts.raw["numa"].replace("0000:19:00.0/numa_node:0", "0000:19:00.0/numa_node:1")
    (far,) = run_checks(RACK, state, RACK_CHECKS)
    assert far.found.startswith("gpu0 on NUMA node 1, itself on 0 (SYS)")
    facts.raw["numa"] = facts.raw["numa"].replace("numa_node:0", "numa_node:-1")
    (unknown,) = run_checks(RACK, state, RACK_CHECKS)
    assert "NUMA nodes are not told" in unknown.found


def test_a_pair_that_was_swapped_in_the_inventory_says_which_gpu_is_beside():
    rnics = RACK.topology.hosts[0].rnics
    swapped = (dataclasses.replace(rnics[0], gpu="gpu1"), dataclasses.replace(rnics[1], gpu=None), *rnics[2:])
    hosts = (dataclasses.replace(RACK.topology.hosts[0], rnics=swapped), *RACK.topology.hosts[1:])
    inventory = dataclasses.replace(RACK, topology=dataclasses.replace(RACK.topology, hosts=hosts))
    (found,) = run_checks(inventory, rack_state(), RACK_CHECKS)
    assert (found.where, found.found.rpartition("; ")[2]) == ("host1:mlx5_0", "beside it: gpu0")
    (unseen,) = not_looked(inventory, rack_state(), RACK_CHECKS)
    assert (unseen.where, unseen.why) == ("host1:mlx5_1", "the inventory pairs it with no GPU (faultbed_rnics[].gpu)")


def test_a_driver_that_counts_no_fec_is_neither_right_nor_wrong():
    state = rack_state()
    said = "at: 1.0\nspeed: 400000\nnetlink error: Operation not supported\n"
    state["host1"].raw["fec-first mlx5_0"] = state["host1"].raw["fec-last mlx5_0"] = said
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unseen,) = not_looked(RACK, state, RACK_CHECKS)
    assert (unseen.check, unseen.where) == ("fec", "host1:mlx5_0")
    assert "which FEC is active" in unseen.why
    assert "Operation not supported" in unseen.why


def test_errors_from_when_the_link_came_up_are_no_sickness():
    """Both looks have 17 of them; only growth counts, and counters that were cleared in between are no growth."""
    assert fec.fec_wrong(fec.read(FIRST), fec.read(LAST)) == []
    assert fec.fec_wrong(fec.read(LAST.replace(": 17", ": 99")), fec.read(LAST)) == []


def test_one_gpu_that_is_set_otherwise_is_odd_and_all_of_them_are_a_wish():
    state = rack_state()
    for host in RACK.topology.hosts:
        for index in range(8):
            change(state[host.name], index, reasons=0x2, power_limit_w=500)
    assert run_checks(RACK, state, RACK_CHECKS) == []
    state = rack_state()
    change(state["host3"], 5, reasons=0x2, sm_mhz=1410, sm_max_mhz=1755, power_limit_w=350)
    found = run_checks(RACK, state, RACK_CHECKS)
    assert {one.where for one in found} == {"host3:gpu5 (00000000:19:00.0)"}
    assert {one.found for one in found} == {
        "SM clock up to 1755 MHz",
        "its clocks are set or locked",
        "power limit 350 W",
    }


def test_why_there_are_no_gpus_is_told():
    state = rack_state()
    state["host1"].raw["gpu"] = json.dumps({"driver": None, "why": "NVML: Driver Not Loaded", "gpus": []})
    state["host2"].raw["gpu"] = "Traceback: no such thing"
    first, second = [one for one in run_checks(RACK, state, RACK_CHECKS) if one.check == "gpu"]
    assert first.found == "0 GPUs answer (NVML: Driver Not Loaded)"
    assert second.found == "0 GPUs answer (the host did not tell of its GPUs: Traceback: no such thing)"


class Answering:
    """A rack lab whose machines say what is written down, and whose watchers know their GPUs, or do not answer."""

    inventory_model, topology = RACK, RACK.topology

    def __init__(self, gpus):
        self._gpus = gpus

    def nodes(self):
        return ("host1", "rtsw1")

    def node(self, name):
        return self

    def run(self, argv, *, check, timeout_s):
        name = argv[-1].split()[2]
        return Completed(argv=tuple(argv), rc=0, stdout=f"@@node {name}\n@@clock\n1.0\n@@end\n", stderr="")

    def ask(self, machine, request, *, timeout_s):
        assert (machine, request) == ("host1", {"do": "gpus"})
        if isinstance(self._gpus, Exception):
            raise self._gpus
        return self._gpus


def test_a_host_is_asked_for_its_gpus_and_a_switch_is_not():
    said = json.loads(told({}))
    assert gpus(look(Answering(said))["host1"].raw["gpu"]).gpus[0].sm_mhz == 1980
    silent = look(Answering(LabError("host1: python3 is not there")))
    assert gpus(silent["host1"].raw["gpu"]).why == "host1: python3 is not there"
    assert "gpu" not in silent["rtsw1"].raw


def test_a_check_that_a_kind_of_lab_has_not_says_why():
    soft = inventory_module.load(shipped.inventories() / "soft.yml")
    told = not_looked(soft, {}, RACK_CHECKS)
    assert [one.check for one in told] == [check.name for check in RACK_CHECKS]
    assert {one.where for one in told} == {"soft"}
    for check in (*CHECKS, *RACK_CHECKS):
        assert bool(check.elsewhere) == (len(check.labs) == 1), check.name


def test_the_script_of_a_rack_host_asks_its_tools_and_the_answer_is_kept_raw():
    text = script(RACK, "host1")
    assert "mlxlink -d mlx5_7 -c" in text
    assert text.index("raw fec-first mlx5_7") < text.index("raw mlxlink mlx5_0") < text.index("raw fec-last mlx5_0")
    assert "nvidia-smi" not in text
    assert "mlxlink" not in script(inventory_module.load(shipped.inventories() / "soft.yml"), "host1")
    answer = f"@@node host1\n@@raw mlxlink mlx5_0\n{MLXLINK}@@end\n"
    raw = parse(answer)["host1"].raw
    assert link_wrong(key_values(raw["mlxlink mlx5_0"])) == []


def test_chrony():
    assert chrony_offset_s(CHRONY) == pytest.approx(1.234e-6)
    assert chrony_offset_s(CHRONY.replace("Normal", "Not synchronised")) is None
    assert chrony_offset_s("506 Cannot talk to daemon") is None


@st.composite
def spoilt(draw):
    """Any text, or what a tool prints with a part of it cut out, or another text in its place."""
    said = draw(st.sampled_from(["", MLXLINK, MLNX_QOS, told({}), CHRONY, FIRST]))
    begin = draw(st.integers(0, len(said)))
    return said[:begin] + draw(st.text(max_size=20)) + said[begin + draw(st.integers(0, 20)) :]


@settings(max_examples=500)
@given(spoilt())
def test_readers_take_any_text(text):
    """What they cannot read they leave out; of no text do they make an error, or a value that no tool tells."""
    values = key_values(text)
    assert all(name == name.strip() and value.strip() for name, value in values.items())
    assert link_wrong(values) or values["State"] == "Active"
    found = qos(text)
    assert found.pfc <= set(range(8))
    assert set(found.priority.values()) <= set(range(10))
    said = gpus(text)
    assert said.gpus or said.why
    for gpu in said.gpus:
        assert all(right for _, right in gpu_wrong(gpu))
    offset_s = chrony_offset_s(text)
    assert offset_s is None or offset_s >= 0
    assert all(count >= 0 for count in fec.read(text).counters.values())
    assert all(right for _, right in fec.fec_wrong(fec.read(FIRST), fec.read(text)))


def test_a_clock_that_is_no_number_is_far_off():
    assert chrony_offset_s(CHRONY.replace("0.000001234", "nan")) > 1
