"""Configure RNICs by the inventory's QoS profile: type of service, DCQCN, trust, PFC, firmware and registers.

Old values are saved before the first change. Interfaces and tools by setting:

    default type of service   configfs rdma_cm (Linux, Documentation/ABI/testing/configfs-rdma_cm)
    DCQCN                     /sys/class/net/DEV/ecn (MLNX_OFED, "Explicit Congestion Notification"); with the kernel's
                              own driver debugfs mlx5/PCI/cc_params (Linux, drivers/infiniband/hw/mlx5/cong.c), and the
                              firmware's mask of priorities
    trust, PFC, DSCP map      mlnx_qos (MLNX_OFED), or else iproute2's dcb
    firmware                  mlxconfig (MFT) or mstconfig (mstflint); in force from the next reset
    registers                 mlxreg (MFT) or mstreg (mstflint); in force until the next reset
    PFC timeout               ethtool --set-tunable pfc-prevention-tout (ethtool(8))

All but the first are not yet run on hardware.
"""

import os
import re
import shutil

from faultbed_dcb import configure_dscp, configure_pcp, configure_pfc
from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

CONFIGFS = "/sys/kernel/config/rdma_cm"
DEBUGFS = "/sys/kernel/debug/mlx5"
NETDEVS = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"
ROLE = "rnic_host"
PFC_AUTO, PFC_AUTO_MS = "65535", "100"
"""mlx5 accepts the first as "auto" and then reports the second (Linux, en_ethtool.c)."""


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved, pending, notes = SavedState(ROLE, changes), [], []
    for rnic in desired["rnics"]:
        qos = desired["qos"]
        if qos:
            _configure_type_of_service(saved, rnic["name"], qos["roce_dscp"] << 2)
        if not os.path.exists(f"{INFINIBAND}/{rnic['name']}/device"):
            continue  # a soft RNIC has no firmware and no port of its own
        if qos:
            _configure_qos(saved, rnic["netdev"], qos, desired["dscp_map"])
            pending += _configure_dcqcn(saved, rnic, qos, desired, notes)
        pending += _configure_firmware(saved, rnic, desired["firmware"])
        _configure_registers(saved, rnic, desired["registers"])
        if desired["pfc_timeout"] != "":
            _configure_pfc_timeout(saved, rnic["netdev"], str(desired["pfc_timeout"]))
    if pending:
        notes.append(f"{', '.join(pending)}: in force from the next reboot or `mlxfwreset`")
    return {"notes": notes}


def _configure_type_of_service(saved, rnic, tos):
    """Set the default type of service of RDMA-CM's connections; without configfs rdma_cm programs set their own."""
    if not os.path.isdir(CONFIGFS):
        return
    folder = f"{CONFIGFS}/{rnic}"
    if saved.folder(folder):  # the kernel fills a new folder with the device's settings
        saved.value(f"{folder}/ports/1/default_roce_tos", tos)


def _configure_qos(saved, netdev, qos, dscp_map):
    """Set trust, PFC and the DSCP map: by mlnx_qos if it is installed, because it reports all three, or else by dcb."""
    if shutil.which("mlnx_qos"):
        _configure_trust_and_pfc(saved, netdev, qos)
        if qos["trust"] == "dscp":
            _configure_dscp_map(saved, netdev, _priorities(dscp_map))
        return
    advice = "install mlnx_qos, or remove faultbed_qos from the inventory"
    configure_pfc(saved, netdev, qos["pfc_priorities"], otherwise=advice)
    if qos["trust"] == "dscp":
        configure_dscp(saved, netdev, dscp_map)
    else:
        configure_pcp(saved, netdev)


def _priorities(dscp_map):
    """Return the inventory's DSCP map as DSCP -> priority."""
    return {line["dscp"]: line["priority"] for line in dscp_map}


