"""Watch a machine and every switch on it: counters and state on request, samples and changes as they come.

JSON lines on stdin and stdout, times in ns of this machine; each answer carries the `seq` of its request:

    {"do":"clock"}                          {"event":"clock","monotonic_ns":N}
    {"do":"counters","nodes":{NODE:NETNS}}  {"event":"counters","at_ns":N,"nodes":{NODE:{NAME:VALUE}}}
    {"do":"state","nodes":{NODE:NETNS}}     {"event":"state","nodes":{NODE:{SUBJECT:TEXT}},
                                    "heard_s":S, "moved":{NODE:{SUBJECT:S}}}: for how long the kernel's notifications
                                    of all these nodes are known, and how long ago each of them was
    {"do":"gpus"}                           {"event":"gpus",..} of NVIDIA's, by NVML (testbed/node/gpu/nvml.py), or soft
    {"do":"kernel_log","boot":ID,"after":N,"files":{PATH:[INODE,OFFSET]}}
                                    {"event":"kernel_log", with these fields and "messages":["LEVEL TEXT",..]}
                                    since record N of that boot, or of this boot if ID is another one; without ID from
                                    now on; and from then on at once {"event":"kernel", with the same fields}. Crashes
                                    of FRR's and SONiC's daemons are among them (daemon_log.py), since these offsets
    {"do":"egress","flows":{NODE:[NETNS,[..]]}}  {"event":"egress","ports":{NODE:[PORT or null,..]}} (next_hops.py)
    {"do":"decisions","flows":{..}}         {"event":"decisions","decisions":{NODE:[[PORT or null,TABLE],..]}}
    {"do":"routing","nodes":{NODE:NETNS}}   {"event":"routing","nodes":{NODE:{..}},"held":[KIND,..]} (routing_state.py)
    {"do":"rnics_in_use"}                   {"event":"rnics_in_use","rnics":[NAME,..]} (in_use/rnics_in_use.py)
    {"do":"tap","id":ID,"ports":{PORT:[NETNS,NETDEV]}}  {"event":"tapping"}: from now on, RoCEv2 packets are noticed
    {"do":"untap","id":ID}                  {"event":"untapped","seen":{PORT:true|false|null}} (roce_taps.py there)
    {"do":"follow","nodes":{..},"every_ms":100,"report_ms":4000}
                                    {"event":"following","no_log":WHY or null}, and from then on
                    every report_ms {"event":"samples","samples":[[AT_NS,{NODE:{NAME:VALUE}}],..],"busy_ns":N}
                    at once         {"event":"change","at_ns":N,"node":NODE,"subject":SUBJECT,"text":TEXT or null}
                                    and of its kernel's log  {.., "node":null,"subject":"kernel","text":"LEVEL TEXT"}
    {"do":"unfollow"}                       {"event":"unfollowed"}, after the last samples
    an error                                {"event":"error","error":"..."}

One process runs as long as a lab is open. Under emulation, a command from a shell costs a tenth of a second of CPU time
and an interpreter costs a second, which the observed traffic would lose.

NETNS is null for the machine itself. A sample contains the values that have changed since the last one; `busy_ns` is
the CPU time of sampling. Changes of links, routes and next hops come from the kernel (rtnetlink multicast groups),
without polling. From the kernel's log, errors and worse are sent, and warnings of the kernel's own code (/dev/kmsg,
Documentation/ABI/testing/dev-kmsg). The process ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time

from faultbed.testbed.node import netns, state
from faultbed.testbed.node.counts import Place, soft_gpus, watch_clock
from faultbed.testbed.node.gpu import health, nvml
from faultbed.testbed.node.holders import boot_id
from faultbed.testbed.node.in_use.rnics_in_use import rnics_in_use
from faultbed.testbed.node.in_use.roce_taps import RoceTaps
from faultbed.testbed.node.logs.daemon_log import DaemonLog
from faultbed.testbed.node.netlink import messages
from faultbed.testbed.node.next_hops import decisions, egress_ports
from faultbed.testbed.node.routing import routing_state

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

__all__ = ["main"]

_SHARE = 0.001
"""Share of a CPU that samples may use: if one takes 3 ms (under emulation), they come every 3 s, and so on up to
`_SELDOM_NS`. Beside traffic, with cold caches, an emulated switch needs 0.1 s for one; sending them every two seconds
costs as much again."""
_SELDOM_NS = 4_000_000_000
_RECENT_NS = 60_000_000_000
"""Changes before that need not be known by whoever waits until a node is quiet."""


class Watch:
    """The state that is kept between requests."""

    def __init__(self) -> None:
        self.places: dict[str | None, Place] = {}
        self.followed: dict[str, str | None] = {}
        self.listening: dict[str, KernelNotifications] = {}
        self.followed_log: KernelLog | None = None
        self.log: KernelLog | None = None
        self.followed_daemons: DaemonLog | None = None
        self.daemons: DaemonLog | None = None
        self.every_ns = self.report_ns = self.due_ns = self.sent_ns = self.busy_ns = 0
        self.samples: list[tuple[int, dict[str, dict[str, int]]]] = []
        self.taps: dict[str, RoceTaps] = {}

    def place(self, namespace: str | None) -> Place:
        """Return the sockets of a namespace, opened at first use and again if the namespace was replaced."""
        known = self.places.get(namespace)
        if known is not None and known.is_stale():
            self.places.pop(namespace).close()
            known = None
        if known is None:
            known = self.places[namespace] = Place(namespace)
        return known

    def clock(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return this machine's time."""
        return {"monotonic_ns": time.monotonic_ns()}

    def counters(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return every counter of some nodes."""
        nodes = {node: self.place(namespace).read() for node, namespace in request["nodes"].items()}
        return {"at_ns": time.monotonic_ns(), "nodes": nodes}

    def state(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the state of some nodes, and how long ago the kernel reported its changes.

        The first request gives only the starting point of the latter.
        """
        listening = {node: self.listen(node, namespace) for node, namespace in request["nodes"].items()}
        nodes = state.read_nodes(request["nodes"])
        self.hear()  # what has changed while it was read
        now_ns = time.monotonic_ns()
        moved = {node: heard.moved(now_ns) for node, heard in listening.items()}
        return {
            "nodes": nodes,
            "heard_s": min(((now_ns - heard.since_ns) / 1e9 for heard in listening.values()), default=0.0),
            "moved": {node: subjects for node, subjects in moved.items() if subjects},
        }

    def listen(self, node: str, namespace: str | None) -> KernelNotifications:
        """Return the notifications of a node, heard from now on if they were not before."""
        known = self.listening.get(node)
        if known is not None and (known.namespace != namespace or known.is_stale()):
            self.listening.pop(node).close()
            known = None
        if known is None:
            known = self.listening[node] = KernelNotifications(namespace)
        return known

    def hear(self) -> None:
        """Read what the kernel has reported, and send the changes of the nodes that are followed."""
        for node, heard in self.listening.items():
            changes = heard.read()
            if node in self.followed:
                for change in changes:
                    write("change", node=node, **change)

    def kernel_log(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what kernel and daemons have logged since the last such request; the first one only starts it."""
        boot = boot_id()
        if self.log is None or self.daemons is None:
            self.daemons = DaemonLog(request.get("files"))
            self.log = KernelLog(is_whole=True)
            messages = self.log.read(after=request["after"] if request.get("boot") == boot else -1)
            if "boot" not in request:  # the caller requests later messages only
                messages = []
        else:
            messages = self.log.read()
        messages += self.daemons.read()
        return {"boot": boot, "after": self.log.number, "files": self.daemons.position, "messages": messages}

    def push_kernel_log(self) -> None:
        """Send what the kernel has logged at once: a reboot would lose it. The daemons' files are read on request."""
        if self.log is not None and self.daemons is not None and (messages := self.log.read()):
            write("kernel", boot=boot_id(), after=self.log.number, files=self.daemons.position, messages=messages)

    def send_crashes(self) -> None:
        """Send what the daemons have logged since they are followed."""
        if self.followed_daemons is None:
            return
        now_ns = time.monotonic_ns()
        try:
            texts = self.followed_daemons.read()
        except OSError as error:
            self.followed_daemons, texts = None, [f"3 messages were lost: {error}"]
        for text in texts:
            write("change", at_ns=now_ns, node=None, subject="kernel", text=text)

    def gpus(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the host's NVIDIA GPUs, or the synthetic health of its soft GPUs if it has any."""
        names = soft_gpus()
        return health.look(names) if names else nvml.look()

    def egress(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the ports by which flows would leave some nodes."""
        return {
            "ports": {node: egress_ports(namespace, flows) for node, (namespace, flows) in request["flows"].items()}
        }

    def decisions(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the ports by which flows would leave some nodes, and the routing tables that decide it."""
        return {"decisions": {node: decisions(space, flows) for node, (space, flows) in request["flows"].items()}}

    def routing(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the routing state of some switches, and the schemes that holders on this machine apply."""
        return {
            "nodes": {node: routing_state.read_switch(namespace) for node, namespace in request["nodes"].items()},
            "held": routing_state.held_schemes(),
        }

    def rnics_in_use(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return the RDMA devices with a queue pair that can carry data now."""
        return {"rnics": rnics_in_use()}

    def tap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Notice RoCEv2 packets at some ports from now on."""
        self.untap(request)
        self.taps[request["id"]] = RoceTaps({port: tuple(place) for port, place in request["ports"].items()})
        return {}

    def untap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return whether RoCEv2 packets were noticed at each port since `tap`, and end that; empty without `tap`."""
        taps = self.taps.pop(request["id"], None)
        if taps is None:
            return {"seen": {}}
        try:
            return {"seen": taps.seen()}
        finally:
            taps.close()

    def follow(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start to sample, and to listen for changes."""
        self.unfollow({})
        self.hear()  # earlier changes are not news
        self.followed = request["nodes"]
        for node, namespace in self.followed.items():
            self.listen(node, namespace)
            self.place(namespace).read()  # reads names and opens files, which is slow: before the first sample
        no_log = None
        try:
            self.followed_log = KernelLog()
            self.followed_daemons = DaemonLog(None)
        except OSError as error:  # not root, or a kernel without printk
            no_log = str(error)
        self.every_ns, self.report_ns = request["every_ms"] * 1_000_000, request["report_ms"] * 1_000_000
        self.due_ns = self.sent_ns = time.monotonic_ns()
        return {"no_log": no_log}

    def unfollow(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Send the last samples, and stop."""
        self.send()
        if self.followed_daemons is not None:
            self.followed_daemons.close()
        if self.followed_log is not None:
            self.followed_log.close()
        self.followed_log, self.followed_daemons, self.followed, self.every_ns = None, None, {}, 0
        return {}

    def files(self) -> list[int]:
        """Return the descriptors whose data wait for nobody's request."""
        logs = [log.file for log in (self.log, self.followed_log) if log is not None]
        return [*logs, *(heard.socket.fileno() for heard in self.listening.values())]

    def read(self, ready: Collection[int]) -> None:
        """Read the descriptors that have data."""
        if self.log is not None and self.log.file in ready:
            self.push_kernel_log()
        if self.followed_log is not None and self.followed_log.file in ready:
            self.followed_log.send()
        if any(heard.socket.fileno() in ready for heard in self.listening.values()):
            self.hear()

    def sample(self, now_ns: int) -> None:
        """Take a sample if it is due. Samples are sent in batches: each write is a packet on the management network."""
        if not self.every_ns or now_ns < self.due_ns:
            return
        began_ns = time.thread_time_ns()
        changed: dict[str, dict[str, int]] = {}
        for node, namespace in self.followed.items():
            with contextlib.suppress(OSError):  # a namespace that is gone has no counters
                if values := self.place(namespace).sample():
                    changed[node] = values
        self.samples.append((now_ns, changed))
        cost_ns = time.thread_time_ns() - began_ns
        self.busy_ns += cost_ns
        self.due_ns = max(self.due_ns + self.every_ns, now_ns + min(int(cost_ns / _SHARE), _SELDOM_NS))
        if now_ns - self.sent_ns >= self.report_ns:
            self.send()

    def send(self) -> None:
        """Send the samples taken so far, and the crashes of daemons."""
        self.send_crashes()
        if self.samples:
            write("samples", samples=self.samples, busy_ns=self.busy_ns)
        self.samples, self.busy_ns, self.sent_ns = [], 0, time.monotonic_ns()

    def wait_s(self) -> float | None:
        """Return the seconds until the next sample is due; None: there are no samples to take."""
        return max(0.0, (self.due_ns - time.monotonic_ns()) / 1e9) if self.every_ns else None


class KernelNotifications:
    """The kernel's notifications of changes of a namespace.

    It listens to links, addresses, routes, next hops, rules, queues and forwarding settings.
    """

    _NEWLINK, _DELLINK, _NEWROUTE, _DELROUTE, _NEWNEXTHOP, _DELNEXTHOP = 16, 17, 24, 25, 104, 105
    _NEWADDR, _DELADDR, _NEWRULE, _DELRULE = 20, 21, 32, 33
    _NEWQDISC, _DELQDISC, _NEWNETCONF, _DELNETCONF = 36, 37, 80, 81
    _NEWS = (_NEWLINK, _DELLINK, _NEWROUTE, _DELROUTE, _NEWNEXTHOP, _DELNEXTHOP)
    """Kinds of messages that followers receive; the others only show that a node does not stay as it is."""
    _GROUPS = (1, 4, 5, 7, 8, 24, 32)
    """RTNLGRP_LINK, TC, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV4_NETCONF and NEXTHOP."""
    _SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self._born = netns.identity(namespace)
        netns.enter(namespace)
        try:
            self.names: dict[int, str] = dict(socket.if_nameindex())
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
            self.socket.bind((0, 0))  # the kernel sends no notifications to an unbound socket
            for group in self._GROUPS:
                self.socket.setsockopt(self._SOL_NETLINK, self._ADD_MEMBERSHIP, group)
            self.socket.setblocking(False)  # noqa: FBT003 (the socket module's own form)
        finally:
            netns.enter(None)
        self.since_ns = time.monotonic_ns()
        """Every change since then is known."""
        self._moved_ns: dict[str, int] = {}

    def is_stale(self) -> bool:
        """Return whether the namespace was replaced by a new one of the same name."""
        return self._born != netns.identity(self.namespace)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def moved(self, now_ns: int) -> dict[str, float]:
        """Return how many seconds ago each subject has last changed, for those that did in the last minute."""
        self._moved_ns = {subject: at_ns for subject, at_ns in self._moved_ns.items() if now_ns - at_ns < _RECENT_NS}
        return {subject: round((now_ns - at_ns) / 1e9, 3) for subject, at_ns in self._moved_ns.items()}

    def read(self) -> list[dict[str, Any]]:
        """Read all notifications, and return the changes that are news to an observer."""
        now_ns = time.monotonic_ns()
        changes: list[dict[str, Any]] = []
        try:
            while True:
                for kind, _, body in messages(self.socket.recv(1 << 16)):
                    for subject, text in self._facts(kind, body):
                        self._moved_ns[subject] = now_ns
                        if kind in self._NEWS:
                            changes.append({"at_ns": now_ns, "subject": subject, "text": text})
        except BlockingIOError:
            pass
        except OSError as error:  # ENOBUFS: more notifications than were read; report the loss
            self.since_ns = now_ns
            changes.append({"at_ns": now_ns, "subject": "news", "text": f"lost: {os.strerror(error.errno or 0)}"})
        return changes

    def _facts(self, kind: int, body: bytes) -> list[tuple[str, str | None]]:
        if kind in (self._NEWLINK, self._DELLINK):
            index, subject, text = state.link_change(body, self.names)
            self.names[index] = subject.partition(" ")[2]
            return [(subject, text if kind == self._NEWLINK else None)]
        if kind in (self._NEWROUTE, self._DELROUTE):
            facts = state.route_facts(body, self.names)
            return [(subject, text if kind == self._NEWROUTE else None) for subject, text in facts]
        if kind in (self._NEWNEXTHOP, self._DELNEXTHOP):
            subject, text = state.nexthop_fact(body, self.names)
            return [(subject, text if kind == self._NEWNEXTHOP else None)]
        return [(subject, None) for subject in self._subjects(kind, body)]

    def _subjects(self, kind: int, body: bytes) -> list[str]:
        if kind in (self._NEWQDISC, self._DELQDISC):
            return [state.qdisc_fact(body, self.names)[0]]
        if kind in (self._NEWRULE, self._DELRULE):
            return [state.rule_fact(body)[0]]
        if kind in (self._NEWADDR, self._DELADDR):
            return [subject for subject, _ in state.address_facts(body, self.names)]
        if kind in (self._NEWNETCONF, self._DELNETCONF):
            return [subject for subject, _ in state.inet_facts(body, self.names)]
        return []


class KernelLog:
    """The kernel's log from its creation on; with `is_whole`, also the earlier records that the kernel still has.

    Only messages that matter are returned: errors and worse, and warnings of the kernel about itself.
    """

    _ERROR = 3
    _CODE = ("WARNING:", "BUG:", "INFO: task", "Oops", "watchdog:", "rcu:")
    """Prefixes of the kernel's messages about its own errors, whatever their level."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.number = -1
        """Number of the last record that was read; -1: none was."""
        self.file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not is_whole:
            os.lseek(self.file, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the log."""
        os.close(self.file)

    def send(self) -> None:
        """Read all messages and send those that matter."""
        now_ns = time.monotonic_ns()
        for text in self.read():
            write("change", at_ns=now_ns, node=None, subject="kernel", text=text)

    def read(self, *, after: int = -1) -> list[str]:
        """Return level and text of each message that matters, of the records since the last call and after `after`."""
        texts: list[str] = []
        while True:
            try:
                record = os.read(self.file, 8192)
            except BlockingIOError:
                return texts
            except BrokenPipeError:  # records were overwritten
                texts.append(f"{self._ERROR} messages were lost")
                continue
            self.number = int(record.split(b",", 2)[1])
            text = self.text_of(record)
            if text is not None and self.number > after:
                texts.append(text)

    @classmethod
    def text_of(cls, record: bytes) -> str | None:
        """Return level and text of a record that matters, otherwise None."""
        head, _, text = record.decode(errors="replace").partition(";")
        level = int(head.partition(",")[0]) & 7
        text = text.partition("\n")[0]
        return f"{level} {text}" if level <= cls._ERROR or text.startswith(cls._CODE) else None


def write(event: str, **fields: Any) -> None:
    """Write one line; the output is flushed once per loop."""
    sys.stdout.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")


_EVENTS = {
    "clock": "clock",
    "counters": "counters",
    "state": "state",
    "gpus": "gpus",
    "kernel_log": "kernel_log",
    "egress": "egress",
    "decisions": "decisions",
    "routing": "routing",
    "rnics_in_use": "rnics_in_use",
    "tap": "tapping",
    "untap": "untapped",
    "follow": "following",
    "unfollow": "unfollowed",
}


def answer(watch: Watch, line: bytes) -> None:
    """Carry out the request in a line, and write the answer."""
    seq = None
    try:
        request = json.loads(line)
        seq = request.get("seq")
        event = _EVENTS[request["do"]]
        write(event, seq=seq, **getattr(watch, request["do"])(request))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        write("error", seq=seq, error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until the end of stdin."""
    watch_clock()
    watch, buffer = Watch(), b""
    while True:
        ready, _, _ = select.select([0, *watch.files()], [], [], watch.wait_s())
        watch.read(ready)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                answer(watch, line)
        watch.sample(time.monotonic_ns())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
