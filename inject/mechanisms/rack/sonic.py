"""Switches that run SONiC: ports, ACLs, shapers, BGP. Not yet run on hardware.

Commands and tables are those of SONiC's Command Reference (sonic-utilities, doc/Command-Reference.md) and of its
configuration model (sonic-buildimage, src/sonic-yang-models/doc/Configuration.md). Nothing is saved (`config save`), so
that no change survives a reboot.

No fault may take a switch down for good. In releases up to 202411 a request that the ASIC rejects ends orchagent, and
the switch's whole dataplane with it (sonic-swss, saihelper.cpp, handleSaiFailure). A fault that not every ASIC supports
is therefore done only on ASICs that are known to support it. A unit that starts three times within 20 minutes is not
started again (bgp.service, StartLimitBurst): its start count is reset before each start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Place,
    Request,
    Step,
    Witness,
    flap_edges,
    holder_request,
    link_of,
)
from faultbed.inject.mechanisms.rack.rack_mechanism import (
    ADAPTIVE,
    COUNTERS,
    Commands,
    RackMechanism,
    at_port,
    by_commands,
    ends_on_paths,
    require_phases,
    retransmissions,
)
from faultbed.inject.mechanisms.soft.hop import ends_of
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.model.topology import Port

__all__ = ["ACL_POLL_WAS", "BY_KIND", "LINK_MECHANISMS", "MECHANISMS", "ONE_ASIC", "front_panel_port"]

ROCE_PORT = "4791"
_TOO_LARGE = ("asic_rx_oversize", "asic_tx_oversize", "asic_rx_dropped", "asic_tx_dropped")
_CONGESTED = ("asic_ecn_marked", "asic_tx_dropped")
_DB = "sonic-db-cli"
_RULE_PRIORITY = "9999"
_PORT_S = 1.0
"""Shortest phase of a port fault: `config` takes about a second on a switch's CPU, to load SONiC's command line."""
ONE_ASIC = (
    ("sh", "-c", "ls -d /run/redis[0-9]* 2>/dev/null || echo one"),
    "^one$",
    "this switch has several ASICs, each with its own tables, which is not supported; target another switch",
)
"""On a switch with several ASICs, `sonic-db-cli` without -n reads none of their tables (database.sh)."""
_ACL_S = 3.0
"""Shortest fault by an ACL: its counter is polled once a second at most (sonic-utilities, counterpoll/main.py)."""
_ACL_POLL_MS = "1000"
_ACL_POLL_DEFAULT_MS = "10000"
"""Default of SONiC (aclorch.cpp, ACL_COUNTER_DEFAULT_POLLING_INTERVAL_MS): a shorter fault would count no hits."""
_ACL_POLL = "FLEX_COUNTER_TABLE|ACL"
ACL_POLL_WAS = "/run/faultbed/acl-poll"
"""File on the switch with the polling interval that the last of several ACL faults restores."""
_BGP_S = 60.0
"""How long `systemctl restart bgp` may take: docker stops the container within 10 s, and FRR has to start."""
_SHAPING_ASICS = "broadcom|mellanox"
"""Values of `asic_type` (sonic_version.yml) whose SAI is known to accept a scheduler at a port."""
_NO_SHAPER = (
    "this ASIC may not support a scheduler at a port, and orchagent ends if the ASIC rejects one; target a Linux "
    "switch, or use link.mtu or link.flap"
)
# Front-panel ports; eth0 is the management port.
_FRONT_PANEL = re.compile(r"Ethernet[0-9]+")

MECHANISMS = (
    RackMechanism(
        kind="link.oneway",
        fidelity="real",
        by="SONiC: an ACL that drops all IPv4 and IPv6 at one side of the port; packets of the switch's CPU may pass",
    ),
    RackMechanism(
        kind="link.rate",
        fidelity="real",
        # SONiC's model accepts no `pir` without a `cir` (sonic-scheduler.yang), and some ASICs no `cir` at a port.
        by="SONiC: a scheduler (shaper) of the port, on Broadcom and Mellanox ASICs; towards the target only; "
        "`config apply-patch` refuses meanwhile",
    ),
    RackMechanism(kind="link.mtu", fidelity="real", by="SONiC: config interface mtu"),
    RackMechanism(
        kind="packet.drop",
        fidelity="real",
        by="SONiC: an ACL that drops RoCEv2 (UDP 4791); only share 1, any opcode",
    ),
    RackMechanism(
        kind="switch.bgp-kill",
        fidelity="real",
        by="SONiC: bgpd killed, its container kept from restarting, then restarted",
    ),
    RackMechanism(kind="switch.freeze", fidelity="real", by="SONiC: bgpd and zebra stopped in their container"),
    RackMechanism(
        kind="switch.withdraw", fidelity="real", by="SONiC: vtysh, `no redistribute connected` in bgpd, and back"
    ),
    RackMechanism(kind="switch.hash-policy", fidelity="real", by="SONiC: SWITCH_HASH without layer 4, if the ASIC can"),
)
LINK_MECHANISMS = tuple(
    RackMechanism(kind=kind, fidelity="real", by="SONiC: config interface shutdown and startup (port); mlxlink (RNIC)")
    for kind in ("link.down", "link.flap")
)


def front_panel_port(request: Request) -> Port:
    """Return the switch port at which the fault acts.

    Raises:
        Unsupported: the switch does not run SONiC.
        UsageError: the port is not on the front panel.
    """
    link, named = link_of(request)
    port = link.a if request.target.kind == "rnic" else named
    _require_sonic(request, port.node)
    if not _FRONT_PANEL.fullmatch(port.netdev):
        raise UsageError(f"{request.where}.target: {port.node}:{port.netdev} is not a front-panel port; choose one")
    return port


def _require_sonic(request: Request, name: str) -> None:
    nos = request.topology.switch_by_name[name].nos
    if nos != "sonic":
        runs = f"runs {nos}" if nos else "has no faultbed_nos"
        raise Unsupported(
            f"{request.where}: {request.spec.kind} is not supported on this lab: {name} {runs}; target a SONiC switch"
        )


def _down(request: Request) -> Mechanism:
    edges = flap_edges(request)
    link, named = link_of(request)
    flaps = sum(bool(on) for _, on in edges)
    require_phases(request, edges, _PORT_S, why="SONiC's `config interface` takes about a second")
    far = link.other(named.node)
    witness = Witness(any_of=(f"{far.node}/{far.netdev}.carrier_changes",), at_least=flaps)
    port = front_panel_port(request)
    commands = Commands(
        needs=("config", _DB),
        able=(ONE_ASIC,),
        guard=port.netdev,
        on=(("config", "interface", "shutdown", port.netdev),),
        off=(("config", "interface", "startup", port.netdev),),
        # The value that portmgrd has applied; the carrier follows seconds later.
        look=(_DB, "APPL_DB", "HGET", f"PORT_TABLE:{port.netdev}", "admin_status"),
        applied="^down$",
        normal="^up$",
    )
    return by_commands(
        request,
        commands,
        node=port.node,
        claims=f"{port.node}/{port.netdev}",
        shows={"device": port.netdev},
        must_move=(witness,),
        restored=((f"{port.node}/{port.netdev}.carrier", 1),),
        edges=edges,
        quality=() if link.is_uplink else (f"{far.node}/{far.netdev}",),
    )


def _mtu(request: Request) -> Mechanism:
    port = front_panel_port(request)
    mtu = str(request.spec.params["mtu"])
    commands = Commands(
        needs=("config", _DB),
        able=(ONE_ASIC,),
        guard=port.netdev,
        remember={"was": ((_DB, "CONFIG_DB", "HGET", f"PORT|{port.netdev}", "mtu"), "^([0-9]+)$")},
        on=(("config", "interface", "mtu", port.netdev, mtu),),
        off=(("config", "interface", "mtu", port.netdev, "{was}"),),
        look=(_DB, "APPL_DB", "HGET", f"PORT_TABLE:{port.netdev}", "mtu"),
        applied=f"^{mtu}$",
        normal="^[0-9]+$",
        gone="^{was}$",
    )
    return by_commands(
        request,
        commands,
        node=port.node,
        claims=f"{port.node}/{port.netdev}/mtu",
        shows={"device": port.netdev},
        must_move=(at_port(request, port, *_TOO_LARGE, rnic=(*COUNTERS.values(), ADAPTIVE)),),
        while_on=((f"{port.node}/{port.netdev}.mtu", int(mtu)),),
    )


def _oneway(request: Request) -> Mechanism:
    port = front_panel_port(request)
    rules = {"L3": ("IP_TYPE", "IPV4ANY"), "L3V6": ("IP_TYPE", "IPV6ANY")}
    return _acl(request, port, rules)


def _drop(request: Request) -> Mechanism:
    """Return the mechanism that drops all RoCEv2 by an ACL.

    Since 202305, SONiC can match BTH_OPCODE and AETH_SYNDROME (sonic-swss pull request 2617), but only in custom table
    types. An ASIC may lack these matches, and SONiC reports that only after such a table has been created.
    """
    params = request.spec.params
    plain = params.get("opcode") == "any" and not any(
        params.get(x) is not None for x in ("every", "psn", "qp", "burst", "loss_bad", "loss_good")
    )
    if params.get("share") != 1 or not plain:
        raise Unsupported(
            f"{request.where}: not supported on this lab: an ACL cannot select packets by chance, QP or PSN, and SONiC "
            "does not report whether its ASIC can match an opcode; use only share = 1 (all RoCEv2 in one direction), "
            "with src or dst if needed, or target a Linux switch"
        )
    port = front_panel_port(request)
    fields = {"src": "SRC_IP", "dst": "DST_IP"}
    addresses = {fields[name]: end.rnic.ip for name, end in ends_of(request).items() if end.rnic is not None}
    ends = tuple(word for field, address in addresses.items() for word in (field, f"{address}/32"))
    return _acl(request, port, {"L3": ("IP_PROTOCOL", "17", "L4_DST_PORT", ROCE_PORT, *ends)})


def _acl(request: Request, port: Port, rules: Mapping[str, tuple[str, ...]]) -> Mechanism:
    """Return the mechanism that drops packets by ACL: one table for each address family, each with one rule.

    `rules` maps a table type (`L3`, `L3V6`) to the fields and values that its rule matches.
    """
    require_phases(request, [[0.0, True]], _ACL_S, why="a switch counts the hits of an ACL once a second")
    stage = "EGRESS" if request.spec.params["direction"] == "to" else "INGRESS"
    prefix = f"FAULTBED_{request.id.rpartition('-')[2].upper()}"
    first = f"{prefix}_{next(iter(rules))}"
    add, delete = _acl_tables(prefix, rules, stage.lower(), port.netdev)
    commands = Commands(
        needs=(_DB, "aclshow", "counterpoll"),
        guard=port.netdev,
        able=(
            ONE_ASIC,
            (
                (_DB, "STATE_DB", "HGET", f"ACL_STAGE_CAPABILITY_TABLE|{stage}", "action_list"),
                "PACKET_ACTION",
                f"the ASIC cannot drop at {stage.lower()}; use the other direction, or target a Linux switch",
            ),
            (
                (_DB, "CONFIG_DB", "HGET", _ACL_POLL, "FLEX_COUNTER_STATUS"),
                "^(enable|None|)$",
                "ACL counters are off, so nothing would show this fault; turn them on with `counterpoll acl enable`",
            ),
        ),
        remember={"interval": ((_DB, "CONFIG_DB", "HGET", _ACL_POLL, "POLL_INTERVAL"), r"\A(?:None)?([0-9]*)\s*\Z")},
        on=(("sh", "-c", _shorten_acl_poll()), *add),
        off=(*delete, ("sh", "-c", _restore_acl_poll())),
        # orchagent's confirmation that the ASIC has the rule (SONiC 202205 and later).
        look=(_DB, "STATE_DB", "HGET", f"ACL_RULE_TABLE|{first}|DROP", "status"),
        applied="^Active$",
        normal="^(None)?$",
        count=(("aclshow", "-t", first, "-r", "DROP"), r"^DROP +[^ ]+ +[0-9]+ +([0-9]+)"),
    )
    return by_commands(
        request,
        commands,
        node=port.node,
        claims=f"{port.node}/{port.netdev}/acl/{prefix}",
        shows={"device": port.netdev, "stage": stage.lower()},
        # The rule's own hits, which the ASIC counts, prove the fault; these show its effect at RNICs.
        must_move=(Witness(any_of=retransmissions(ends_on_paths(request))),),
    )


def _shorten_acl_poll() -> str:
    """Return shell code that shortens the polling interval.

    The first of several ACL faults saves the previous one (`{interval}`).
    """
    return (
        f"mkdir -p {ACL_POLL_WAS.rpartition('/')[0]}; [ -e {ACL_POLL_WAS} ] || echo '{{interval}}' >{ACL_POLL_WAS}; "
        f"counterpoll acl interval {_ACL_POLL_MS}"
    )


def _restore_acl_poll() -> str:
    """Return shell code that restores the polling interval, unless another ACL fault is still on."""
    return (
        f"[ -e {ACL_POLL_WAS} ] || exit 0; "
        f"case $({_DB} CONFIG_DB KEYS 'ACL_TABLE|FAULTBED_*') in *FAULTBED_*) exit 0;; esac; "
        f"was=$(cat {ACL_POLL_WAS}); counterpoll acl interval ${{was:-{_ACL_POLL_DEFAULT_MS}}} && rm -f {ACL_POLL_WAS}"
    )


def _acl_tables(
    prefix: str, rules: Mapping[str, tuple[str, ...]], stage: str, device: str
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the commands that add the tables with their rules, and those that delete them."""
    add: list[tuple[str, ...]] = []
    delete: list[tuple[str, ...]] = []
    for family, match in rules.items():
        table, rule = f"ACL_TABLE|{prefix}_{family}", f"ACL_RULE|{prefix}_{family}|DROP"
        fields = ("policy_desc", "faultbed", "type", family, "stage", stage, "ports@", device)
        add += [
            (_DB, "CONFIG_DB", "HSET", table, *fields),
            (_DB, "CONFIG_DB", "HSET", rule, "PRIORITY", _RULE_PRIORITY, "PACKET_ACTION", "DROP", *match),
        ]
        delete += [(_DB, "CONFIG_DB", "DEL", rule), (_DB, "CONFIG_DB", "DEL", table)]
    return add, delete


