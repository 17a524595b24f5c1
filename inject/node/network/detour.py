"""A detour for selected packets: an ifb device whose queue delays, duplicates, drops or limits them.

The hop's rules select the packets. On egress the rules mark them, and tc redirects marked packets (clsact, u32). On
ingress nftables itself forwards them to the device. ifb returns packets to where they came from, behind the hooks that
they have passed (drivers/net/ifb.c, ifb_ri_tasklet), so that the port's own queue and all other packets are unaffected.
This process owns the rules: when it dies, packets take their usual path again at once, and only an unused filter and
device remain to be reverted.

A port of a soft lab always has a clsact, and a port of a Linux switch may have one. Adding or removing a clsact makes
the kernel drop all packets that are passing the port (net/sched/sch_api.c, qdisc_graft).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from typing import Any

from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.command import heartbeat, run
from faultbed.inject.node.inside import inside, ip, unless_gone
from faultbed.inject.node.network.packet_rules import HopActuator
from faultbed.testbed.node.netlink import ECHO, REQUEST, Netlink, attributes

__all__ = ["OWN_CLSACT_PRIO", "REDIRECTION", "SHARED_CLSACT_PRIO", "DetourActuator"]

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
"""The filter that redirects packets with our mark to the detour's device, in tc's syntax."""
OWN_CLSACT_PRIO, SHARED_CLSACT_PRIO = 1, 2
"""Priorities of the filter in a clsact of our own, and in an existing one.

