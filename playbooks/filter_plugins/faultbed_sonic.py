"""Render a SONiC switch's configuration (ConfigDB tables) from its inventory variables. Not yet run on hardware.

The tables cover ports, interfaces, loopback, ECMP hash, QoS maps, WRED/ECN, PFC and its watchdog, and lossless buffer
profiles if faultbed_qos has a `buffer`. Lanes, breakouts and buffer pools belong to the platform and are not touched.
BGP is configured in FRR, with SONiC's routing configuration in split mode: uplinks are unnumbered, and the two BGP
daemons of SONiC read different ConfigDB syntax for such neighbours. Sources: sonic-yang-models/doc/Configuration.md for
the tables, SONiC/doc/hash/hash-design.md for the ECMP hash.
"""

MAP = "FAULTBED"
WRED, STRICT = "FAULTBED_ROCE", "FAULTBED_STRICT"
PAUSED_IN, PAUSED_OUT = "FAULTBED_LOSSLESS_IN", "FAULTBED_LOSSLESS_OUT"
QP_FIELD = "RDMA_BTH_DEST_QP"
"""No public SONiC up to 202511 has this field (sonic-swss, switch_schema.h; sonic-hash.yang); a vendor's build may."""
BUFFER = {"alpha": 0, "egress_alpha": 3, "ingress_pool": "ingress_lossless_pool", "egress_pool": "egress_lossless_pool"}
"""Defaults of BufferVars (testbed/inventory/schema.py), repeated because Ansible reads the inventory's text."""
RESTORE_FACTOR = 2
DETECT_MS, POLL_MS = (100, 5000), 1000
"""Limits of the watchdog (sonic-yang-models, sonic-pfcwd.yang): detection time, and the longest polling interval."""
QUEUES = range(8)


