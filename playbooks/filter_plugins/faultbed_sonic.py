"""A SONiC switch's configuration (ConfigDB tables) from our variables of it. Not yet run on hardware.

Only tables that we own: ports, interfaces, loopback, ECMP hash, QoS maps, WRED/ECN, PFC and its watchdog, and lossless
buffer profiles where faultbed_qos has a `buffer`. Lanes, breakouts and buffer pools are the platform's, and stay as
they are; BGP is FRR's, with SONiC's routing configuration in split mode: uplinks are unnumbered, and what ConfigDB can
say of such neighbours differs between its two BGP daemons. Tables are those of sonic-yang-models/doc/Configuration.md;
the ECMP hash is that of SONiC/doc/hash/hash-design.md.
"""

MAP = "FAULTBED"
WRED = "FAULTBED_ROCE"
PAUSED_IN, PAUSED_OUT = "FAULTBED_LOSSLESS_IN", "FAULTBED_LOSSLESS_OUT"
QP_FIELD = "RDMA_BTH_DEST_QP"
"""In no public SONiC up to 202511 (sonic-swss, switch_schema.h; sonic-hash.yang): of vendors' own builds, if at all."""
BUFFER = {"alpha": 0, "egress_alpha": 3, "ingress_pool": "ingress_lossless_pool", "egress_pool": "egress_lossless_pool"}
"""What an inventory need not say (testbed/inventory/schema.py, BufferVars): Ansible sees its text, not our structs."""
RESTORE_FACTOR = 2
DETECT_MS, POLL_MS = (100, 5000), 1000
"""What the watchdog takes (sonic-yang-models, sonic-pfcwd.yang): detection, and the longest interval of its looks."""
QUEUES = range(8)


def sonic_config_db(hostvars, name, hash_fields=(), *, hash_qp=False):
    """The tables of a switch: `{"PORT": {"Ethernet0": {...}}, ...}`; values are strings, as ConfigDB keeps them.

    What an entry refers to comes before it, so that the reverse is an order to take them away in.
    """
    ports = hostvars["faultbed_ports"]
    tables = {
        "DEVICE_METADATA": {"localhost": {"hostname": name, "docker_routing_config_mode": "split"}},
        "LOOPBACK_INTERFACE": {"Loopback0": {}, f"Loopback0|{hostvars['faultbed_loopback']}": {}},
        "PORT": {port["netdev"]: _port(port, hostvars["faultbed_mtu"]) for port in ports},
        "INTERFACE": {},
    }
    for port in ports:
        if port.get("address"):
            tables["INTERFACE"] |= {port["netdev"]: {}, f"{port['netdev']}|{port['address']}": {}}
        else:
            tables["INTERFACE"][port["netdev"]] = {"ipv6_use_link_local_only": "enable"}
    fields = [*hash_fields, *([QP_FIELD] if hash_qp else [])]
    if fields:
        tables["SWITCH_HASH"] = {"GLOBAL": {"ecmp_hash": fields}}
    if hostvars.get("faultbed_qos"):
        tables |= _qos(hostvars["faultbed_qos"], hostvars.get("faultbed_dscp_map", []), [p["netdev"] for p in ports])
    return tables


def _port(port, mtu):
    fields = {"admin_status": "up", "mtu": str(port.get("mtu") or mtu)}
    if port.get("speed_gbps"):
        fields["speed"] = str(port["speed_gbps"] * 1000)
    return fields


def _qos(qos, dscp_map, netdevs):
    """One traffic class, priority group and queue for each priority, of the same number."""
    paused = ",".join(str(priority) for priority in sorted(qos["pfc_priorities"]))
    priority_of = {line["dscp"]: line["priority"] for line in dscp_map}
    roce = priority_of.get(qos["roce_dscp"], 0)
    same = {str(number): str(number) for number in QUEUES}
    port_map = {
        "dscp_to_tc_map": MAP,
        "tc_to_queue_map": MAP,
        "tc_to_pg_map": MAP,
        "pfc_to_queue_map": MAP,
    }
    # An empty one turns PFC off (sonic-port-qos-map.yang); left out, that of an earlier profile would stay.
    port_map |= {"pfc_enable": paused, "pfcwd_sw_enable": paused}
    tables = {
        # A DSCP that nobody named is best effort.
        "DSCP_TO_TC_MAP": {MAP: {str(dscp): str(priority_of.get(dscp, 0)) for dscp in range(64)}},
        "TC_TO_QUEUE_MAP": {MAP: same},
        "TC_TO_PRIORITY_GROUP_MAP": {MAP: same},
        "MAP_PFC_PRIORITY_TO_QUEUE": {MAP: same},
    }
    if paused and qos.get("buffer"):
        tables |= _buffers(BUFFER | qos["buffer"], sorted(qos["pfc_priorities"]), netdevs)
    tables["PORT_QOS_MAP"] = {netdev: dict(port_map) for netdev in netdevs}
    if qos.get("ecn"):
        tables["WRED_PROFILE"] = {WRED: _wred(qos["ecn"])}
        tables["QUEUE"] = {f"{netdev}|{roce}": {"wred_profile": WRED} for netdev in netdevs}
    if paused and qos.get("pfc_watchdog_ms"):
        detect = qos["pfc_watchdog_ms"]
        if not DETECT_MS[0] <= detect <= DETECT_MS[1]:
            raise ValueError(f"faultbed_qos.pfc_watchdog_ms is {detect}: SONiC takes {DETECT_MS[0]} to {DETECT_MS[1]}")
        times = {"detection_time": str(detect), "restoration_time": str(RESTORE_FACTOR * detect), "action": "drop"}
        poll = {"POLL_INTERVAL": str(min(detect, POLL_MS))}
        tables["PFC_WD"] = {netdev: dict(times) for netdev in netdevs} | {"GLOBAL": poll}
    return tables


def _buffers(buffer, priorities, netdevs):
    """What a paused priority may take of the platform's pools: reserved and headroom in, a share (2^alpha) of the rest.

    Out, nothing is dropped for want of a share: the pause in front of it is what limits. What of it a pool of mode
    `static` takes is the role's to say, which reads the switch's pools (sonic_switch.py, fit_pools).
    """
    xon, xoff = buffer["xon_kib"] * 1024, buffer["xoff_kib"] * 1024
    alpha = str(buffer["alpha"])
    inwards = {"pool": buffer["ingress_pool"], "size": str(xon + xoff), "xon": str(xon), "xoff": str(xoff)}
    places = [f"{netdev}|{priority}" for netdev in netdevs for priority in priorities]
    return {
        "BUFFER_PROFILE": {
            PAUSED_IN: inwards | {"dynamic_th": alpha},
            PAUSED_OUT: {"pool": buffer["egress_pool"], "size": "0", "dynamic_th": str(buffer["egress_alpha"])},
        },
        "BUFFER_PG": {place: {"profile": PAUSED_IN} for place in places},
        "BUFFER_QUEUE": {place: {"profile": PAUSED_OUT} for place in places},
    }


def _wred(ecn):
    """Marks instead of drops, alike for every colour: nothing here colours packets."""
    fields = {"ecn": "ecn_all"}
    for colour in ("green", "yellow", "red"):
        fields |= {
            f"wred_{colour}_enable": "true",
            f"{colour}_min_threshold": str(ecn["min_kib"] * 1024),
            f"{colour}_max_threshold": str(ecn["max_kib"] * 1024),
            f"{colour}_drop_probability": str(ecn["max_percent"]),
        }
    return fields


class FilterModule:
    """What Ansible looks for."""

    def filters(self):
        """Names to functions."""
        return {"sonic_config_db": sonic_config_db}
