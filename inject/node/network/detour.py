"""Packets that take a detour: an ifb device of this fault's own whose queue delays, duplicates, drops or holds back.

The hop's rules select the packets; on egress they mark them and tc redirects what is marked (clsact, u32), on ingress
nftables forwards them itself. ifb gives them back where they came from, past the hooks that they have already seen
(drivers/net/ifb.c, ifb_ri_tasklet), so the port's own queue and everybody else's packets are as ever. The rules are
owned by this process: when it dies, packets go the straight way at once, and only an unused filter and device are left
to revert.

A port of a soft lab has its clsact from the beginning, and so may one of a Linux box: to make one, and to take it away,
has the kernel drop what passes the port meanwhile, whosever it is (net/sched/sch_api.c, qdisc_graft).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run
from inject.node.inside import inside, ip, unless_gone
from inject.node.network.packet_rules import HopActuator
from testbed.node.netlink import ECHO, REQUEST, Netlink, attributes

__all__ = ["GUEST", "OWN", "REDIRECTION", "DetourActuator"]

# linux/rtnetlink.h, linux/gen_stats.h, linux/pkt_sched.h
_RTM_GETQDISC = 38
_TC_H_ROOT = 0xFFFFFFFF
_TCMSG = struct.Struct("=BxxxiIII")
_TCA_KIND, _TCA_OPTIONS, _TCA_STATS2 = 1, 2, 7
_NETEM_OPTIONS_BYTES, _TCA_NETEM_PRNG_SEED = 24, 14
_SEED_SINCE = (6, 6)
_STATS_BASIC, _STATS_QUEUE = 1, 3
REDIRECTION = (
    "protocol ip prio {prio} u32 match u32 0 0 match mark {mark:#x} 0xffffffff action mirred egress redirect dev {via}"
)
"""The filter, as tc takes it."""
OWN, GUEST = 1, 2
"""The filter's priority in a clsact made for it, and in one that was there: `heal` removes what goes with it."""