def sonic_config_db(hostvars, name, hash_fields=(), *, hash_qp=False, bgp=True):
    """Return the tables of a switch: {table: {key: {field: value}}}. Values are strings, as ConfigDB stores them.

    Without `bgp`, the routing is the fabric's own: routing mode, loopback and uplink addresses stay as they are.

    An entry comes after the entries that it refers to, so that they can be deleted in reverse order. ValueError if the
    PFC watchdog's time is outside SONiC's limits.
    """
    ports = hostvars["faultbed_ports"]
    tables = {
        "PORT": {port["netdev"]: _port(port, hostvars["faultbed_mtu"]) for port in ports},
        "INTERFACE": {},
    }
    if bgp:
        tables = {
            "DEVICE_METADATA": {"localhost": {"hostname": name, "docker_routing_config_mode": "split"}},
            "LOOPBACK_INTERFACE": {"Loopback0": {}, f"Loopback0|{hostvars['faultbed_loopback']}": {}},
        } | tables
    for port in ports:
        if port.get("address") and (bgp or port.get("rnic")):
            tables["INTERFACE"] |= {port["netdev"]: {}, f"{port['netdev']}|{port['address']}": {}}
        elif bgp:
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
    """Return the QoS tables: the traffic class and the queue of each priority have its number.

    A paused class has the priority group of its number. All others share one, as in SONiC's own template
    (sonic-buildimage, qos_config.j2): only the paused groups and group 0 have a buffer there.
    """
    paused = sorted(qos["pfc_priorities"])
    pfc_enable = ",".join(str(priority) for priority in paused)
    priority_of = {line["dscp"]: line["priority"] for line in dscp_map}
    roce, cnp, unmarked = (priority_of.get(dscp, 0) for dscp in (qos["roce_dscp"], qos["cnp_dscp"], 0))
    lossy = next(number for number in QUEUES if number not in paused or len(paused) == len(QUEUES))
    identity = {str(number): str(number) for number in QUEUES}
    port_map = {
        "dscp_to_tc_map": MAP,
        "tc_to_queue_map": MAP,
        "tc_to_pg_map": MAP,
        "pfc_to_queue_map": MAP,
    }
    # Without PFC the fields are left out, and the role removes them: not every release accepts an empty value.
    if pfc_enable:
        port_map |= {"pfc_enable": pfc_enable, "pfcwd_sw_enable": pfc_enable}
    tables = {
        # A DSCP that the inventory does not name is best effort.
        "DSCP_TO_TC_MAP": {MAP: {str(dscp): str(priority_of.get(dscp, 0)) for dscp in range(64)}},
        "TC_TO_QUEUE_MAP": {MAP: identity},
        "TC_TO_PRIORITY_GROUP_MAP": {
            MAP: {str(number): str(number if number in paused else lossy) for number in QUEUES}
        },
        "MAP_PFC_PRIORITY_TO_QUEUE": {MAP: identity},
    }
    if pfc_enable and qos.get("buffer"):
        tables |= _buffers(BUFFER | qos["buffer"], paused, netdevs)
    tables["PORT_QOS_MAP"] = {netdev: dict(port_map) for netdev in netdevs}
    queues = {}
    if qos.get("ecn"):
        tables["WRED_PROFILE"] = {WRED: _wred(qos["ecn"])}
        queues |= {f"{netdev}|{roce}": {"wred_profile": WRED} for netdev in netdevs}
    # CNPs must not wait behind the data that they slow down. A class that carries data, too, would starve the others.
    if cnp not in {roce, unmarked}:
        tables["SCHEDULER"] = {STRICT: {"type": "STRICT"}}
        queues |= {f"{netdev}|{cnp}": {"scheduler": STRICT} for netdev in netdevs}
    if queues:
        tables["QUEUE"] = queues
    if pfc_enable and qos.get("pfc_watchdog_ms"):
        detect = qos["pfc_watchdog_ms"]
        if not DETECT_MS[0] <= detect <= DETECT_MS[1]:
            raise ValueError(
                f"faultbed_qos.pfc_watchdog_ms: {detect} is out of range; SONiC takes {DETECT_MS[0]} to {DETECT_MS[1]}"
            )
        times = {"detection_time": str(detect), "restoration_time": str(RESTORE_FACTOR * detect), "action": "drop"}
        poll = {"POLL_INTERVAL": str(min(detect, POLL_MS))}
        tables["PFC_WD"] = {netdev: dict(times) for netdev in netdevs} | {"GLOBAL": poll}
    return tables


def _buffers(buffer, priorities, netdevs):
    """Return the buffer tables: limits of each paused priority in the platform's ingress and egress pools.

    On ingress a priority gets reserved space, headroom, and a share (2^alpha) of the free space. On egress the share is
    large, because the pause on ingress limits the queue and nothing may be dropped. The role replaces the share for
    pools of mode `static` after it has read the switch's pools (sonic_switch.py, fit_pools).
    """
    xon, xoff = buffer["xon_kib"] * 1024, buffer["xoff_kib"] * 1024
    alpha = str(buffer["alpha"])
    ingress = {"pool": buffer["ingress_pool"], "size": str(xon + xoff), "xon": str(xon), "xoff": str(xoff)}
    keys = [f"{netdev}|{priority}" for netdev in netdevs for priority in priorities]
    return {
        "BUFFER_PROFILE": {
            PAUSED_IN: ingress | {"dynamic_th": alpha},
            PAUSED_OUT: {"pool": buffer["egress_pool"], "size": "0", "dynamic_th": str(buffer["egress_alpha"])},
        },
        "BUFFER_PG": {key: {"profile": PAUSED_IN} for key in keys},
        "BUFFER_QUEUE": {key: {"profile": PAUSED_OUT} for key in keys},
    }


def _wred(ecn):
    """Return a WRED profile that marks instead of dropping. All colours are equal, because no policer sets colours."""
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
    """The filter plugin; Ansible looks for a class of this name."""

    def filters(self):
        """Return the filters: name -> function."""
        return {"sonic_config_db": sonic_config_db}
