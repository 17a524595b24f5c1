"""Bring RNICs to what the QoS profile says: type of service, DCQCN, trust and PFC, firmware; write down what was there.

    default type of service   configfs rdma_cm (Linux, Documentation/ABI/testing/configfs-rdma_cm)
    DCQCN                     /sys/class/net/DEV/ecn (MLNX_OFED, "Explicit Congestion Notification"); of the kernel's
                              own driver debugfs mlx5/PCI/cc_params (Linux, drivers/infiniband/hw/mlx5/cong.c), and the
                              firmware's mask of priorities
    trust, PFC, DSCP map      mlnx_qos (MLNX_OFED), or else iproute2's dcb
    firmware                  mlxconfig (MFT) or mstconfig (mstflint), counts from the next reset
    registers                 mlxreg (MFT) or mstreg (mstflint), count until the next reset
    PFC timeout               ethtool --set-tunable pfc-prevention-tout (ethtool(8))

All but the first are not yet run on hardware.
"""

import os
import re
import shutil

from faultbed_dcb import bring_dscp, bring_pcp, bring_pfc
from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

CONFIGFS = "/sys/kernel/config/rdma_cm"
DEBUGFS = "/sys/kernel/debug/mlx5"
NETDEVS = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"
ROLE = "rnic_host"
PFC_AUTO, PFC_AUTO_MS = "65535", "100"  # what mlx5 takes the first for, and then tells (Linux, en_ethtool.c)


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    saved, later, notes = SavedState(ROLE, changes), [], []
    for rnic in wanted["rnics"]:
        qos = wanted["qos"]
        if qos:
            _type_of_service(saved, rnic["name"], qos["roce_dscp"] << 2)
        if not os.path.exists(f"{INFINIBAND}/{rnic['name']}/device"):
            continue  # software: no firmware, no ports of its own
        if qos:
            _qos(saved, rnic["netdev"], qos, wanted["dscp_map"])
            later += _dcqcn(saved, rnic, qos, wanted, notes)
        later += _firmware(saved, rnic, wanted["firmware"])
        _registers(saved, rnic, wanted["registers"])
        if wanted["pfc_timeout"] != "":
            _pfc_timeout(saved, rnic["netdev"], str(wanted["pfc_timeout"]))
    if later:
        notes.append(f"{', '.join(later)}: counts from the next reboot or `mlxfwreset`")
    return {"notes": notes}


def _type_of_service(saved, rnic, tos):
    """The default of connections that RDMA-CM makes; where configfs has no rdma_cm, programs set their own."""
    if not os.path.isdir(CONFIGFS):
        return
    folder = f"{CONFIGFS}/{rnic}"
    if saved.folder(folder):  # making it is how configfs is asked for one
        saved.value(f"{folder}/ports/1/default_roce_tos", tos)


def _qos(saved, netdev, qos, lines):
    """Trust, PFC and the DSCP map: mlnx_qos where it is, because it tells all three, and the kernel's dcb elsewhere."""
    if shutil.which("mlnx_qos"):
        _trust_and_pfc(saved, netdev, qos)
        if qos["trust"] == "dscp":
            _dscp_map(saved, netdev, _priorities(lines))
        return
    bring_pfc(saved, netdev, qos["pfc_priorities"], otherwise="and there is no mlnx_qos: take qos out of the inventory")
    if qos["trust"] == "dscp":
        bring_dscp(saved, netdev, lines)
    else:
        bring_pcp(saved, netdev)


def _priorities(lines):
    return {line["dscp"]: line["priority"] for line in lines}