def _rate(request: Request) -> Mechanism:
    if request.spec.params["direction"] != "to":
        raise Unsupported(
            f"{request.where}.direction: not supported on this lab: a port shapes only what it sends; use `to`"
        )
    port = front_panel_port(request)
    name = f"FAULTBED_{request.id.rpartition('-')[2].upper()}"
    bytes_per_s = str(round(request.spec.params["rate"] * 1_000_000 / 8))
    scheduler, qos = f"SCHEDULER|{name}", f"PORT_QOS_MAP|{port.netdev}"
    shaper = ("type", "STRICT", "meter_type", "bytes", "pir", bytes_per_s)
    unshaped = "^(None )?rate( None)?$"
    commands = Commands(
        needs=(_DB, "sonic-cfggen"),
        guard=port.netdev,
        able=(
            ONE_ASIC,
            (
                ("sonic-cfggen", "-y", "/etc/sonic/sonic_version.yml", "-v", "asic_type"),
                f"^({_SHAPING_ASICS})$",
                _NO_SHAPER,
            ),
        ),
        on=((_DB, "CONFIG_DB", "HSET", scheduler, *shaper), (_DB, "CONFIG_DB", "HSET", qos, "scheduler", name)),
        off=((_DB, "CONFIG_DB", "HDEL", qos, "scheduler"), (_DB, "CONFIG_DB", "DEL", scheduler)),
        look=("sh", "-c", _programmed_scheduler(port.netdev, qos)),
        applied=f"^{name} rate {bytes_per_s}$",
        normal=unshaped,
        # The configuration is gone at once. Not every release of orchagent then takes the shaper off the port.
        gone=unshaped,
    )
    return by_commands(
        request,
        commands,
        node=port.node,
        claims=f"{port.node}/{port.netdev}/scheduler",
        shows={"device": port.netdev},
        must_move=(_congested(request, port),),
    )


