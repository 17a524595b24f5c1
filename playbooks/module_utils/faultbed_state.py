"""Shared by the node programs of roles: run `ip`, read and write kernel state, report changes.

This module imports few others, because importing takes long in a guest whose CPU is emulated.
"""

import contextlib
import json
import os
import subprocess
import sys

__all__ = [
    "Changes",
    "StateError",
    "addresses",
    "answer",
    "fifo_queues",
    "ip_batch",
    "ip_json",
    "netns",
    "run",
    "set_sysctls",
]

NETNS = "/run/netns"
QUEUE_PACKETS = 10000  # more than all queue pairs of a host have in flight (rxe: 128 packets each)
MANAGEMENT_IP = "10.0.2.15"  # the guest's address on QEMU's user network, which SSH uses
FIRST_TABLE, FIRST_PRIORITY = 100, 1000  # for the first RNIC; each further RNIC has the next number


class StateError(Exception):
    """The node cannot be configured as desired; the message says why."""


class Changes:
    """Descriptions of the changes that are made or, with `check`, would be made.

    Callers call `should_make` before each change.
    """

    def __init__(self, *, check):
        self.check = check
        self.made = []

    def should_make(self, what):
        """Add the description of a change; return whether to make it."""
        self.made.append(what)
        return not self.check


def answer(program, desired, *, check):
    """Run `program(desired, changes)` and print the answer for the action on_node, with the keys that it returns."""
    changes = Changes(check=check)
    try:
        extra = program(desired, changes) or {}
    except (StateError, OSError, subprocess.SubprocessError) as error:
        extra = {"failed": True, "msg": str(error)}
    print(json.dumps({"changed": bool(changes.made), "changes": changes.made} | extra))
    sys.stdout.flush()


def run(argv, *, stdin=None, ok=(0,)):
    """Run a command to its end and return its stdout."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode not in ok:
        output = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise StateError(f"`{' '.join(argv)}` ended with {done.returncode}: {output}")
    return done.stdout


def ip_json(*args, namespace=None):
    """Run `ip -j` in a network namespace and return its decoded output."""
    text = run(["ip", *(["-n", namespace] if namespace else []), "-j", *args])
    return json.loads(text) if text.strip() else []


def ip_batch(lines, *, namespace=None):
    """Run `ip` commands in one process: starting one costs 50 ms and more under emulation."""
    if not lines:
        return
    argv = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    try:
        run(argv, stdin="\n".join(lines) + "\n")
    except StateError as error:
        raise StateError(f"{error}; the commands were: {'; '.join(lines)}") from None


def fifo_queues(netdevs, changes, *, namespace=None, clsact=()):
    """Give each interface one deep first-in-first-out queue, so that the fabric loses no packet without a fault.

    The default of most systems, fq_codel, drops packets when the queue delay exceeds 5 ms for 100 ms (RFC 8289). On an
    emulated, shared CPU that may be any packet.

    Interfaces in `clsact` get a hook for filters, which faults use. Adding the hook while packets pass would deactivate
    the queue for a moment and drop packets (net/sched/sch_api.c, qdisc_graft: dev_deactivate).
    """
    tc = ["tc", *(["-n", namespace] if namespace else [])]
    qdiscs = json.loads(run([*tc, "-j", "qdisc", "show"]))
    roots = {item["dev"]: item for item in qdiscs if item.get("root")}
    hooked = {item["dev"] for item in qdiscs if item["kind"] == "clsact"}
    commands = [f"qdisc add dev {netdev} clsact" for netdev in clsact if netdev not in hooked]
    for netdev in netdevs:
        queue = roots.get(netdev, {})
        if queue.get("kind") != "pfifo" or queue.get("options", {}).get("limit") != QUEUE_PACKETS:
            commands.append(f"qdisc replace dev {netdev} root pfifo limit {QUEUE_PACKETS}")
    where = f" in {namespace}" if namespace else ""
    for line in commands:
        changes.should_make(f"tc {line}{where}")
    if commands and not changes.check:
        run([*tc, "-batch", "-"], stdin="\n".join(commands) + "\n")


def addresses(link):
    """Return the IPv4 addresses of an entry of `ip -j address`, with prefix length."""
    return [f"{info['local']}/{info['prefixlen']}" for info in link["addr_info"] if info["family"] == "inet"]


@contextlib.contextmanager
def netns(name):
    """Enter a network namespace; None stays in the present one. Processes started inside run in it."""
    if name is None:
        yield
        return
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    target = os.open(f"{NETNS}/{name}", os.O_RDONLY)
    try:
        os.setns(target, os.CLONE_NEWNET)
        yield
    finally:
        os.setns(home, os.CLONE_NEWNET)
        os.close(target)
        os.close(home)


def set_sysctls(values, changes, *, namespace=None):
    """Set values below /proc/sys/net: path -> value.

    /proc/sys/net shows the namespace of the process that opens a file (proc_sysctl.c, `current->nsproxy`).
    """
    with netns(namespace):
        for path, value in values.items():
            file = f"/proc/sys/net/{path}"
            with open(file, encoding="ascii") as current:
                if current.read().split() == str(value).split():
                    continue
            where = f" in {namespace}" if namespace else ""
            if changes.should_make(f"sysctl net.{path.replace('/', '.')}={value}{where}"):
                with open(file, "w", encoding="ascii") as target:
                    target.write(str(value))
