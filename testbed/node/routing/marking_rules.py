"""nftables rules by which a scheme marks packets on one switch: loaded, listed with what they marked, and removed.

Each call runs the program nft in the switch's namespace; its output is JSON (libnftables-json(5)).
"""

from __future__ import annotations

import json

from faultbed.testbed.node import netns
from faultbed.testbed.node.netlink import attributes, notifications
from faultbed.testbed.node.routing.owned_numbers import NFT_PREFIX, NFT_TABLE

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "concerns_marks",
    "delete_marks",
    "foreign_tables",
    "install_marks",
    "mark_rules",
    "marked_packets",
    "read_marks",
]

_NFT_S = 10.0
"""Shorter than the timeout of the holder's watchdog, which gets no heartbeat while nft runs."""
# linux/netfilter/nf_tables.h. Attribute 1 of each message is the name of its table, except in NFT_MSG_NEWGEN.
_NEW_GENERATION, _NFGENMSG_BYTES, _TABLE_NAME = 15, 4, 1
_CHAIN = "table ip {table} {{\n chain choose {{\n  type filter hook prerouting priority mangle;\n{lines}\n }}\n}}\n"


def install_marks(namespace: str | None, statements: list[str]) -> None:
    """Load the statements that mark packets into the scheme's own table.

    Raises:
        OSError: nft refused.
    """
    lines = "\n".join(f"  {line}" for line in statements)
    _nft(namespace, ["-f", "-"], stdin=_CHAIN.format(table=NFT_TABLE, lines=lines))


def delete_marks(namespace: str | None) -> None:
    """Delete the scheme's table, which must exist.

    Raises:
        OSError: nft refused.
    """
    _nft(namespace, ["delete", "table", "ip", NFT_TABLE])


def marked_packets(namespace: str | None) -> list[int] | None:
    """Return the number of packets that each nftables statement of the scheme has marked; None: the table is absent.

    Raises:
        TimeoutError: nft did not answer in time.
    """
    marked: list[int] | None = read_marks(namespace)["marked"]
    return marked


def read_marks(namespace: str | None) -> dict[str, Any]:
    """Return what the rules of the scheme's table have marked, and how; each value is None if there is no such table.

    `marked` is the number of packets of each rule with a counter. `draws` has the modulus and the seed (None: none) by
    which each of these rules draws the mark. `mark_rules` are all rules without their counters.

    Raises:
        TimeoutError: nft did not answer in time.
    """
    rules = _listed(namespace)
    if rules is None:
        return {"marked": None, "draws": None, "mark_rules": None}
    counted = [(part["counter"], rule) for rule in rules for part in rule if "counter" in part]
    return {
        "marked": [counter["packets"] for counter, _ in counted],
        "draws": [_draw_of(rule) for _, rule in counted],
        "mark_rules": [_without_counters(rule) for rule in rules],
    }


def mark_rules(namespace: str | None) -> list[Any] | None:
    """Return the scheme's nftables table, chains and rules, without their counters; None: there is no such table.

    A table that is dormant, or a chain at another hook, lists the same rules.
    """
    entries = _entries(namespace)
    if entries is None:
        return None
    frames = [{name: entry[name]} for entry in entries for name in ("table", "chain") if name in entry]
    return [*map(_without_handles, frames), *map(_without_counters, _expressions(entries))]


def foreign_tables(namespace: str | None) -> list[str]:
    """Return family and name of the nftables tables of other programs, whose rules may change marks or drop packets.

    Raises:
        OSError: nft refused.
    """
    listed = json.loads(_nft(namespace, ["-j", "list", "tables"]))["nftables"]
    tables = [entry["table"] for entry in listed if "table" in entry]
    return sorted(f"{table['family']} {table['name']}" for table in tables if not table["name"].startswith(NFT_PREFIX))


def concerns_marks(datagram: bytes) -> bool:
    """Return whether a notification of nftables is about the scheme's own table, or about one of another program."""
    for kind, _, body in notifications(datagram):
        if kind & 0xFF != _NEW_GENERATION:
            table = attributes(body[_NFGENMSG_BYTES:]).get(_TABLE_NAME, b"").rstrip(b"\0").decode(errors="replace")
            if table == NFT_TABLE or not table.startswith(NFT_PREFIX):
                return True
    return False


def _without_counters(rule: list[Any]) -> list[Any]:
    return [_canonical(part) for part in rule if "counter" not in part]


def _without_handles(entry: dict[str, Any]) -> Any:
    """Return a table or a chain without the number that nft gives it, which a loaded listing does not keep."""
    return {
        kind: {name: _canonical(value) for name, value in fields.items() if name != "handle"}
        for kind, fields in entry.items()
    }


def _canonical(node: Any) -> Any:
    """Return an expression of nft's JSON without what differs if the same rule is loaded again.

    The order of a set's elements depends on a random seed. A set with one element becomes a plain value if nft loads
    its own listing.
    """
    if isinstance(node, dict):
        elements = node.get("set")
        if isinstance(elements, list):
            ordered = sorted(map(_canonical, elements), key=json.dumps)
            return ordered[0] if len(ordered) == 1 else ordered
        return {name: _canonical(value) for name, value in node.items()}
    return [_canonical(each) for each in node] if isinstance(node, list) else node


def _listed(namespace: str | None) -> list[Any] | None:
    """Return the expressions of each rule of the scheme's nftables table; None: there is no such table.

    Raises:
        TimeoutError: nft did not answer in time.
    """
    entries = _entries(namespace)
    return None if entries is None else _expressions(entries)


def _expressions(entries: list[Any]) -> list[Any]:
    return [entry["rule"]["expr"] for entry in entries if "rule" in entry]


def _entries(namespace: str | None) -> list[Any] | None:
    """Return nft's list of the scheme's table, its chains and its rules; None: there is no such table.

    Raises:
        TimeoutError: nft did not answer in time.
    """
    try:
        entries: list[Any] = json.loads(_nft(namespace, ["-j", "list", "table", "ip", NFT_TABLE]))["nftables"]
    except TimeoutError:  # this says nothing about the table
        raise
    except OSError:
        return None
    return entries


def _draw_of(rule: Any) -> list[int | None]:
    """Return [modulus, seed or None] of the `jhash` or `numgen` in a rule of nft's JSON; without one [None, None].

    Format: libnftables-json(5).
    """
    pending = [rule]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if draw := node.get("jhash") or node.get("numgen"):
                return [draw.get("mod"), draw.get("seed")]
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return [None, None]


def _nft(namespace: str | None, words: list[str], *, stdin: str = "") -> str:
    """Run nft in a namespace.

    Raises:
        OSError: nft is not installed, refused, or did not end in time.
    """
    import subprocess  # noqa: PLC0415 - only for nft: it is a tenth of what the watcher imports

    netns.enter(namespace)
    try:
        done = subprocess.run(["nft", *words], input=stdin, capture_output=True, text=True, check=False, timeout=_NFT_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`nft {' '.join(words)}` did not end within {_NFT_S:g} s") from None
    finally:
        netns.enter(None)
    if done.returncode:
        raise OSError(f"`nft {' '.join(words)}`: {' '.join(done.stderr.split())[:300]}")
    return done.stdout
