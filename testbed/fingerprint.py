"""What a lab looks like, in every respect that a fault could change: taken before and after, and compared.

One command a machine. A fingerprint holds states, never counters: links (flags, MTU, qdisc), addresses, routes,
rules, qdiscs, nftables tables, RDMA links, the sysctls that provisioning sets, `cpu.max`, faultbed's units and stored
reverts, and the routing daemons. What the kernel numbers as it likes (interface indexes, next-hop ids, lifetimes) is
left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.errors import LabError

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["SETTLE_S", "Fingerprint", "capture", "diff", "parse", "script", "settle"]

SETTLE_S = 30.0
"""BGP with timers of 1 and 3 s is back well before, also on a starved machine."""

_MARK = "@@"
_SYSCTLS = (
    "net.ipv4.ip_forward",
    "net.ipv4.fib_multipath_hash_policy",
    "net.ipv4.fib_multipath_hash_seed",
    "net.ipv4.conf.all.rp_filter",
    "net.ipv4.tcp_congestion_control",
)
_DAEMONS = "zebra bgpd mgmtd watchfrr"

# In the namespace of each node. One `ip` for all it can tell: each process costs tens of milliseconds under emulation.
_IN_NAMESPACE = f"""\
echo {_MARK}ip; printf 'addr show\\nrule show\\nroute show table all\\n' | ip -d -j -batch -
echo {_MARK}qdisc; tc -j qdisc show
echo {_MARK}nft; nft -j list tables
echo {_MARK}sysctl; sysctl -e {" ".join(_SYSCTLS)} 2>/dev/null"""

_ON_MACHINE = f"""\
echo {_MARK}rdma; rdma -j link show
echo {_MARK}cpu.max; grep -H . /sys/fs/cgroup/faultbed.slice/*/cpu.max 2>/dev/null
echo {_MARK}unit; systemctl list-units --all --plain --no-legend "faultbed-*"
echo {_MARK}revert; ls /run/faultbed/faults 2>/dev/null
echo {_MARK}daemon; for d in {_DAEMONS}; do echo $d $(pidof $d | wc -w); done
echo {_MARK}netns; ls /run/netns 2>/dev/null"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """State by node and subject: `{"rtsw1": {"link ctsw1": "UP LOWER_UP mtu 4200 ...", ...}}`."""

    nodes: Mapping[str, Mapping[str, str]]

    def to_json(self) -> dict[str, dict[str, str]]:
        """Plain data, sorted."""
        return {name: dict(sorted(facts.items())) for name, facts in sorted(self.nodes.items())}


def capture(lab: Lab, *, timeout_s: float = 90.0) -> Fingerprint:
    """Take the fingerprint of every machine of a lab, and of every switch on it.

    Raises:
        Unreachable: a machine does not answer: nobody can tell what it looks like.
        CommandFailed: it did not answer in time.
    """
    switches = lab.topology.switch_by_name

    def one(machine: str) -> dict[str, dict[str, str]]:
        carried = [name for name in switches if lab.netns(name) and lab.carrier(name).name == machine]
        parts = [(machine, None), *((name, lab.netns(name)) for name in carried)]
        done = lab.node(machine).run(["sh", "-c", script(parts)], check=False, timeout_s=timeout_s)
        return parse(done.stdout)

    machines = tuple(lab.nodes())
    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        found = {name: facts for part in pool.map(one, machines) for name, facts in part.items()}
    return Fingerprint(nodes=found)


def diff(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Every difference, one readable line each; empty when both are the same."""
    lines = []
    for node in sorted({*before.nodes, *after.nodes}):
        was, now = before.nodes.get(node, {}), after.nodes.get(node, {})
        for subject in sorted({*was, *now}):
            if subject not in now:
                lines.append(f"{node}: {subject} is gone (was {was[subject]})")
            elif subject not in was:
                lines.append(f"{node}: {subject} is new ({now[subject]})")
            elif was[subject] != now[subject]:
                lines.append(f"{node}: {subject} was {was[subject]}, is {now[subject]}")
    return lines


def settle(lab: Lab, before: Fingerprint, *, within_s: float = SETTLE_S) -> list[str]:
    """Differences of a lab to an earlier fingerprint, once routing has had time to come back; empty: there are none."""
    deadline = time.monotonic() + within_s
    while (left := diff(before, capture(lab))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def script(parts: list[tuple[str, str | None]]) -> str:
    """The shell that prints the state of nodes on one machine; the first part, without a namespace, is the machine."""
    lines = []
    for name, netns in parts:
        lines.append(f"echo {_MARK}node {name}")
        if netns is None:
            lines += [_IN_NAMESPACE, _ON_MACHINE]
        else:
            lines.append(f"ip netns exec {netns} sh <<'END'\n{_IN_NAMESPACE}\nEND")
    return "\n".join([*lines, f"echo {_MARK}end", "true"])


def parse(text: str) -> dict[str, dict[str, str]]:
    """What `script` printed, by node and subject.

    Raises:
        LabError: it ends too early.
    """
    nodes: dict[str, dict[str, str]] = {}
    section, body = "", list[str]()
    node: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(_MARK):
            body.append(line)
            continue
        node.update(_facts(section, "\n".join(body)))
        section, _, name = line[len(_MARK) :].partition(" ")
        body = []
        if section == "node":
            node = nodes.setdefault(name, {})
    if section != "end":
        raise LabError(f"a fingerprint ends in its section {section!r}: {text[-200:]!r}")
    return nodes


def _facts(section: str, body: str) -> Iterator[tuple[str, str]]:
    if section == "ip":
        # A batch prints one array after another; what an item is shows by its keys.
        for item in _items(body):
            facts = _address_facts if "ifname" in item else _rule_facts if "priority" in item else _route_facts
            yield from facts(item)
    elif section in _JSON_FACTS:
        for item in _items(body):
            yield from _JSON_FACTS[section](item)
    elif section == "nft":
        for item in json.loads(body or "{}").get("nftables", ()):
            if "table" in item:
                yield f"nft table {item['table']['family']} {item['table']['name']}", "there"
    else:
        for line in filter(str.strip, body.splitlines()):
            yield from _line_fact(section, line)


def _items(body: str) -> Iterator[dict[str, Any]]:
    decoder, at = json.JSONDecoder(), 0
    text = body.strip()
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        yield from found
        while at < len(text) and text[at].isspace():
            at += 1


def _line_fact(section: str, line: str) -> Iterator[tuple[str, str]]:
    if section == "sysctl":
        name, _, value = line.partition(" = ")
        yield f"sysctl {name}", " ".join(value.split())
    elif section == "cpu.max":
        path, _, value = line.partition(":")
        yield f"cpu.max {path.split('/')[-2]}", value
    elif section == "unit":
        name, _load, active, sub, *_ = line.split()
        yield f"unit {name}", f"{active} {sub}"
    elif section == "daemon":
        name, _, count = line.partition(" ")
        yield f"daemon {name}", f"{count or 0} running"
    elif section in ("revert", "netns"):
        yield f"{section} {line.strip()}", "there"


def _address_facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    name = item["ifname"]
    kind = item.get("linkinfo", {}).get("info_kind", "")
    flags = " ".join(sorted(flag for flag in item["flags"] if flag in ("UP", "LOWER_UP", "PROMISC", "NOARP")))
    words = [flags or "down", f"mtu {item['mtu']}", f"qdisc {item.get('qdisc')}", item.get("address", ""), kind]
    if "master" in item:
        words.append(f"master {item['master']}")
    yield f"link {name}", " ".join(filter(None, words))
    for address in item.get("addr_info", ()):
        # What a router advertisement gave comes and goes by itself.
        if address.get("local") and not address.get("dynamic"):
            yield f"address {name} {address['local']}/{address['prefixlen']}", address.get("scope", "")


def _rule_facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    words = [f"{key} {item[key]}" for key in sorted(item) if key not in ("priority", "flags")]
    yield f"rule {item['priority']} {' '.join(words)}", "there"


def _route_facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if item.get("protocol") == "ra" or item.get("table") == "local":
        return
    hops = item.get("nexthops") or [item]
    ways = sorted(
        " ".join(
            filter(
                None,
                [
                    _via(hop),
                    f"dev {hop.get('dev')}",
                    *(flag for flag in hop.get("flags", ()) if flag in ("linkdown", "dead")),
                ],
            )
        )
        for hop in hops
    )
    table = item.get("table", "main")
    kind = item.get("type", "unicast")
    # Equal prefixes may stand twice in a table: with other metrics, or (fe80::/64) once for each interface.
    subject = f"route {table} {kind} {item['dst']} metric {item.get('metric', 0)}"
    if item.get("protocol") == "kernel":
        subject += f" dev {item.get('dev')}"
    yield f"{subject} {item.get('protocol', '')}".strip(), ", ".join(ways)


def _via(hop: dict[str, Any]) -> str:
    if "via" in hop:
        return f"via {hop['via'].get('host')}"
    return f"via {hop['gateway']}" if "gateway" in hop else ""


def _qdisc_facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    where = "root" if item.get("root") else f"parent {item.get('parent', '')}"
    yield f"qdisc {item.get('dev')} {where}", f"{item['kind']} {json.dumps(item.get('options', {}), sort_keys=True)}"


def _rdma_facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        f"rdma {item['ifname']}/{item.get('port', 1)}",
        f"{item.get('state')} {item.get('physical_state')} netdev {item.get('netdev')}",
    )


_JSON_FACTS = {
    "qdisc": _qdisc_facts,
    "rdma": _rdma_facts,
}
