"""Query live machines for discovery. Nothing is changed on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from faultbed.testbed.discover.answers import SCRIPT, learning_trigger, split
from faultbed.testbed.discover.facts import Machine, broadcast, machine_of
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import Management
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.side_by_side import on_each

__all__ = ["parse_seed", "parse_seeds", "query"]

_SEED = re.compile(r"(?P<name>[a-z][a-z0-9-]*)=(?:(?P<user>[^@=]+)@)?(?P<host>[^@:=]+|\[[^]]+\])(?::(?P<port>[0-9]+))?")


def parse_seed(text: str) -> tuple[str, Management]:
    """Parse a machine as the user names it for discovery: `NAME=[USER@]ADDRESS[:PORT]`.

    Raises:
        UsageError: the text has another form.
    """
    match = _SEED.fullmatch(text)
    if match is None:
        raise UsageError(f'"{text}" names no machine; write NAME=[USER@]ADDRESS[:PORT], such as host1=192.0.2.11')
    return match["name"], Management(
        netdev=None,
        mac=None,
        address=match["host"].strip("[]"),
        port=int(match["port"]) if match["port"] else None,
        user=match["user"],
        private_key_file=None,
    )


def parse_seeds(texts: Sequence[str]) -> dict[str, Management]:
    """Parse the machines that the user names for discovery.

    Raises:
        UsageError: a text has another form, or two machines have the same name.
    """
    seeds: dict[str, Management] = {}
    for name, management in map(parse_seed, texts):
        if name in seeds:
            raise UsageError(f"{name} is named twice ({' '.join(texts)}); give each machine a name of its own")
        seeds[name] = management
    return seeds


def query(
    nodes: Mapping[str, Node],
    progress: Callable[[str], None],
    *,
    unreachable: dict[str, str],
    timeout_s: float = 120.0,
) -> list[Machine]:
    """Query the facts of all machines in parallel.

    If a machine carries soft switches, each host then sends an empty datagram on its front end, and machines with a
    bridge are queried again: a bridge knows only the hosts from which it received a frame. Machines without a complete
    answer are added to `unreachable` with the reason, and discovery continues with the others.

    Raises:
        LabError: no machine answers.
    """

    def query_machine(name: str) -> Machine:
        done = nodes[name].run(["sh", "-c", SCRIPT], check=False, timeout_s=timeout_s)
        machine = machine_of(name, split(name, done.stdout, stderr=done.stderr))
        progress(f"{name}: {_summary(machine)}")
        return machine

    def query_or_give_up(name: str) -> Machine | None:
        try:
            return query_machine(name)
        except LabError as error:
            unreachable[name] = str(error)
            progress(f"{name}: {error}")
            return None

    all_s = 2 * timeout_s
    answers = on_each(nodes, query_or_give_up, timeout_s=all_s)
    by_name = {machine.name: machine for machine in answers if machine is not None}
    if not by_name:
        raise LabError(f"no machine answers: {'; '.join(unreachable.values()) or 'none was given'}")
    bridges = [name for name, machine in by_name.items() if _has_bridge(machine)]
    if bridges:
        hosts = [machine.name for machine in by_name.values() if machine.is_host]
        on_each(hosts, lambda name: _trigger_learning(nodes[name], by_name[name]), timeout_s=all_s)
        by_name |= dict(zip(bridges, on_each(bridges, query_machine, timeout_s=all_s), strict=True))
    return list(by_name.values())


def _has_bridge(machine: Machine) -> bool:
    return any(port.master for namespace in machine.namespaces.values() for port in namespace.interfaces.values())


def _trigger_learning(node: Node, host: Machine) -> None:
    rnics = {dev for _, dev in host.rdma}
    pairs = [
        (address.partition("/")[0], broadcast_address)
        for port in host.own.interfaces.values()
        if port.name not in rnics and port.name != host.ssh_netdev
        for address in port.addresses
        if (broadcast_address := broadcast(address))
    ]
    if pairs:
        node.run(learning_trigger(pairs), timeout_s=60.0)


def _summary(machine: Machine) -> str:
    switches: Sequence[str] = [name for name, namespace in machine.namespaces.items() if namespace.asn is not None]
    if switches:
        return f"carries {len(switches)} switches: {', '.join(switches)}"
    if machine.is_host:
        return f"a host with {len(machine.rdma)} RNICs and {len(machine.gpus) + len(machine.soft_gpus)} GPUs"
    return f"a switch, AS {machine.own.asn}" if machine.is_switch else "neither a host nor a switch"
