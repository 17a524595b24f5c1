"""Packets lost, marked or broken in a switch namespace: an nftables table that this process owns.

With `flags owner` the kernel removes the table when the netlink socket that made it is closed, however the process ends
(net/netfilter/nf_tables_api.c, nft_rcv_nl_event), and nobody else can change it meanwhile.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from inject.node.actuator import Refused, enter_netns
from inject.node.inside import inside, unless_gone
from inject.node.management import management_interfaces
from testbed.node.netlink import Netlink, attribute, attributes

__all__ = ["HopActuator", "psn_of"]


# linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
_NETLINK_NETFILTER = 12
_GETOBJ = (10 << 8) | 19
_NFPROTO_NETDEV = 5
_OBJ_TABLE, _OBJ_NAME, _OBJ_TYPE, _OBJ_DATA = 1, 2, 3, 4
_OBJECT_COUNTER, _COUNTER_PACKETS = 1, 2


_ETH_P_ALL = 3  # linux/if_ether.h: what goes out is seen by nobody who asks for less
_HEADERS = 128
_PASSING_S = 3.0
_TRIES = 6
_ROCE_PORT, _UDP = 4791, 17
_PSN_MASK, _HALF = 0xFFFFFF, 1 << 23


def psn_of(frame: bytes, qp: int) -> int | None:
    """The PSN of an Ethernet frame with a RoCEv2 request to a QP; None: it is something else.

    Responses and acknowledgements (opcodes 0x0d to 0x11, InfiniBand 9.2.1) count in the PSNs of the other direction.
    """
    if frame[12:14] != b"\x08\x00" or frame[23] != _UDP:
        return None
    udp = 14 + 4 * (frame[14] & 15)
    bth = udp + 8
    if int.from_bytes(frame[udp + 2 : udp + 4], "big") != _ROCE_PORT or len(frame) < bth + 12:
        return None
    if 0x0D <= frame[bth] & 0x1F <= 0x11 or int.from_bytes(frame[bth + 5 : bth + 8], "big") != qp:  # noqa: PLR2004
        return None
    return int.from_bytes(frame[bth + 9 : bth + 12], "big")


class HopActuator:
    """Owns one table with one chain `hop` at `hook` of `device`, and one counter `hits` that is the truth.

    A rule that takes a share of what passes has a second one, `passed`: the packets that the share is taken of.
    """

    poll_s = 0.02

    def __init__(self, *, netns: str | None, device: str, hook: str, table: str, ruleset: str) -> None:
        self._netns, self._device, self._hook, self._table = netns, device, hook, table
        self._ruleset = ruleset
        # To look at what passes, twice for each try.
        self.patience_s = 2 * _PASSING_S if "@psn@" in ruleset else 0.0
        self._before = self._passed_before = 0
        self._has_passed = "counter passed " in ruleset
        self._there = False
        self._qp: int | None = None
        self._ahead: int | None = None
        self._psn: int | None = None
        self._nft: Any = None
        self._counters: Netlink | None = None
        self._alive: Callable[[], None] = lambda: None

    def wait_with(self, alive: Callable[[], None]) -> None:
        """Call `alive` now and then while a way is laid: a switch that forwards all day takes seconds for a command."""
        self._alive = alive

    def prepare(self) -> dict[str, Any]:
        """Load libnftables in the namespace and have the kernel check the rules without keeping them."""
        enter_netns(self._netns)
        if self._netns is None and self._device in management_interfaces():
            raise Refused(f"{self._device} carries the management connection: never a target")
        try:
            import nftables  # noqa: PLC0415 - the distribution's, and only needed here
        except ImportError:
            raise Refused("Python has no nftables here: install python3-nftables") from None

        self._nft = nftables.Nftables()
        self._nft.set_json_output(val=True)
        self._counters = Netlink(_NETLINK_NETFILTER)
        foreign = [table for table in self._tables() if table["name"] == self._table]
        if foreign:
            raise Refused(f"a table {self._table} is already there: a leftover? run `faultbed heal`")
        self._nft.set_dry_run(True)
        try:
            # A device that is made later cannot be named yet.
            rules = re.sub(r'fwd to "[^"]*"', "accept", self._ruleset)
            self._command(rules.replace("@psn@", "0").replace("@qp@", "1"))
        finally:
            self._nft.set_dry_run(False)
        return self.read()

    def aim(self, *, qp: int | None, psn: int | None, ahead: int | None) -> None:
        """Fill in what was only known just before arming; a PSN `ahead` of what passes is for `on` to find out."""
        for name, value in (("@qp@", qp), ("@psn@", psn)):
            if name not in self._ruleset or (name == "@psn@" and ahead is not None and qp is not None):
                continue
            if value is None:
                raise Refused(f"the rule waits for {name.strip('@')} and was armed without it")
            self._ruleset = self._ruleset.replace(name, str(value))
        self._qp, self._ahead = qp, ahead

    def revert_script(self) -> str:
        """Nothing to do in most cases: the socket's end has removed the table. Checked all the same."""
        nft, one = f"{inside(self._netns)}nft", f"netdev {self._table}"
        return unless_gone(
            self._netns, f"{nft} delete table {one} 2>/dev/null; ! {nft} list table {one} >/dev/null 2>&1"
        )

    def on(self) -> None:
        """Add table, counter, chain and rule in one transaction; aimed at a PSN that has not passed yet."""
        if "@psn@" not in self._ruleset or self._qp is None or self._ahead is None:
            self._put(self._ruleset)
            return
        lead, seen = self._ahead, self._passing(self._qp)
        for _ in range(_TRIES):
            self._psn = (seen + lead) & _PSN_MASK
            self._put(self._ruleset.replace("@psn@", str(self._psn)))
            now = self._passing(self._qp)
            # What the rule drops does not come here (net/core/dev.c, __dev_queue_xmit: egress hooks before taps).
            if 0 < (self._psn - now) & _PSN_MASK < _HALF or self._counter():
                return
            # It had passed while the rule was being made: that takes so many packets here.
            lead = self._ahead + 2 * ((now - seen) & _PSN_MASK)
            self._take_away()
            seen = self._passing(self._qp)
        raise Refused(f"PSNs of QP {self._qp} pass faster than a rule is made: aim farther ahead than {self._ahead}")

    def _put(self, ruleset: str) -> None:
        self._command(ruleset)
        self._there = True

    def _passing(self, qp: int) -> int:
        """The PSN of a request to a QP that passes now."""
        outgoing = self._hook == "egress"
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as tap:
            tap.bind((self._device, _ETH_P_ALL))
            deadline = time.monotonic() + _PASSING_S
            while (left_s := deadline - time.monotonic()) > 0:
                if not select.select([tap], [], [], left_s)[0]:
                    break
                frame, (_, _, kind, *_) = tap.recvfrom(_HEADERS)
                psn = psn_of(frame, qp) if (kind == socket.PACKET_OUTGOING) is outgoing else None
                if psn is not None:
                    return psn
        raise Refused(f"no request to QP {qp} has passed {self._device} in {_PASSING_S:g} s: does the workload run?")

    def off(self) -> None:
        """Take the rule away first, so that the counter is final when it is read, then the table."""
        if self._there:
            self._take_away()

    def _take_away(self) -> None:
        self._command(f"flush chain netdev {self._table} hop")
        self._before += self._counter()
        self._passed_before += self._counter("passed") if self._has_passed else 0
        self._there = False
        self._command(f"delete table netdev {self._table}")

    def read(self) -> dict[str, Any]:
        """Whether the table is there, owned, and where it is hooked."""
        mine = [table for table in self._tables() if table["name"] == self._table]
        seen: dict[str, Any] = {"applied": bool(mine), "table": self._table}
        if self._psn is not None:
            seen["psn"] = self._psn
        if mine:
            flags = mine[0].get("flags", [])
            listed = self._command(f"list chain netdev {self._table} hop")
            chain: dict[str, Any] = next((x["chain"] for x in listed if "chain" in x), {})
            rules = sum("rule" in x for x in listed)
            seen |= {
                "owner": "owner" in flags,
                "device": chain.get("dev"),
                "hook": chain.get("hook"),
                "rules": rules,
            }
            hooked = seen["device"] in (self._device, [self._device]) and seen["hook"] == self._hook
            seen["applied"] = bool(seen["owner"] and hooked and rules == 1)
        return seen

    def hits(self) -> int:
        """Packets that the rule has hit so far."""
        return self._before + (self._counter() if self._there else 0)

    def passed(self) -> int | None:
        """Packets that the rule has chosen its share of so far; None: it chooses no share."""
        if not self._has_passed:
            return None
        return self._passed_before + (self._counter("passed") if self._there else 0)

    def close(self) -> None:
        """Close libnftables' socket; a table that is still there goes with it."""
        self._nft = None
        if self._counters is not None:
            self._counters.close()

    def _counter(self, name: str = "hits") -> int:
        # Asked many times a second on a switch that forwards: two system calls instead of libnftables and JSON.
        if self._counters is None:
            return 0
        wanted = (
            struct.pack(">BBH", _NFPROTO_NETDEV, 0, 0)
            + attribute(_OBJ_TABLE, self._table.encode() + b"\0")
            + attribute(_OBJ_NAME, name.encode() + b"\0")
            + attribute(_OBJ_TYPE, struct.pack(">I", _OBJECT_COUNTER))
        )
        found = attributes(self._counters.ask(_GETOBJ, wanted)[4:])
        return int.from_bytes(attributes(found[_OBJ_DATA])[_COUNTER_PACKETS], "big")

    def _tables(self) -> list[dict[str, Any]]:
        return [x["table"] for x in self._command("list tables netdev") if "table" in x]

    def _command(self, text: str) -> list[dict[str, Any]]:
        code, out, error = self._nft.cmd(text)
        if code:
            raise OSError(f"nft refused: {' '.join(str(error).split())[:300]}")
        listed: list[dict[str, Any]] = json.loads(out)["nftables"] if out else []
        return listed
