"""Packets dropped, marked or corrupted in a switch namespace, by an nftables table that this process owns.

With `flags owner` the kernel removes the table when the netlink socket that made it is closed, however the process ends
(net/netfilter/nf_tables_api.c, nft_rcv_nl_event), and no other process can change it meanwhile.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.inside import inside, unless_gone
from faultbed.inject.node.management import management_interfaces
from faultbed.testbed.node.netlink import Netlink, attribute, attributes

__all__ = ["HopActuator", "psn_of"]


# linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
_NETLINK_NETFILTER = 12
_GETOBJ = (10 << 8) | 19
_NFPROTO_NETDEV = 5
_OBJ_TABLE, _OBJ_NAME, _OBJ_TYPE, _OBJ_DATA = 1, 2, 3, 4
_OBJECT_COUNTER, _COUNTER_PACKETS = 1, 2


_ETH_P_ALL = 3  # linux/if_ether.h: sockets for a single protocol do not see outgoing packets
_HEADERS = 128
_PASSING_S = 3.0
_TRIES = 6
_ROCE_PORT, _UDP = 4791, 17
_PSN_MASK, _HALF = 0xFFFFFF, 1 << 23


def psn_of(frame: bytes, qp: int) -> int | None:
    """Return the PSN of an Ethernet frame with a RoCEv2 request to a QP; None: it is something else.

    Responses and acknowledgements (opcodes 0x0d to 0x11, InfiniBand 9.2.1) carry PSNs of the other direction.
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


