"""Numbers that routing schemes own on a switch. Anything in these ranges that is not of `PROTOCOL` is foreign.

`congestion.hash-collision` has another rule priority, so that its fault acts under every scheme.
"""

from __future__ import annotations

__all__ = [
    "GROUP",
    "LAST_TABLE",
    "NEXT_HOP",
    "NFT_PREFIX",
    "NFT_TABLE",
    "PRIORITY",
    "PROTOCOL",
    "SHARED_TABLE",
    "STEER_PRIORITY",
    "STEER_TABLE",
    "TABLE",
]

PRIORITY = 1000
"""Priority of every rule of a scheme."""
STEER_PRIORITY, STEER_TABLE = 900, 251
"""Priority and table of the policy rule with which `congestion.hash-collision` sends everything out of one uplink."""
TABLE, LAST_TABLE = 1000, 1999
SHARED_TABLE = TABLE
"""The table of schemes with weights or resilient groups. The table of the n-th port (from 0) is `TABLE` + 1 + n."""
PROTOCOL = 251
"""Originator of routes, rules and next hops (rtm_protocol): no routing daemon in linux/rtnetlink.h has this number."""
NEXT_HOP, GROUP = 1_000_000, 1_001_000
"""First id of next hops and of next-hop groups. FRR numbers its own from 1."""
NFT_TABLE = "faultbed_routing"
NFT_PREFIX = "faultbed_"
"""How the name of each nftables table of faultbed begins, also of those of faults."""