def _configure_dcqcn(saved, rnic, qos, desired, notes):
    """Set the notification point (sends CNPs) and the reaction point (slows down) for the priority of RoCE.

    Returns the names of firmware settings that wait for a reset. What cannot be checked is added to `notes`.

    Raises:
        StateError: the driver has no DCQCN, or the tool for the firmware is missing.
    """
    enable = {"profile": qos["dcqcn"], "on": True, "off": False}.get(desired["dcqcn"])
    if enable is None:
        raise StateError(f"rnic_host_dcqcn: {desired['dcqcn']!r} is no choice; set profile, on or off")
    priorities = _priorities(desired["dscp_map"])
    roce, cnp = priorities.get(qos["roce_dscp"], 0), priorities.get(qos["cnp_dscp"], 0)
    folder = f"{NETDEVS}/{rnic['netdev']}/ecn"
    if os.path.isdir(folder):
        for point in ("roce_np", "roce_rp"):
            saved.value(f"{folder}/{point}/enable/{roce}", int(enable))
        saved.value(f"{folder}/roce_np/cnp_dscp", qos["cnp_dscp"])
        saved.value(f"{folder}/roce_np/cnp_802p_prio", cnp)
        return []
    device = os.path.basename(os.path.realpath(f"{INFINIBAND}/{rnic['name']}/device"))
    folder = f"{DEBUGFS}/{device}/cc_params"
    if not os.path.isdir(folder):
        raise StateError(
            f"{rnic['netdev']} has neither {NETDEVS}/{rnic['netdev']}/ecn nor {folder}: its driver has no DCQCN; "
            "install another driver, or remove faultbed_qos from the inventory"
        )
    # A write of the priority also sets the mode to "this priority". So the mode is saved first and restored last.
    saved.value(f"{folder}/np_cnp_prio_mode", 0)
    saved.value(f"{folder}/np_cnp_prio", cnp)
    saved.value(f"{folder}/np_cnp_dscp", qos["cnp_dscp"])
    return _configure_dcqcn_mask(saved, rnic, device, roce, enable, notes)


def _configure_dcqcn_mask(saved, rnic, device, roce, enable, notes):
    """Set the bit of RoCE's priority in the firmware's DCQCN mask; return settings that wait for a reset.

    A card has a mask for each port, and a port is a PCI function. By default all priorities have DCQCN.
    """
    if not _first_tool("mlxconfig", "mstconfig"):
        if not enable:
            raise StateError(
                f"{rnic['name']}: DCQCN is turned off in its firmware; install mstflint, or mlxconfig (MFT)"
            )
        notes.append(f"{rnic['name']}: cannot check whether DCQCN is on; install mstconfig (mstflint) or mlxconfig")
        return []
    name = f"ROCE_CC_PRIO_MASK_P{int(device.rpartition('.')[2]) + 1}"
    mask = int(_current_firmware(rnic, [name])[name], 0)
    return _configure_firmware(saved, rnic, {name: mask | 1 << roce if enable else mask & ~(1 << roce)})


def _configure_trust_and_pfc(saved, netdev, qos):
    output = run(["mlnx_qos", "-i", netdev])
    trust, pfc = trust_and_pfc(output)
    if trust is None or pfc is None:
        raise StateError(
            f"{netdev}: `mlnx_qos -i {netdev}` reports no trust state or no PFC, its output is {output[:200]!r}; run "
            "it by hand"
        )
    tool = ["mlnx_qos", "-i", netdev]
    saved.command(
        f"{netdev} trust",
        current=trust,
        desired=qos["trust"],
        do=[*tool, f"--trust={qos['trust']}"],
        undo=[*tool, f"--trust={trust}"],
    )
    desired = ",".join(str(int(priority in qos["pfc_priorities"])) for priority in range(8))
    saved.command(
        f"{netdev} pfc", current=pfc, desired=desired, do=[*tool, "--pfc", desired], undo=[*tool, "--pfc", pfc]
    )


def _configure_dscp_map(saved, netdev, priorities):
    """Set the DSCPs that the inventory names. mlnx_qos shows a map only while the port trusts DSCP."""
    current, tool = dscp_map(run(["mlnx_qos", "-i", netdev])), ["mlnx_qos", "-i", netdev, "--dscp2prio"]
    if not current and not saved.changes.check:
        raise StateError(
            f"{netdev}: `mlnx_qos -i {netdev}` shows no DSCP map although the port trusts DSCP; run it by hand"
        )
    for dscp, priority in priorities.items():
        old = current.get(dscp, "unknown")
        undo = f"del,{dscp},{priority}" if old == "unknown" else f"set,{dscp},{old}"
        key, do = f"{netdev} DSCP {dscp}", [*tool, f"set,{dscp},{priority}"]
        saved.command(key, current=old, desired=priority, do=do, undo=[*tool, undo])


def dscp_map(output):
    """Return the DSCP map in mlnx_qos's output: DSCP -> priority."""
    lines = re.findall(r"^\s*prio:(\d)\s+dscp:([\d,]+)", output, re.MULTILINE)
    return {int(dscp): int(priority) for priority, dscps in lines for dscp in dscps.split(",") if dscp}