`heal` recognises them: it removes an own clsact as a whole, and only the filter from an existing one.
"""


class DetourActuator(HopActuator):
    """A hop whose selected packets pass the ifb device `via` with the queue discipline `queue`.

    `count` names what counts as a hit: `hits` of the rule, or `drops` or `overlimits` of the queue. `drain_s` is how
    long the last packet may stay in the queue.
    """

    uses_set_up = True

    def __init__(self, *, via: str, mark: int, queue: str, count: str, drain_s: float, **hop: Any) -> None:
        super().__init__(**hop)
        self._via, self._mark, self._queue, self._counted, self._drain_s = via, mark, queue, count, drain_s
        self._route: Netlink | None = None
        self._is_set_up = self._shares_clsact = False
        self._past: dict[str, int] = {}
        self._options = b""

    def prepare(self) -> dict[str, Any]:
        """Refuse what the hop refuses, a port with a foreign filter, and a leftover device."""
        if " seed " in self._queue and _kernel() < _SEED_SINCE:
            raise Refused(
                f"netem of Linux {os.uname().release} has no seed, so its draws cannot be repeated; use Linux 6.6 "
                "or later, or remove burst and jitter"
            )
        # Without this the module would create two more devices (drivers/net/ifb.c, numifbs).
        run(["modprobe", "ifb", "numifbs=0"])
        before = super().prepare()
        self._route = Netlink(socket.NETLINK_ROUTE)
        if self._via in (name for _, name in socket.if_nameindex()):
            raise Refused(f"a device {self._via} already exists, a leftover of a fault; run `faultbed heal`")
        if self._hook == "egress":
            self._shares_clsact = "clsact" in run(["tc", "qdisc", "show", "dev", self._device])
            if self._shares_clsact and run(["tc", "filter", "show", "dev", self._device, "egress"]).strip():
                raise Refused(
                    f"{self._device} has an egress filter, perhaps another fault's detour; end that fault, or run "
                    "`faultbed heal`"
                )
        return before

    def revert_script(self) -> str:
        """Return a script that removes rules, redirection and device, whichever of them exist."""
        at, link = inside(self._netns), f"{ip(self._netns)} link"
        path = f"{link} del {self._via} 2>/dev/null; ! {link} show {self._via} >/dev/null 2>&1"
        if self._hook == "egress":
            # `prepare` refuses a port with a filter, so that an empty list is the previous state.
            none = f'[ -z "$({at}tc filter show dev {self._device} egress 2>/dev/null)" ]'
            path = f"{at}tc {self._without_redirection()} 2>/dev/null; {path} && {none}"
        return f"{super().revert_script()} && {{ {unless_gone(self._netns, path)}; }}"

    def set_up(self) -> None:
        """Create device, queue and redirection, which no packet takes yet: a busy switch needs seconds for that."""
        self._is_set_up = True
        run(["ip", "link", "add", self._via, "up", "type", "ifb"])
        lines = [f"qdisc add dev {self._via} root {self._queue}"]
        if self._hook == "egress":
            prio = SHARED_CLSACT_PRIO if self._shares_clsact else OWN_CLSACT_PRIO
            lines += [] if self._shares_clsact else [f"qdisc add dev {self._device} clsact"]
            redirection = REDIRECTION.format(prio=prio, mark=self._mark, via=self._via)
            lines += [f"filter add dev {self._device} egress {redirection}"]
        run(["tc", "-batch", "-"], stdin="\n".join(lines) + "\n")
        self._options = self._root().get(_TCA_OPTIONS, b"")

    def on(self) -> None:
        """Add the rule that sends packets on the detour."""
        if not self._is_set_up:
            self.set_up()
        super().on()

    def off(self) -> None:
        """Remove the rule, wait until the queue is empty (`drain_s` at most), then remove redirection and device."""
        super().off()
        if not self._is_set_up:
            return
        deadline = time.monotonic() + self._drain_s + 0.5
        while self._stats().get("qlen") and time.monotonic() < deadline:
            heartbeat()
            time.sleep(0.005)
        for name, value in self._stats().items():
            self._past[name] = self._past.get(name, 0) + value
        if self._hook == "egress":
            run(["tc", *self._without_redirection().split()])
        run(["ip", "link", "del", self._via])
        self._is_set_up = False

    def read(self) -> dict[str, Any]:
        """Report the hop's state, and the queue's kind and statistics from the kernel."""
        state = super().read()
        now = self._stats() if self._is_set_up else {}
        exists = self._via in (name for _, name in socket.if_nameindex())
        state |= {"via": self._via, "queue": self._kind() if exists else None}
        if " seed " in self._queue:
            state["queue_seed"] = self._seed() if exists else None
        state |= {
            f"queue_{name}": value + self._past.get(name, 0)
            for name, value in (now or dict.fromkeys(self._past, 0)).items()
        }
        if self._has_table:
            state["applied"] = bool(state["applied"] and state["queue"] == self._queue.partition(" ")[0])
        elif exists:
            state["applied"] = True
        return state

    def is_lost(self) -> bool:
        """Return whether rule, queue or redirection are gone, or the queue's parameters were changed."""
        if not self.read()["applied"] or self._root().get(_TCA_OPTIONS, b"") != self._options:
            return True
        return self._hook == "egress" and self._via not in run(["tc", "filter", "show", "dev", self._device, "egress"])

    def hits(self) -> int:
        """Return the number of packets sent on the detour, or of the queue's drops or overlimits (`count`)."""
        if self._counted == "hits":
            return super().hits()
        now = self._stats().get(self._counted, 0) if self._is_set_up else 0
        return self._past.get(self._counted, 0) + now

    def passed(self) -> int | None:
        """Return the hop's `passed` if the rule counts the hits; None if the queue does."""
        return super().passed() if self._counted == "hits" else None

    def close(self) -> None:
        super().close()
        if self._route is not None:
            self._route.close()

    def _without_redirection(self) -> str:
        """Return the arguments of tc that remove the redirection."""
        if self._shares_clsact:
            return f"filter del dev {self._device} egress protocol ip prio {SHARED_CLSACT_PRIO}"
        return f"qdisc del dev {self._device} clsact"

    def _stats(self) -> dict[str, int]:
        stats = attributes(self._root().get(_TCA_STATS2, b""))
        basic, queue = stats.get(_STATS_BASIC, b""), stats.get(_STATS_QUEUE, b"")
        if not basic or not queue:
            return {}
        _bytes, packets = struct.unpack_from("=QI", basic)
        qlen, _backlog, drops, _requeues, overlimits = struct.unpack_from("=5I", queue)
        return {"packets": packets, "qlen": qlen, "drops": drops, "overlimits": overlimits}

    def _kind(self) -> str:
        return self._root().get(_TCA_KIND, b"").rstrip(b"\0").decode()

    def _seed(self) -> int | None:
        """Return the seed of the netem queue from the kernel."""
        options = attributes(self._root().get(_TCA_OPTIONS, b"")[_NETEM_OPTIONS_BYTES:])
        seed = options.get(_TCA_NETEM_PRNG_SEED)
        return int.from_bytes(seed, sys.byteorder) if seed else None

    def _root(self) -> dict[int, bytes]:
        if self._route is None:
            return {}
        request = _TCMSG.pack(socket.AF_UNSPEC, socket.if_nametoindex(self._via), 0, _TC_H_ROOT, 0)
        return attributes(self._route.request(_RTM_GETQDISC, request, flags=REQUEST | ECHO)[_TCMSG.size :])


def _kernel() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers)