def _congested(request: Request, port: Port) -> Witness:
    """Return the witness of a port that sends more slowly than it receives.

    On a lossless fabric nothing is lost and no counter of retransmission moves. The port marks or drops packets, or the
    switch pauses the senders at its other ports; the RNIC at the end of the link counts marks and sends CNPs.
    """
    own = at_port(request, port, *_CONGESTED, rnic=("np_ecn_marked_roce_packets", "np_cnp_sent"))
    others = [link.end(port.node).netdev for link in request.topology.links_of(port.node)]
    pauses = tuple(f"{port.node}/{netdev}.asic_tx_pause" for netdev in others if netdev != port.netdev)
    return Witness(any_of=(*own.any_of, *pauses))


def _programmed_scheduler(device: str, qos: str) -> str:
    """Return shell that prints a port's scheduler, and the rate that orchagent has programmed into the ASIC for it."""
    asic = f"{_DB} ASIC_DB HGET ASIC_STATE:SAI_OBJECT_TYPE"
    return (
        f"port=$({_DB} COUNTERS_DB HGET COUNTERS_PORT_NAME_MAP {device}); "
        f"made=$({asic}_PORT:$port SAI_PORT_ATTR_QOS_SCHEDULER_PROFILE_ID); "
        f"rate=$({asic}_SCHEDULER:$made SAI_SCHEDULER_ATTR_MAX_BANDWIDTH_RATE); "
        f"echo $({_DB} CONFIG_DB HGET '{qos}' scheduler) rate $rate"
    )


