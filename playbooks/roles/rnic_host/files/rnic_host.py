"""Bring RNICs to what the QoS profile says: type of service, DCQCN, trust and PFC, firmware; write down what was there.

    default type of service   configfs rdma_cm (Linux, Documentation/ABI/testing/configfs-rdma_cm)
    DCQCN                     /sys/class/net/DEV/ecn (MLNX_OFED, "Explicit Congestion Notification")
    trust, PFC, DSCP map      mlnx_qos (MLNX_OFED)
    firmware                  mlxconfig (MFT), counts from the next reset
    PFC timeout               ethtool --set-tunable pfc-prevention-tout (ethtool(8))

All but the first are not yet run on hardware.
"""

import os
import re

from faultbed_found import Found
from faultbed_state import StateError, answer, run

CONFIGFS = "/sys/kernel/config/rdma_cm"
ROLE = "rnic_host"


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    found, later = Found(ROLE, changes), []
    for rnic in wanted["rnics"]:
        qos = wanted["qos"]
        if qos:
            _type_of_service(found, rnic["name"], qos["roce_dscp"] << 2)
        if not os.path.exists(f"/sys/class/infiniband/{rnic['name']}/device"):
            continue  # software: no firmware, no ports of its own
        if qos:
            priority = {line["dscp"]: line["priority"] for line in wanted["dscp_map"]}
            _dcqcn(found, rnic["netdev"], qos, priority, wanted["dcqcn"])
            _trust_and_pfc(found, rnic["netdev"], qos)
            if qos["trust"] == "dscp":
                _dscp_map(found, rnic["netdev"], priority)
        later += _firmware(found, rnic, wanted["firmware"])
        if wanted["pfc_timeout"]:
            _pfc_timeout(found, rnic["netdev"], str(wanted["pfc_timeout"]))
    return {"notes": [f"{', '.join(later)}: counts from the next reboot or `mlxfwreset`"] if later else []}


def _type_of_service(found, rnic, tos):
    """The default of connections that RDMA-CM makes; where configfs has no rdma_cm, programs set their own."""
    if not os.path.isdir(CONFIGFS):
        return
    folder = f"{CONFIGFS}/{rnic}"
    if found.folder(folder):  # making it is how configfs is asked for one
        found.value(f"{folder}/ports/1/default_roce_tos", tos)


def _dcqcn(found, netdev, qos, priority, said):
    """Notification point (sends CNPs) and reaction point (slows down), for the priority of RoCE."""
    wanted = {"profile": qos["dcqcn"], "on": True, "off": False}.get(said)
    if wanted is None:
        raise StateError(f"rnic_host_dcqcn is {said!r}: say profile, on or off")
    folder, roce = f"/sys/class/net/{netdev}/ecn", priority.get(qos["roce_dscp"], 0)
    if not os.path.isdir(folder):
        raise StateError(
            f"{netdev} has no {folder}: its driver has no DCQCN; take qos out of the inventory, or mend it"
        )
    for point in ("roce_np", "roce_rp"):
        found.value(f"{folder}/{point}/enable/{roce}", int(wanted))
    found.value(f"{folder}/roce_np/cnp_dscp", qos["cnp_dscp"])
    found.value(f"{folder}/roce_np/cnp_802p_prio", priority.get(qos["cnp_dscp"], 0))


def _trust_and_pfc(found, netdev, qos):
    said = run(["mlnx_qos", "-i", netdev])
    trust, pfc = trust_and_pfc(said)
    if trust is None or pfc is None:
        raise StateError(f"mlnx_qos -i {netdev} does not say what it trusts and pauses: {said[:200]!r}")
    tool = ["mlnx_qos", "-i", netdev]
    found.command(
        f"{netdev} trust",
        have=trust,
        want=qos["trust"],
        do=[*tool, f"--trust={qos['trust']}"],
        undo=[*tool, f"--trust={trust}"],
    )
    wanted = ",".join(str(int(priority in qos["pfc_priorities"])) for priority in range(8))
    found.command(f"{netdev} pfc", have=pfc, want=wanted, do=[*tool, "--pfc", wanted], undo=[*tool, "--pfc", pfc])


def _dscp_map(found, netdev, priority):
    """The lines of the inventory; what they do not name stays. mlnx_qos shows a map only while DSCP is trusted."""
    have, tool = dscp_map(run(["mlnx_qos", "-i", netdev])), ["mlnx_qos", "-i", netdev, "--dscp2prio"]
    if not have and not found.changes.check:
        raise StateError(f"mlnx_qos -i {netdev} shows no DSCP map although it trusts DSCP: look at it by hand")
    for dscp, wanted in priority.items():
        old = have.get(dscp, "unknown")
        undo = f"del,{dscp},{wanted}" if old == "unknown" else f"set,{dscp},{old}"
        key, do = f"{netdev} DSCP {dscp}", [*tool, f"set,{dscp},{wanted}"]
        found.command(key, have=old, want=wanted, do=do, undo=[*tool, undo])


def dscp_map(said):
    """DSCP -> priority, of what mlnx_qos prints."""
    lines = re.findall(r"^\s*prio:(\d)\s+dscp:([\d,]+)", said, re.MULTILINE)
    return {int(dscp): int(priority) for priority, some in lines for dscp in some.split(",") if dscp}


def trust_and_pfc(said):
    """What mlnx_qos prints: ("dscp", "0,0,0,1,0,0,0,0"); None for what it does not say."""
    trust = re.search(r"^Priority trust state: (\w+)", said, re.MULTILINE)
    pfc = re.search(r"^\s+enabled\s+((?:[01]\s+){7}[01])", said, re.MULTILINE)
    return (trust[1] if trust else None, ",".join(pfc[1].split()) if pfc else None)


def _firmware(found, rnic, settings):
    """Settings of the next boot; those that differ are what a reset is needed for."""
    if not settings:
        return []
    device = rnic.get("pcie") or rnic["name"]
    have = firmware_settings(run(["mlxconfig", "-d", device, "query", *settings]))
    later = []
    for name, value in settings.items():
        if name not in have:
            raise StateError(f"{device}: its firmware has no {name}: take it out of rnic_host_firmware")
        tool = ["mlxconfig", "-y", "-d", device, "set"]
        if found.command(
            f"{rnic['name']} {name}",
            have=have[name],
            want=str(value),
            do=[*tool, f"{name}={value}"],
            undo=[*tool, f"{name}={have[name]}"],
        ):
            later.append(f"{rnic['name']} {name}")
    return later


def firmware_settings(said):
    """What `mlxconfig query` prints, name -> value; of `True(1)` the number."""
    found = {}
    for name, value in re.findall(r"^\s+([A-Z][A-Z0-9_]+)\s+(\S+)\s*$", said, re.MULTILINE):
        number = re.fullmatch(r".*\((\w+)\)", value)
        found[name] = number[1] if number else value
    return found


def _pfc_timeout(found, netdev, wanted):
    said = run(["ethtool", "--get-tunable", netdev, "pfc-prevention-tout"])
    have = said.rpartition(":")[2].split()[0] if said.split() else ""
    tool = ["ethtool", "--set-tunable", netdev, "pfc-prevention-tout"]
    found.command(f"{netdev} PFC timeout", have=have, want=wanted, do=[*tool, wanted], undo=[*tool, have])