class DetourActuator(HopActuator):
    """A hop whose packets pass the device `via` with the queue `queue`; counted by `count` of it, or by the rule."""

    def __init__(self, *, via: str, mark: int, queue: str, count: str, drain_s: float, **hop: Any) -> None:
        super().__init__(**hop)
        self._via, self._mark, self._queue, self._counted, self._drain_s = via, mark, queue, count, drain_s
        self._route: Netlink | None = None
        self._laid = self._is_guest = False
        self._past: dict[str, int] = {}

    def prepare(self) -> dict[str, Any]:
        """As the hop; and refuse a port whose way out somebody else directs, and a device of our name."""
        if " seed " in self._queue and _kernel() < _SEED_SINCE:
            raise Refused(
                f"netem of Linux {os.uname().release} takes no seed (6.6 does): its packets could not be chosen again; "
                "leave out burst and jitter"
            )
        # Without this the module would make two devices nobody asked for (drivers/net/ifb.c, numifbs).
        run(["modprobe", "ifb", "numifbs=0"])
        before = super().prepare()
        self._route = Netlink(socket.NETLINK_ROUTE)
        if self._via in (name for _, name in socket.if_nameindex()):
            raise Refused(f"a device {self._via} is already there: a leftover? run `faultbed heal`")
        if self._hook == "egress":
            self._is_guest = "clsact" in run(["tc", "qdisc", "show", "dev", self._device])
            if self._is_guest and run(["tc", "filter", "show", "dev", self._device, "egress"]).strip():
                raise Refused(
                    f"{self._device} has a filter on its way out that is not ours: another fault's detour, or run "
                    "`faultbed heal`"
                )
        return before

    def revert_script(self) -> str:
        """Rules, redirection, device: whatever of them is there."""
        at, link = inside(self._netns), f"{ip(self._netns)} link"
        way = f"{link} del {self._via} 2>/dev/null; ! {link} show {self._via} >/dev/null 2>&1"
        if self._hook == "egress":
            # There was none before, whosever the clsact is.
            none = f'[ -z "$({at}tc filter show dev {self._device} egress 2>/dev/null)" ]'
            way = f"{at}tc {self._straight_on()} 2>/dev/null; {way} && {none}"
        return f"{super().revert_script()} && {{ {unless_gone(self._netns, way)}; }}"

    def lay(self) -> None:
        """The way, on which nothing goes yet: on a switch that forwards all day its commands take seconds."""
        self._laid = True
        run(["ip", "link", "add", self._via, "up", "type", "ifb"], alive=self._alive)
        lines = [f"qdisc add dev {self._via} root {self._queue}"]
        if self._hook == "egress":
            prio = GUEST if self._is_guest else OWN
            lines += [] if self._is_guest else [f"qdisc add dev {self._device} clsact"]
            redirection = REDIRECTION.format(prio=prio, mark=self._mark, via=self._via)
            lines += [f"filter add dev {self._device} egress {redirection}"]
        run(["tc", "-batch", "-"], stdin="\n".join(lines) + "\n", alive=self._alive)

    def on(self) -> None:
        """The rule that sends packets on the way."""
        if not self._laid:
            self.lay()
        super().on()

    def off(self) -> None:
        """The rule first; what is on the way arrives before the way is taken up."""
        super().off()
        if not self._laid:
            return
        deadline = time.monotonic() + self._drain_s + 0.5
        while self._stats().get("qlen") and time.monotonic() < deadline:
            self._alive()
            time.sleep(0.005)
        for name, value in self._stats().items():
            self._past[name] = self._past.get(name, 0) + value
        if self._hook == "egress":
            run(["tc", *self._straight_on().split()])
        run(["ip", "link", "del", self._via])
        self._laid = False

    def read(self) -> dict[str, Any]:
        """The hop's readback, and the queue as the kernel tells it: its kind, and what it has done."""
        seen = super().read()
        now = self._stats() if self._laid else {}
        there = self._via in (name for _, name in socket.if_nameindex())
        seen |= {"via": self._via, "queue": self._kind() if there else None}
        if " seed " in self._queue:
            seen["queue_seed"] = self._seed() if there else None
        seen |= {
            f"queue_{name}": value + self._past.get(name, 0)
            for name, value in (now or dict.fromkeys(self._past, 0)).items()
        }
        if self._there:
            seen["applied"] = bool(seen["applied"] and seen["queue"] == self._queue.partition(" ")[0])
        elif there:
            seen["applied"] = True
        return seen

    def hits(self) -> int:
        """Packets sent on the detour, or what its queue did to them."""
        if self._counted == "hits":
            return super().hits()
        now = self._stats().get(self._counted, 0) if self._laid else 0
        return self._past.get(self._counted, 0) + now

    def passed(self) -> int | None:
        """As the hop, where what is counted is what the rule has sent here."""
        return super().passed() if self._counted == "hits" else None

    def close(self) -> None:
        """As the hop."""
        super().close()
        if self._route is not None:
            self._route.close()

    def _straight_on(self) -> str:
        """The arguments of tc that take the redirection away."""
        if self._is_guest:
            return f"filter del dev {self._device} egress protocol ip prio {GUEST}"
        return f"qdisc del dev {self._device} clsact"

    def _stats(self) -> dict[str, int]:
        found = attributes(self._root().get(_TCA_STATS2, b""))
        basic, queue = found.get(_STATS_BASIC, b""), found.get(_STATS_QUEUE, b"")
        if not basic or not queue:
            return {}
        _bytes, packets = struct.unpack_from("=QI", basic)
        qlen, _backlog, drops, _requeues, overlimits = struct.unpack_from("=5I", queue)
        return {"packets": packets, "qlen": qlen, "drops": drops, "overlimits": overlimits}

    def _kind(self) -> str:
        return self._root().get(_TCA_KIND, b"").rstrip(b"\0").decode()

    def _seed(self) -> int | None:
        """Return the seed of the netem queue, as the kernel has it."""
        options = attributes(self._root().get(_TCA_OPTIONS, b"")[_NETEM_OPTIONS_BYTES:])
        seed = options.get(_TCA_NETEM_PRNG_SEED)
        return int.from_bytes(seed, sys.byteorder) if seed else None

    def _root(self) -> dict[int, bytes]:
        if self._route is None:
            return {}
        asked = _TCMSG.pack(socket.AF_UNSPEC, socket.if_nametoindex(self._via), 0, _TC_H_ROOT, 0)
        return attributes(self._route.ask(_RTM_GETQDISC, asked, flags=REQUEST | ECHO)[_TCMSG.size :])


def _kernel() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers)