def _bgp(request: Request, daemons: tuple[str, ...], signal: str, commands: Commands) -> Mechanism:
    switch = request.target.node
    _require_sonic(request, switch)
    ends = sorted({link.other(switch).node for link in request.topology.links_of(switch) if link.is_uplink})
    opened = tuple(f"{end}/tcp.{name}" for end in (*ends, switch) for name in ("ActiveOpens", "PassiveOpens"))
    shows = {"daemons": " ".join(daemons), "signal": signal}
    return by_commands(
        request,
        commands,
        node=switch,
        claims=f"{switch}/bgpd",
        shows=shows,
        must_move=(Witness(any_of=opened),),
        # A revert that restarts the container takes longer than usual.
        patience_s=_BGP_S if commands.command_s == _BGP_S else None,
    )


def _bgp_kill(request: Request) -> Mechanism:
    """Return the mechanism that kills bgpd, and restarts its whole container as the revert.

    bgpd is a critical process: when it dies, its container ends and restarts by itself after 30 s (RestartSec). The
    listener that ends the container reads FEATURE|bgp auto_restart when a process dies (sonic-buildimage,
    supervisor-proc-exit-listener), so auto_restart is disabled for the window. The revert restarts the whole container,
    because bgpcfgd's configuration is in no file that bgpd would read.
    """
    alive = "docker exec bgp pgrep -x bgpd"
    commands = Commands(
        needs=("docker", "systemctl", "config", _DB),
        able=(ONE_ASIC,),
        remember={"auto": ((_DB, "CONFIG_DB", "HGET", "FEATURE|bgp", "auto_restart"), "^(enabled|disabled)$")},
        on=(
            ("config", "feature", "autorestart", "bgp", "disabled"),
            ("docker", "exec", "bgp", "pkill", "-KILL", "-x", "bgpd"),
        ),
        off=(
            # `reset-failed` sets the start count to zero (systemctl(1)); manual starts add to it.
            ("sh", "-c", f"{alive} || {{ systemctl reset-failed bgp; systemctl restart bgp; }}"),
            ("config", "feature", "autorestart", "bgp", "{auto}"),
        ),
        look=("sh", "-c", f"{alive} || echo gone"),
        applied="^gone$",
        normal="^[0-9]+$",
        settle_s=20.0,
        command_s=_BGP_S,
    )
    return _bgp(request, ("bgpd",), "KILL", commands)