class HopActuator(Actuator):
    """Owns one nftables table with a chain `hop` at `hook` of `device`, and a counter `hits`.

    If the rule takes a share of packets, a second counter, `passed`, counts the packets from which it takes them.
    """

    poll_s = 0.02

    def __init__(self, *, netns: str | None, device: str, hook: str, table: str, ruleset: str) -> None:
        self._netns, self._device, self._hook, self._table = netns, device, hook, table
        self._ruleset = ruleset
        # `on` waits for a passing packet twice in each attempt.
        self.patience_s = 2 * _PASSING_S if "@psn@" in ruleset else 0.0
        self._before = self._passed_before = 0
        self._has_passed = "counter passed " in ruleset
        self._has_table = False
        self._qp: int | None = None
        self._ahead: int | None = None
        self._psn: int | None = None
        self._nft: Any = None
        self._counters: Netlink | None = None

    def prepare(self) -> dict[str, Any]:
        """Load libnftables in the namespace, and let the kernel check the rules in a dry run."""
        enter_netns(self._netns)
        if self._netns is None and self._device in management_interfaces():
            raise Refused(f"{self._device} carries the management connection and is never a target; choose another")
        try:
            import nftables  # noqa: PLC0415 - the distribution's, and only needed here
        except ImportError:
            raise Refused("Python has no nftables here; install python3-nftables") from None

        self._nft = nftables.Nftables()
        self._nft.set_json_output(val=True)
        self._counters = Netlink(_NETLINK_NETFILTER)
        foreign = [table for table in self._tables() if table["name"] == self._table]
        if foreign:
            raise Refused(f"a table {self._table} already exists, a leftover of a fault; run `faultbed heal`")
        self._nft.set_dry_run(True)
        try:
            # The dry run cannot name a device that is created later.
            rules = re.sub(r'fwd to "[^"]*"', "accept", self._ruleset)
            self._command(rules.replace("@psn@", "0").replace("@qp@", "1"))
        finally:
            self._nft.set_dry_run(False)
        return self.read()

    def bind(self, *, qp: int | None, psn: int | None, ahead: int | None) -> None:
        """Fill in QP and PSN. A PSN that is `ahead` of the current one is determined in `on`."""
        for name, value in (("@qp@", qp), ("@psn@", psn)):
            if name not in self._ruleset or (name == "@psn@" and ahead is not None and qp is not None):
                continue
            if value is None:
                raise Refused(f"the rule needs {name.strip('@')}, and was armed without it")
            self._ruleset = self._ruleset.replace(name, str(value))
        self._qp, self._ahead = qp, ahead

    def revert_script(self) -> str:
        """Return a script that removes the table, if closing the socket has not removed it already."""
        nft, table = f"{inside(self._netns)}nft", f"netdev {self._table}"
        return unless_gone(
            self._netns, f"{nft} delete table {table} 2>/dev/null; ! {nft} list table {table} >/dev/null 2>&1"
        )

    def on(self) -> None:
        """Add table, counter, chain and rule in one transaction, for a PSN that has not passed yet."""
        if "@psn@" not in self._ruleset or self._qp is None or self._ahead is None:
            self._load_ruleset(self._ruleset)
            return
        lead, current_psn = self._ahead, self._passing(self._qp)
        for _ in range(_TRIES):
            self._psn = (current_psn + lead) & _PSN_MASK
            self._load_ruleset(self._ruleset.replace("@psn@", str(self._psn)))
            now = self._passing(self._qp)
            # A packet that the rule drops does not get here (net/core/dev.c, __dev_queue_xmit: egress hooks before
            # taps).
            if 0 < (self._psn - now) & _PSN_MASK < _HALF or self._counter():
                return
            # The PSN passed while the rule was being added: increase the lead by what passes in that time.
            lead = self._ahead + 2 * ((now - current_psn) & _PSN_MASK)
            self._remove_table()
            current_psn = self._passing(self._qp)
        raise Refused(f"PSNs of QP {self._qp} pass faster than a rule can be added; use a psn beyond +{self._ahead}")

    def _load_ruleset(self, ruleset: str) -> None:
        self._command(ruleset)
        self._has_table = True

    def _passing(self, qp: int) -> int:
        """Return the PSN of the next request to a QP that passes."""
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
        raise Refused(f"no request to QP {qp} passed {self._device} in {_PASSING_S:g} s; start the workload first")

    def off(self) -> None:
        """Remove the rule first, so that the counter is final when it is read, then the table."""
        if self._has_table:
            self._remove_table()

    def _remove_table(self) -> None:
        self._command(f"flush chain netdev {self._table} hop")
        self._before += self._counter()
        self._passed_before += self._counter("passed") if self._has_passed else 0
        self._has_table = False
        self._command(f"delete table netdev {self._table}")

    def read(self) -> dict[str, Any]:
        """Report whether the table exists, whether this process owns it, and where its chain is hooked."""
        own = [table for table in self._tables() if table["name"] == self._table]
        state: dict[str, Any] = {"applied": bool(own), "table": self._table}
        if self._psn is not None:
            state["psn"] = self._psn
        if own:
            flags = own[0].get("flags", [])
            listed = self._command(f"list chain netdev {self._table} hop")
            chain: dict[str, Any] = next((x["chain"] for x in listed if "chain" in x), {})
            rules = sum("rule" in x for x in listed)
            state |= {
                "owner": "owner" in flags,
                "device": chain.get("dev"),
                "hook": chain.get("hook"),
                "rules": rules,
            }
            is_hooked = state["device"] in (self._device, [self._device]) and state["hook"] == self._hook
            state["applied"] = bool(state["owner"] and is_hooked and rules == 1)
        return state

    def hits(self) -> int:
        """Return the packets that the rule has hit so far."""
        return self._before + (self._counter() if self._has_table else 0)

    def passed(self) -> int | None:
        """Return the packets of which the rule has taken its share so far; None: it takes no share."""
        if not self._has_passed:
            return None
        return self._passed_before + (self._counter("passed") if self._has_table else 0)

    def close(self) -> None:
        """Close libnftables' socket, which also removes a table that still exists."""
        self._nft = None
        if self._counters is not None:
            self._counters.close()

    def _counter(self, name: str = "hits") -> int:
        # Called many times a second on a busy switch: two system calls instead of libnftables and JSON.
        if self._counters is None:
            return 0
        request = (
            struct.pack(">BBH", _NFPROTO_NETDEV, 0, 0)
            + attribute(_OBJ_TABLE, self._table.encode() + b"\0")
            + attribute(_OBJ_NAME, name.encode() + b"\0")
            + attribute(_OBJ_TYPE, struct.pack(">I", _OBJECT_COUNTER))
        )
        counter = attributes(self._counters.request(_GETOBJ, request)[4:])
        return int.from_bytes(attributes(counter[_OBJ_DATA])[_COUNTER_PACKETS], "big")

    def _tables(self) -> list[dict[str, Any]]:
        return [x["table"] for x in self._command("list tables netdev") if "table" in x]

    def _command(self, text: str) -> list[dict[str, Any]]:
        code, out, error = self._nft.cmd(text)
        if code:
            raise OSError(f"nft refused: {' '.join(str(error).split())[:300]}")
        listed: list[dict[str, Any]] = json.loads(out)["nftables"] if out else []
        return listed