def trust_and_pfc(output):
    """Return trust state and PFC in mlnx_qos's output, as ("dscp", "0,0,0,1,0,0,0,0"); None: not in the output."""
    trust = re.search(r"^Priority trust state: (\w+)", output, re.MULTILINE)
    pfc = re.search(r"^\s+enabled\s+((?:[01]\s+){7}[01])", output, re.MULTILINE)
    return (trust[1] if trust else None, ",".join(pfc[1].split()) if pfc else None)


def _first_tool(*names):
    """Return the name of the first program that is installed; None: none is."""
    return next((name for name in names if shutil.which(name)), None)


def _current_firmware(rnic, names):
    """Return the firmware settings of an RNIC for the next boot: name -> value as text."""
    device = rnic.get("pcie") or rnic["name"]
    tool = _first_tool("mlxconfig", "mstconfig")
    if tool is None:
        raise StateError(
            f"{rnic['name']}: neither mlxconfig (MFT) nor mstconfig (mstflint) is installed; install one, or set no "
            "firmware"
        )
    current = firmware_settings(run([tool, "-d", device, "query", *names]))
    if missing := [name for name in names if name not in current]:
        raise StateError(f"{device}: its firmware has no {', '.join(missing)}; remove it from rnic_host_firmware")
    return current


def _configure_firmware(saved, rnic, settings):
    """Set firmware settings for the next boot; return the names of those that differed, which wait for a reset."""
    if not settings:
        return []
    current, pending = _current_firmware(rnic, list(settings)), []
    tool = [_first_tool("mlxconfig", "mstconfig"), "-y", "-d", rnic.get("pcie") or rnic["name"], "set"]
    for name, value in settings.items():
        desired = str(int(value) if isinstance(value, bool) else value)
        do, undo = [*tool, f"{name}={desired}"], [*tool, f"{name}={current[name]}"]
        if saved.command(f"{rnic['name']} {name}", current=current[name], desired=desired, do=do, undo=undo):
            pending.append(f"{rnic['name']} {name}")
    return pending


def _configure_registers(saved, rnic, registers):
    """Set fields of registers until the next reset. `registers`: name -> field -> number."""
    tool = _first_tool("mlxreg", "mstreg")
    if registers and tool is None:
        raise StateError(
            f"{rnic['name']}: neither mlxreg (MFT) nor mstreg (mstflint) is installed; install one, or set no registers"
        )
    for name, fields in registers.items():
        command = [tool, "-d", rnic.get("pcie") or rnic["name"], "--reg_name", name]
        current = register_fields(run([*command, "--get"]))
        for field, value in fields.items():
            if field not in current:
                raise StateError(f"{rnic['name']}: its {name} has no {field}; remove it from rnic_host_registers")
            do, undo = ([*command, "--set", f"{field}={number:#x}", "--yes"] for number in (int(value), current[field]))
            key = f"{rnic['name']} {name} {field}"
            saved.command(key, current=current[field], desired=int(value), do=do, undo=undo)


def register_fields(output):
    """Return the fields in the output of `mlxreg --get`: field -> number."""
    return {
        name: int(value, 16) for name, value in re.findall(r"^(\w+)\s*\|\s*(0x[0-9a-fA-F]+)\s*$", output, re.MULTILINE)
    }


def firmware_settings(output):
    """Return the settings in the output of `mlxconfig query`: name -> value at the next boot; `1` for `True(1)`.

    With `-e` a line has three columns (default, current, next boot). It begins with `*` if they differ, and with `RO`
    if the setting cannot be changed (mstflint, mlxcfg_ui.cpp, printSingleParam).
    """
    settings = {}
    line = r"^[ *\t](?:RO)?[ \t]+([A-Z][A-Z0-9_]+)(?:[ \t]+\S+){0,2}?[ \t]+(\S+)[ \t]*$"
    for name, value in re.findall(line, output, re.MULTILINE):
        number = re.fullmatch(r".*\((\w+)\)", value)
        settings[name] = number[1] if number else value
    return settings


def _configure_pfc_timeout(saved, netdev, timeout):
    """Set how long a port may be paused; `timeout` is in ms, or "auto" for the driver's default."""
    output = run(["ethtool", "--get-tunable", netdev, "pfc-prevention-tout"])
    current = output.rpartition(":")[2].split()[0] if output.split() else ""
    tool = ["ethtool", "--set-tunable", netdev, "pfc-prevention-tout"]
    is_auto = timeout in {"auto", PFC_AUTO}
    saved.command(
        f"{netdev} PFC timeout",
        current=current,
        desired=PFC_AUTO_MS if is_auto else timeout,
        do=[*tool, PFC_AUTO if is_auto else timeout],
        undo=[*tool, current],
    )