def _freeze(request: Request) -> Mechanism:
    look = "for d in bgpd zebra; do grep ^State: /proc/$(pgrep -x $d)/status || exit 1; done"
    signals = [("docker", "exec", "bgp", "pkill", "-{}", "-x", name) for name in ("bgpd", "zebra")]
    commands = Commands(
        needs=("docker",),
        able=(ONE_ASIC,),
        on=[tuple(word.replace("{}", "STOP") for word in words) for words in signals],
        off=[tuple(word.replace("{}", "CONT") for word in words) for words in signals],
        look=("docker", "exec", "bgp", "sh", "-c", look),
        applied="^State:.*T",
        normal="^State:.*[SRD]",
        lost="^State:[^(]*[SRD]",
    )
    return _bgp(request, ("bgpd", "zebra"), "STOP", commands)


def _withdraw(request: Request) -> Mechanism:
    """Return the mechanism that withdraws prefixes in bgpd itself, as on any switch with FRR.

    SONiC's own commands for that, TSA and TSC, match only route-maps `V4` and `V6`.

    The holder refuses a switch whose BGP configuration comes from another role and lacks the line. `vtysh` on a SONiC
    host is a script that runs the container's (docker-fpm-frr, base_image_files/vtysh).
    """
    switch = request.topology.switch_by_name[request.target.node]
    _require_sonic(request, switch.name)
    if switch.role != "rtsw":
        raise UsageError(f"{request.where}.target: {switch.name} has no host prefixes to withdraw; choose an RTSW")
    path, line = [f"router bgp {switch.asn}", "address-family ipv4 unicast"], "redistribute connected"
    shell = " ".join(f"-c '{word}'" for word in ("configure terminal", *path))
    return Mechanism(
        place=Place(node=switch.name),
        request=holder_request(
            request, "frr", {"netns": None, "path": path, "line": line}, claims=f"{switch.name}/bgpd/{line}"
        ),
        steps=(Step(do=f"vtysh {shell} -c 'no {line}'", undo=f"vtysh {shell} -c '{line}'"),),
        # Answers to the hosts below the switch find no route.
        must_move=(Witness(any_of=retransmissions(ends_on_paths(request))),),
        must_not_move=(),
        shows={"netns": None, "line": line},
    )


