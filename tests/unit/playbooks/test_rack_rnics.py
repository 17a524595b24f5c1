"""RNICs of racks with the kernel's own driver: PFC, DSCP and trust by dcb, DCQCN by debugfs and firmware, registers.

Tools are stand-ins that print what their documentation or recorded output has. Not yet run on hardware.
"""

from __future__ import annotations

import functools
import json

import pytest
from served_tools import serve_script

TOOL = """\
# dcb, mlxconfig, mlxreg and ethtool of one RNIC, over its state in a file. `dcb app del` of what is not there fails, as
# the kernel's dcb_ieee_delapp does.
import json, pathlib, sys
path = pathlib.Path({state!r})
tool, words, state = pathlib.Path(sys.argv[0]).name, sys.argv[1:], json.loads(path.read_text())
if tool == "dcb":
    words = [word for word in words if word != "-N"]
    table, pairs = state[words[0]], [word.split(":") for word in words[5:]]
    if words[1] == "show":
        print(words[4], *(f"{{k}}:{{v}}" for k, v in table.items()))
    elif words[1] == "flush":
        table.clear()
    elif words[1] == "del":
        for key, value in pairs:
            if table.pop(key, None) != value:
                sys.exit("Error: dcb: No such file or directory")
    else:
        table.update(pairs)
elif tool == "mlxconfig":
    name = words[-1].partition("=")[0]
    if "set" in words:
        assert words[:2] == ["-y", "-d"], words
        state["firmware"][name] = words[-1].partition("=")[2]
    print("Configurations:                                      Next Boot")
    print(f"        {{name:<43}} {{state['firmware'][name]}}" if name in state["firmware"] else "")
elif tool == "mlxreg":
    if "--set" in words:
        assert words[-1] == "--yes", words
        name, _, value = words[words.index("--set") + 1].partition("=")
        state["register"][name] = int(value, 16)
    print("Sending access register...\\n\\nField Name                   | Data\\n=====================")
    for name, value in state["register"].items():
        print(f"{{name:<28}} | 0x{{value:08x}}")
elif tool == "ethtool":
    if words[0] == "--set-tunable":
        state["timeout"] = 100 if int(words[3]) == 65535 else int(words[3])
    print(f"pfc-prevention-tout: {{state['timeout']}}")
path.write_text(json.dumps(state))
"""
BEFORE = {
    "pfc": {str(number): "off" for number in range(8)},
    "app": {},
    "firmware": {"ROCE_CC_PRIO_MASK_P2": "247", "SRIOV_EN": "False(0)"},
    "register": {"roce_adp_retrans_en": 1, "roce_slow_restart_en": 1},
    "timeout": 0,
}
CC = {"np_cnp_prio_mode": "1", "np_cnp_prio": "7", "np_cnp_dscp": "0"}
QOS = {"trust": "dscp", "roce_dscp": 26, "cnp_dscp": 48, "pfc_priorities": [3], "dcqcn": True}