def _dcqcn(saved, rnic, qos, wanted, notes):
    """Notification point (sends CNPs) and reaction point (slows down), for the priority of RoCE."""
    on = {"profile": qos["dcqcn"], "on": True, "off": False}.get(wanted["dcqcn"])
    if on is None:
        raise StateError(f"rnic_host_dcqcn is {wanted['dcqcn']!r}: say profile, on or off")
    priority = _priorities(wanted["dscp_map"])
    roce, cnp = priority.get(qos["roce_dscp"], 0), priority.get(qos["cnp_dscp"], 0)
    folder = f"{NETDEVS}/{rnic['netdev']}/ecn"
    if os.path.isdir(folder):
        for point in ("roce_np", "roce_rp"):
            saved.value(f"{folder}/{point}/enable/{roce}", int(on))
        saved.value(f"{folder}/roce_np/cnp_dscp", qos["cnp_dscp"])
        saved.value(f"{folder}/roce_np/cnp_802p_prio", cnp)
        return []
    device = os.path.basename(os.path.realpath(f"{INFINIBAND}/{rnic['name']}/device"))
    folder = f"{DEBUGFS}/{device}/cc_params"
    if not os.path.isdir(folder):
        raise StateError(
            f"{rnic['netdev']} has neither {NETDEVS}/{rnic['netdev']}/ecn nor {folder}: its driver has no DCQCN; take "
            "qos out of the inventory, or mend it"
        )
    # Whoever writes the priority sets the mode, too, to "this priority": so the mode is written down first, and put
    # back last.
    saved.value(f"{folder}/np_cnp_prio_mode", 0)
    saved.value(f"{folder}/np_cnp_prio", cnp)
    saved.value(f"{folder}/np_cnp_dscp", qos["cnp_dscp"])
    return _mask(saved, rnic, device, roce, on, notes)


def _mask(saved, rnic, device, roce, on, notes):
    """The firmware's mask of priorities with DCQCN; a port is a function of the device. By default all have it."""
    if not _tool("mlxconfig", "mstconfig"):
        if not on:
            raise StateError(
                f"{rnic['name']}: DCQCN is turned off in its firmware: install mstflint, or mlxconfig (MFT)"
            )
        notes.append(f"{rnic['name']}: neither mlxconfig nor mstconfig is here to tell whether DCQCN is on")
        return []
    name = f"ROCE_CC_PRIO_MASK_P{int(device.rpartition('.')[2]) + 1}"
    have = int(_settings(rnic, [name])[name], 0)
    return _firmware(saved, rnic, {name: have | 1 << roce if on else have & ~(1 << roce)})


def _trust_and_pfc(saved, netdev, qos):
    said = run(["mlnx_qos", "-i", netdev])
    trust, pfc = trust_and_pfc(said)
    if trust is None or pfc is None:
        raise StateError(f"mlnx_qos -i {netdev} does not say what it trusts and pauses: {said[:200]!r}")
    tool = ["mlnx_qos", "-i", netdev]
    saved.command(
        f"{netdev} trust",
        have=trust,
        want=qos["trust"],
        do=[*tool, f"--trust={qos['trust']}"],
        undo=[*tool, f"--trust={trust}"],
    )
    wanted = ",".join(str(int(priority in qos["pfc_priorities"])) for priority in range(8))
    saved.command(f"{netdev} pfc", have=pfc, want=wanted, do=[*tool, "--pfc", wanted], undo=[*tool, "--pfc", pfc])


def _dscp_map(saved, netdev, priority):
    """The lines of the inventory; what they do not name stays. mlnx_qos shows a map only while DSCP is trusted."""
    have, tool = dscp_map(run(["mlnx_qos", "-i", netdev])), ["mlnx_qos", "-i", netdev, "--dscp2prio"]
    if not have and not saved.changes.check:
        raise StateError(f"mlnx_qos -i {netdev} shows no DSCP map although it trusts DSCP: look at it by hand")
    for dscp, wanted in priority.items():
        old = have.get(dscp, "unknown")
        undo = f"del,{dscp},{wanted}" if old == "unknown" else f"set,{dscp},{old}"
        key, do = f"{netdev} DSCP {dscp}", [*tool, f"set,{dscp},{wanted}"]
        saved.command(key, have=old, want=wanted, do=do, undo=[*tool, undo])


def dscp_map(said):
    """DSCP -> priority, of what mlnx_qos prints."""
    lines = re.findall(r"^\s*prio:(\d)\s+dscp:([\d,]+)", said, re.MULTILINE)
    return {int(dscp): int(priority) for priority, some in lines for dscp in some.split(",") if dscp}