def _hash_policy(request: Request) -> Mechanism:
    switch = request.target.node
    _require_sonic(request, switch)
    ports = [link.end(switch).netdev for link in request.topology.links_of(switch) if link.is_uplink]
    if len(ports) < 2:  # noqa: PLR2004 - a choice needs two
        raise UsageError(f"{request.where}.target: {switch} has {len(ports)} uplink: nothing is hashed; it needs two")
    key, fields = "SWITCH_HASH|GLOBAL", "DST_IP,SRC_IP"
    configured = (_DB, "CONFIG_DB", "HGET", key, "ecmp_hash@")
    # What orchagent has programmed: the fields of the ASIC's hash objects, of ECMP and of LAGs. Traffic leaves by the
    # uplinks with any hash, so that no counter shows whether it was changed.
    objects = f"$({_DB} ASIC_DB KEYS 'ASIC_STATE:SAI_OBJECT_TYPE_HASH:*')"
    programmed = f"for k in {objects}; do {_DB} ASIC_DB HGET $k SAI_HASH_ATTR_NATIVE_HASH_FIELD_LIST; done"
    look = f"echo config $({shlex.join(configured)}) asic $({programmed})"
    dst, src = "SAI_NATIVE_HASH_FIELD_DST_IP", "SAI_NATIVE_HASH_FIELD_SRC_IP"
    normal = "^config [^ ]*L4_[^ ]* asic .*L4_"
    able = (_DB, "STATE_DB", "HGET", "SWITCH_CAPABILITY|switch", "ECMP_HASH_CAPABLE")
    commands = Commands(
        needs=(_DB,),
        # SWITCH_HASH begins with 202311; sonic-mgmt skips its test on Broadcom and Cisco-8000.
        able=(
            ONE_ASIC,
            (able, "^true$", "the ASIC's ECMP hash cannot be changed; target a Linux switch"),
        ),
        remember={"was": (configured, "^(.*L4_.*)$")},
        on=((_DB, "CONFIG_DB", "HSET", key, "ecmp_hash@", fields),),
        off=((_DB, "CONFIG_DB", "HSET", key, "ecmp_hash@", "{was}"),),
        look=("sh", "-c", look),
        applied=f"^config {fields} asic (.* )?2:({dst},{src}|{src},{dst})( |$)",
        normal=normal,
        gone=normal,
    )
    # The kernel counts what its CPU sends; COUNTERS_DB counts what the ASIC forwards
    # (faultbed.testbed.node.asic_ports).
    witness = Witness(any_of=tuple(f"{switch}/{port}.asic_tx_packets" for port in ports), at_least=100)
    shows = {"switch": switch}
    return by_commands(request, commands, node=switch, claims=f"{switch}/hash", shows=shows, must_move=(witness,))


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    ("link.down", "port"): _down,
    ("link.flap", "port"): _down,
    ("link.oneway", "port"): _oneway,
    ("link.oneway", "rnic"): _oneway,
    ("link.mtu", "port"): _mtu,
    ("link.mtu", "rnic"): _mtu,
    ("link.rate", "port"): _rate,
    ("link.rate", "rnic"): _rate,
    ("packet.drop", "port"): _drop,
    ("packet.drop", "rnic"): _drop,
    ("switch.bgp-kill", "switch"): _bgp_kill,
    ("switch.freeze", "switch"): _freeze,
    ("switch.withdraw", "switch"): _withdraw,
    ("switch.hash-policy", "switch"): _hash_policy,
}
