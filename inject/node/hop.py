"""Packets lost, marked or broken in a switch namespace: an nftables table that this process owns.

With `flags owner` the kernel removes the table when the netlink socket that made it is closed, however the process ends
(net/netfilter/nf_tables_api.c, nft_rcv_nl_event), and nobody else can change it meanwhile.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from inject.node.actuator import Refused, enter_netns
from testbed.onnode.netlink import Netlink, attribute, attributes

__all__ = ["HopActuator"]


# linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
_NETLINK_NETFILTER = 12
_GETOBJ = (10 << 8) | 19
_NFPROTO_NETDEV = 5
_OBJ_TABLE, _OBJ_NAME, _OBJ_TYPE, _OBJ_DATA = 1, 2, 3, 4
_OBJECT_COUNTER, _COUNTER_PACKETS = 1, 2


class HopActuator:
    """Owns one table with one chain `hop` at `hook` of `device`, and one counter `hits` that is the truth."""

    poll_s = 0.02

    def __init__(self, *, netns: str | None, device: str, hook: str, table: str, ruleset: str) -> None:
        self._netns, self._device, self._hook, self._table = netns, device, hook, table
        self._ruleset = ruleset
        self._before = 0
        self._there = False
        self._nft: Any = None
        self._counters: Netlink | None = None

    def prepare(self) -> dict[str, Any]:
        """Load libnftables in the namespace and have the kernel check the rules without keeping them."""
        enter_netns(self._netns)
        import nftables  # noqa: PLC0415 - the distribution's, and only needed here

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

    def aim(self, *, qp: int | None, psn: int | None) -> None:
        """Fill in what was only known just before arming."""
        for name, value in (("@qp@", qp), ("@psn@", psn)):
            if name in self._ruleset:
                if value is None:
                    raise Refused(f"the rule waits for {name.strip('@')} and was armed without it")
                self._ruleset = self._ruleset.replace(name, str(value))

    def revert_script(self) -> str:
        """Nothing to do in most cases: the socket's end has removed the table. Checked all the same."""
        if self._netns is None:
            there, inside = "", ""
        else:
            there, inside = f"[ ! -e /run/netns/{self._netns} ] || ", f"ip netns exec {self._netns} "
        one = f"netdev {self._table}"
        return (
            f"{there}{{ {inside}nft delete table {one} 2>/dev/null; ! {inside}nft list table {one} >/dev/null 2>&1; }}"
        )

    def on(self) -> None:
        """Add table, counter, chain and rule in one transaction."""
        self._command(self._ruleset)
        self._there = True

    def off(self) -> None:
        """Take the rule away first, so that the counter is final when it is read, then the table."""
        if not self._there:
            return
        self._command(f"flush chain netdev {self._table} hop")
        self._before += self._counter()
        self._there = False
        self._command(f"delete table netdev {self._table}")

    def read(self) -> dict[str, Any]:
        """Whether the table is there, owned, and where it is hooked."""
        mine = [table for table in self._tables() if table["name"] == self._table]
        seen: dict[str, Any] = {"applied": bool(mine), "table": self._table}
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

    def close(self) -> None:
        """Close libnftables' socket; a table that is still there goes with it."""
        self._nft = None
        if self._counters is not None:
            self._counters.close()

    def _counter(self) -> int:
        # Asked many times a second on a switch that forwards: two system calls instead of libnftables and JSON.
        if self._counters is None:
            return 0
        wanted = (
            struct.pack(">BBH", _NFPROTO_NETDEV, 0, 0)
            + attribute(_OBJ_TABLE, self._table.encode() + b"\0")
            + attribute(_OBJ_NAME, b"hits\0")
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