def trust_and_pfc(said):
    """What mlnx_qos prints: ("dscp", "0,0,0,1,0,0,0,0"); None for what it does not say."""
    trust = re.search(r"^Priority trust state: (\w+)", said, re.MULTILINE)
    pfc = re.search(r"^\s+enabled\s+((?:[01]\s+){7}[01])", said, re.MULTILINE)
    return (trust[1] if trust else None, ",".join(pfc[1].split()) if pfc else None)


def _tool(*names):
    """The first of some programs that is here, or None."""
    return next((name for name in names if shutil.which(name)), None)


def _settings(rnic, names):
    device = rnic.get("pcie") or rnic["name"]
    tool = _tool("mlxconfig", "mstconfig")
    if tool is None:
        raise StateError(
            "neither mlxconfig (MFT) nor mstconfig (mstflint) is here: install one, or ask for no firmware"
        )
    have = firmware_settings(run([tool, "-d", device, "query", *names]))
    if lacking := [name for name in names if name not in have]:
        raise StateError(f"{device}: its firmware has no {', '.join(lacking)}: take it out of rnic_host_firmware")
    return have


def _firmware(saved, rnic, settings):
    """Settings of the next boot; those that differ are what a reset is needed for."""
    if not settings:
        return []
    have, later = _settings(rnic, list(settings)), []
    tool = [_tool("mlxconfig", "mstconfig"), "-y", "-d", rnic.get("pcie") or rnic["name"], "set"]
    for name, value in settings.items():
        want = str(int(value) if isinstance(value, bool) else value)
        do, undo = [*tool, f"{name}={want}"], [*tool, f"{name}={have[name]}"]
        if saved.command(f"{rnic['name']} {name}", have=have[name], want=want, do=do, undo=undo):
            later.append(f"{rnic['name']} {name}")
    return later


def _registers(saved, rnic, registers):
    """Fields of registers, which a reset forgets: name -> field -> number."""
    tool = _tool("mlxreg", "mstreg")
    if registers and tool is None:
        raise StateError("neither mlxreg (MFT) nor mstreg (mstflint) is here: install one, or ask for no registers")
    for name, fields in registers.items():
        at = [tool, "-d", rnic.get("pcie") or rnic["name"], "--reg_name", name]
        have = register_fields(run([*at, "--get"]))
        for field, value in fields.items():
            if field not in have:
                raise StateError(f"{rnic['name']}: its {name} has no {field}: take it out of rnic_host_registers")
            do, undo = ([*at, "--set", f"{field}={number:#x}", "--yes"] for number in (int(value), have[field]))
            saved.command(f"{rnic['name']} {name} {field}", have=have[field], want=int(value), do=do, undo=undo)


def register_fields(said):
    """What `mlxreg --get` prints, field -> number."""
    return {
        name: int(value, 16) for name, value in re.findall(r"^(\w+)\s*\|\s*(0x[0-9a-fA-F]+)\s*$", said, re.MULTILINE)
    }


def firmware_settings(said):
    """What `mlxconfig query` prints, name -> value at the next boot; of `True(1)` the number.

    With `-e` a line has three columns (default, current, next boot), a `*` where they differ and `RO` where it
    cannot be changed (mstflint, mlxcfg_ui.cpp, printSingleParam).
    """
    settings = {}
    line = r"^[ *\t](?:RO)?[ \t]+([A-Z][A-Z0-9_]+)(?:[ \t]+\S+){0,2}?[ \t]+(\S+)[ \t]*$"
    for name, value in re.findall(line, said, re.MULTILINE):
        number = re.fullmatch(r".*\((\w+)\)", value)
        settings[name] = number[1] if number else value
    return settings


def _pfc_timeout(saved, netdev, wanted):
    said = run(["ethtool", "--get-tunable", netdev, "pfc-prevention-tout"])
    have = said.rpartition(":")[2].split()[0] if said.split() else ""
    tool = ["ethtool", "--set-tunable", netdev, "pfc-prevention-tout"]
    auto = wanted in {"auto", PFC_AUTO}
    do = [*tool, PFC_AUTO if auto else wanted]
    saved.command(f"{netdev} PFC timeout", have=have, want=PFC_AUTO_MS if auto else wanted, do=do, undo=[*tool, have])