@pytest.fixture
def rnic(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role on a host with one RNIC, the second port of its card, and inbox drivers and tools."""
    role, tools, state = program("rnic_host"), tmp_path / "bin", tmp_path / "state.json"
    device = tmp_path / "devices/0000:18:00.1"
    cc, link = tmp_path / "debug/0000:18:00.1/cc_params", tmp_path / "infiniband/mlx5_1"
    for folder in (device, cc, link, tools):
        folder.mkdir(parents=True)
    (link / "device").symlink_to(device)
    for name, value in CC.items():
        (cc / name).write_text(f"{value}\n")
    state.write_text(json.dumps(BEFORE))
    for name in ("dcb", "mlxconfig", "mlxreg", "ethtool"):
        serve_script(tools / name, TOOL.format(state=str(state)))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for name, place in (("INFINIBAND", "infiniband"), ("DEBUGFS", "debug"), ("NETDEVS", "net"), ("CONFIGFS", "none")):
        monkeypatch.setattr(role, name, str(tmp_path / place))
    keep = functools.partial(saved_state, folder=str(tmp_path / "found"))
    monkeypatch.setattr(role, "SavedState", keep)

    def configure(*, check=False, qos=QOS, **edit):
        made = changes(check=check)
        lines = [{"dscp": 0, "priority": 0}, {"dscp": 26, "priority": 3}, {"dscp": 48, "priority": 6}]
        desired = {"rnics": [{"name": "mlx5_1", "netdev": "rail1"}], "qos": qos, "dscp_map": lines, "dcqcn": "profile"}
        configure.result = role._configure(desired | {"firmware": {}, "registers": {}, "pfc_timeout": ""} | edit, made)
        return [line.rpartition("/")[2].partition(":")[0] for line in made.made]

    def teardown():
        one = keep("rnic_host", changes(check=False))
        one.restore()

    configure.role, configure.teardown, configure.tools = role, teardown, tools
    configure.state = lambda: json.loads(state.read_text())
    configure.cc = lambda: {name: (cc / name).read_text().strip() for name in CC}
    configure.cc_folder = cc
    return configure


def test_inbox_driver_gets_the_whole_profile_and_is_restored(rnic):
    """The default rdma_stack flavour, inbox, has neither mlnx_qos nor the sysfs folder `ecn`."""
    assert rnic(check=True) == rnic()
    assert rnic.state()["pfc"] == BEFORE["pfc"] | {"3": "on"}
    assert rnic.state()["app"] == {"0": "0", "26": "3", "48": "6"}
    assert rnic.state()["firmware"]["ROCE_CC_PRIO_MASK_P2"] == str(247 | 1 << 3)
    assert rnic.cc() == {"np_cnp_prio_mode": "0", "np_cnp_prio": "6", "np_cnp_dscp": "48"}
    assert rnic.result == {"notes": ["mlx5_1 ROCE_CC_PRIO_MASK_P2: in force from the next reboot or `mlxfwreset`"]}
    assert rnic() == []
    rnic.teardown()
    assert rnic.state() == BEFORE
    assert rnic.cc() == CC


def test_cnp_priority_mode_is_restored_after_the_priority(rnic, monkeypatch):
    """The kernel clears the mode when the priority is written (cong.c, MLX5_IB_DBG_CC_NP_CNP_PRIO)."""
    rnic()
    put = rnic.role.SavedState.func._put_value

    def kernel(one, path, value):
        put(one, path, value)
        if path.endswith("np_cnp_prio"):
            (rnic.cc_folder / "np_cnp_prio_mode").write_text("0\n")

    monkeypatch.setattr(rnic.role.SavedState.func, "_put_value", kernel)
    rnic.teardown()
    assert rnic.cc() == CC


def test_dcqcn_off_applies_to_the_roce_priority_or_is_refused(rnic):
    rnic(dcqcn="on")
    rnic(dcqcn="off")
    assert rnic.state()["firmware"]["ROCE_CC_PRIO_MASK_P2"] == "247"
    (rnic.tools / "mlxconfig").unlink()
    with pytest.raises(rnic.role.StateError, match="install mstflint"):
        rnic(dcqcn="off")
    rnic(dcqcn="on")
    assert rnic.result["notes"] == [
        "mlx5_1: cannot check whether DCQCN is on; install mstconfig (mstflint) or mlxconfig"
    ]


def test_pcp_trust_has_no_dscp_map(rnic):
    rnic()
    rnic(qos=QOS | {"trust": "pcp"})
    assert rnic.state()["app"] == {}
    assert rnic(qos=QOS | {"trust": "pcp"}) == []
    rnic.teardown()
    assert rnic.state() == BEFORE


def test_registers_and_pfc_timeout_are_set_once_and_restored(rnic):
    registers = {"ROCE_ACCL": {"roce_adp_retrans_en": 0, "roce_slow_restart_en": 1}}
    assert rnic(qos=None, registers=registers, pfc_timeout="auto") == [
        "mlx5_1 ROCE_ACCL roce_adp_retrans_en", "rail1 PFC timeout",
    ]  # fmt: skip
    assert rnic(qos=None, registers=registers, pfc_timeout="auto") == []
    assert rnic.state()["register"] == {"roce_adp_retrans_en": 0, "roce_slow_restart_en": 1}
    assert rnic.state()["timeout"] == 100
    with pytest.raises(rnic.role.StateError, match="its ROCE_ACCL has no roce_magic_en"):
        rnic(qos=None, registers={"ROCE_ACCL": {"roce_magic_en": 1}})
    rnic.teardown()
    assert rnic.state() == BEFORE


def test_pfc_timeout_of_zero_is_applied(rnic):
    rnic(qos=None, pfc_timeout=7)
    assert rnic(qos=None, pfc_timeout=0) == ["rail1 PFC timeout"]
    assert rnic.state()["timeout"] == 0


def test_firmware_boolean_in_yaml_is_set_once(rnic):
    assert rnic(qos=None, firmware={"SRIOV_EN": True}) == ["mlx5_1 SRIOV_EN"]
    assert rnic.state()["firmware"]["SRIOV_EN"] == "1"
    assert rnic(qos=None, firmware={"SRIOV_EN": True}) == []


def test_driver_without_dcqcn_error_names_both_paths(rnic):
    for name in CC:
        (rnic.cc_folder / name).unlink()
    rnic.cc_folder.rmdir()
    with pytest.raises(rnic.role.StateError, match=r"neither .*/net/rail1/ecn nor .*0000:18:00\.1/cc_params"):
        rnic()
