"""What the tools of racks print, as recorded from their documentation and from public logs; and what is wrong in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import inventory as inventory_module
from testbed import shipped
from testbed.preflight.checks import run_checks
from testbed.preflight.looks import Facts, parse, script
from testbed.preflight.rack_checks import RACK_CHECKS
from testbed.preflight.rack_formats import (
    GPU_FIELDS,
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

GPU = "0, 00000000:19:00.0, Enabled, 1980, 1980, 0, 0x0000000000000000, 5, 5, 16, 16"
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


def test_a_healthy_gpu_has_nothing_wrong():
    (gpu,) = gpus(GPU)
    assert (gpu.bus_id, gpu.sm_mhz) == ("00000000:19:00.0", 1980)
    assert gpu_wrong(gpu) == []
    assert len(GPU.split(",")) == len(GPU_FIELDS)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0x0000000000000000", "0x0000000000000048", "throttled: hardware slowdown"),
        ("0x0000000000000000", "0x0000000000000004", "throttled: software power cap"),
        ("1980, 0,", "1980, 2,", "2 uncorrected ECC errors since the driver was loaded"),
        ("16, 16", "8, 16", "PCIe width 8"),
        ("Enabled", "Disabled", "persistence mode off: the first job pays for the driver's start"),
    ],
)
def test_a_sick_gpu_is_told(old, new, words):
    (gpu,) = gpus(GPU.replace(old, new))
    assert words in [found for found, _ in gpu_wrong(gpu)]


def test_an_idle_gpu_is_no_sick_gpu():
    (gpu,) = gpus(GPU.replace("0x0000000000000000", "0x0000000000000001").replace("1980, 1980", "345, 1980"))
    assert gpu_wrong(gpu) == []


def test_what_the_gpu_cannot_tell_is_not_zero():
    (gpu,) = gpus(GPU.replace("1980, 0,", "1980, [N/A],"))
    assert gpu.ecc_uncorrected is None


RACK = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
PCIE = "current_link_speed: 32.0 GT/s PCIe\ncurrent_link_width: 16\nmax_link_speed: 32.0 GT/s PCIe\nmax_link_width: 16"


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
        facts.raw["gpu"] = "\n".join(GPU.replace("0, 0000", f"{index}, 0000", 1) for index in range(8))
        facts.raw["chrony"] = CHRONY
    return state


def test_a_healthy_rack_has_nothing_wrong():
    assert run_checks(RACK, rack_state(), RACK_CHECKS) == []


@pytest.mark.parametrize(
    ("check", "where", "key", "old", "new"),
    [
        ("pcie", "host2:mlx5_3", "pcie mlx5_3", "current_link_width: 16", "current_link_width: 4"),
        ("link-quality", "host2:mlx5_3", "mlxlink mlx5_3", "Errors          : 0", "Errors          : 9"),
        ("qos", "host2:mlx5_3", "qos mlx5_3", "state: dscp", "state: pcp"),
        ("firmware", "host2:mlx5_3", "firmware mlx5_3", "28.39.1002", "28.36.1010"),
        ("gpu", "host2", "gpu", "7, 00000000", "x, 00000000"),
        ("time", "host2", "chrony", "0.000001234", "-0.5"),
    ],
)
def test_each_sick_part_of_a_rack_is_found_where_it_is(check, where, key, old, new):
    state = rack_state()
    assert old in state["host2"].raw[key]
    state["host2"].raw[key] = state["host2"].raw[key].replace(old, new)
    assert [(wrong.check, wrong.where) for wrong in run_checks(RACK, state, RACK_CHECKS)] == [(check, where)]


def test_a_host_whose_tools_say_nothing_is_not_healthy():
    state = rack_state() | {"host1": Facts()}
    told = {wrong.check for wrong in run_checks(RACK, state, RACK_CHECKS)}
    assert told == {check.name for check in RACK_CHECKS}


def test_the_script_of_a_rack_host_asks_its_tools_and_the_answer_is_kept_raw():
    text = script(RACK, "host1")
    assert "mlxlink -d mlx5_7 -c" in text
    assert f"--query-gpu={','.join(GPU_FIELDS)}" in text
    assert "mlxlink" not in script(inventory_module.load(shipped.inventories() / "soft.yml"), "host1")
    answer = f"@@node host1\n@@raw mlxlink mlx5_0\n{MLXLINK}@@raw gpu\n{GPU}\n@@end\n"
    raw = parse(answer)["host1"].raw
    assert link_wrong(key_values(raw["mlxlink mlx5_0"])) == []
    assert len(gpus(raw["gpu"])) == 1


def test_chrony():
    assert chrony_offset_s(CHRONY) == pytest.approx(1.234e-6)
    assert chrony_offset_s(CHRONY.replace("Normal", "Not synchronised")) is None
    assert chrony_offset_s("506 Cannot talk to daemon") is None


@given(st.text(max_size=300))
def test_readers_take_any_text(text):
    link_wrong(key_values(text))
    qos(text)
    gpus(text)
    chrony_offset_s(text)
