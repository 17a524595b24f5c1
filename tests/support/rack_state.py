"""Output of the tools of a rack."""

import json

from faultbed.testbed import shipped
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.preflight.collect import Facts

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
# As a host's watcher reports a healthy H100 (faultbed.testbed.node.gpu.nvml.look, which test_nvml.py compares with
# NVML).
GPU = {
    "index": 0,
    "bus_id": "00000000:19:00.0",
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.74.00.01",
    "persistence": True,
    "ecc": True,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "remapped_rows": 0,
    "remap_pending": False,
    "remap_failed": False,
    "temp_c": 41,
    "slowdown_c": 89,
    "shutdown_c": 95,
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


def gpu_report(*changed, driver="550.54.15"):
    """Return a watcher's report of GPUs: each is healthy except for the values in its dict."""
    return json.dumps({"event": "gpus", "driver": driver, "why": None, "gpus": [GPU | each for each in changed]})


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
     rx_corrected_bits_phy: {corrected}
     rx_symbol_err_phy: 0
"""
FIRST = FEC.format(at="1763728000.500000000", beyond=17, corrected=1000)
LAST = FEC.format(at="1763728003.000000000", beyond=17, corrected=9000)
SONIC_PORT = {
    **dict.fromkeys(("dscp_to_tc_map", "tc_to_queue_map", "tc_to_pg_map"), "FAULTBED"),
    **dict.fromkeys(("pfc_enable", "pfcwd_sw_enable"), "3"),
}


def bus(host):
    """Return PCI paths and NUMA nodes of a host with two NUMA nodes; each RNIC shares a PCIe switch with its GPU."""
    paths, numa = [], []
    for index, rnic in enumerate(host.rnics):
        gpu = next(gpu for gpu in host.gpus if gpu.name == rnic.gpu)
        for port, address in enumerate((rnic.pcie, gpu.pcie)):
            paths.append(
                f"/sys/devices/pci0000:{index}5/0000:{index}5:01.0/0000:{index}6:00.0/0000:{index}7:0{port}.0/{address}"
            )
            numa.append(f"/sys/bus/pci/devices/{address}/numa_node:{index // 4}")
    return "\n".join(paths), "\n".join(numa)


HOST_ABLE = """\
python: Python 3.12.3
lockdown: [none] integrity confidentiality
tool mlxlink: mstlink
tool mlxconfig: mstconfig
tool nvidia-smi: nvidia-smi
tool dcgmi: dcgmi
"""
SWITCH_ABLE = """\
python: Python 3.11.2
release: SONiC.202405.0-dirty-20240911.063012
asic: broadcom
bgp restart: enabled
acl INGRESS: PACKET_ACTION,MIRROR_INGRESS_ACTION,COUNTER
acl EGRESS: PACKET_ACTION,COUNTER
"""


def rack_state():
    """Return the output of the tools of a healthy rack, by host."""
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
        facts.raw["gpu"] = gpu_report(*({"index": index} for index in range(8)))
        facts.raw["chrony"] = CHRONY
        facts.raw["able"] = HOST_ABLE
    for switch in RACK.topology.switches:
        facts = state[switch.name] = Facts()
        ports = {link.end(switch.name).netdev: dict(SONIC_PORT) for link in RACK.topology.links_of(switch.name)}
        facts.raw["able"] = SWITCH_ABLE
        facts.raw["configdb"] = json.dumps({"PORT_QOS_MAP": ports, **sonic_tables(ports)})
        facts.raw["appldb"] = json.dumps(
            {
                f"BUFFER_PG_TABLE:{port}:3-4": {"type": "hash", "value": {"profile": "pg_lossless_400000_5m_profile"}}
                for port in ports
            }
            | {"BUFFER_PROFILE_TABLE:pg_lossless_400000_5m_profile": {"type": "hash", "value": {"xoff": "163840"}}}
        )
    return state


def sonic_tables(ports):
    """Return the QoS tables of a switch after `config qos reload` and the role, with traditional buffers."""
    identity = {str(number): str(number) for number in range(8)}
    per_port = {
        "BUFFER_PG": {"0": {"profile": "ingress_lossy_profile"}},
        "BUFFER_QUEUE": {
            numbers: {"profile": f"egress_{kind}_profile"}
            for numbers, kind in (("3-4", "lossless"), ("0-2", "lossy"), ("5-6", "lossy"))
        },
        "QUEUE": {"3": {"scheduler": "scheduler.1"}, "6": {"scheduler": "FAULTBED_STRICT"}},
    }
    return {
        "PORT": {port: {"lanes": "1,2,3,4,5,6,7,8", "fec": "rs", "autoneg": "off"} for port in ports},
        "BREAKOUT_CFG": {port: {"brkout_mode": "1x400G"} for port in ports},
        "CABLE_LENGTH": {"AZURE": dict.fromkeys(ports, "5m")},
        "DSCP_TO_TC_MAP": {"FAULTBED": {"0": "0", "26": "3", "48": "6"}},
        "TC_TO_PRIORITY_GROUP_MAP": {"FAULTBED": {number: "3" if number == "3" else "0" for number in identity}},
        "TC_TO_QUEUE_MAP": {"FAULTBED": identity},
        "BUFFER_POOL": {"ingress_lossless_pool": {"mode": "dynamic", "type": "ingress"}},
        "BUFFER_PROFILE": {"ingress_lossy_profile": {"pool": "ingress_lossless_pool", "size": "0"}},
        "SCHEDULER": {"scheduler.1": {"type": "DWRR", "weight": "15"}, "FAULTBED_STRICT": {"type": "STRICT"}},
        **{
            table: {f"{port}|{key}": row for port in ports for key, row in rows.items()}
            for table, rows in per_port.items()
        },
    }
