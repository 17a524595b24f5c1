"""Routes, rules and next hops of the namespace that this process is in, by rtnetlink.

Formats: linux/rtnetlink.h, linux/fib_rules.h, linux/nexthop.h. Only IPv4 routes and rules are read; their gateways may
be IPv6 (BGP unnumbered, RFC 8950).
"""

from __future__ import annotations

import socket
import struct
import sys

from faultbed.testbed.node.netlink import ACK, REQUEST, RTA_MULTIPATH, Netlink, attribute, attributes, next_hops
from faultbed.testbed.node.routing.owned_numbers import LAST_TABLE, NEXT_HOP, PROTOCOL, TABLE

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    RuleKey = tuple[int, int, str | None, int, str, tuple[tuple[str, bytes], ...]]

__all__ = [
    "LOCAL",
    "MAIN",
    "Hop",
    "Kernel",
    "Neighbour",
    "NextHopObject",
    "Route",
    "Rule",
    "is_of_main",
    "is_of_scheme",
    "neighbour_of",
]

MAIN, LOCAL = 254, 255
"""Tables of the kernel; it looks at the local one before all rules of other programs."""
_CREATE, _REPLACE = 0x400, 0x100
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_NEWRULE, _DELRULE, _GETRULE = 32, 33, 34
_NEWNEXTHOP, _DELNEXTHOP, _GETNEXTHOP = 104, 105, 106
_UNICAST, _TO_TABLE, _RESILIENT = 1, 1, 1
_RTMSG, _RULE, _NHMSG = struct.Struct("=8BI"), struct.Struct("=8BI"), struct.Struct("=4BI")
_DST, _OIF, _GATEWAY, _TABLE, _VIA, _NH_ID = 1, 4, 5, 15, 18, 30
_RULE_DST, _RULE_INTERFACE, _RULE_PRIORITY, _RULE_MARK = 1, 3, 6, 10
_RULE_TABLE, _RULE_MASK, _RULE_PROTOCOL = 15, 16, 21
_RULE_SUPPRESS = 14
_RULE_COMPARED = {_RULE_DST, _RULE_INTERFACE, _RULE_PRIORITY, _RULE_MARK, _RULE_TABLE, _RULE_PROTOCOL}
_INVERTED, _ANY_MASK = 2, 0xFFFFFFFF
_ID, _GROUP, _GROUP_TYPE, _NHA_OIF, _NHA_GATEWAY, _RESILIENT_GROUP = 1, 2, 3, 5, 6, 12
_BUCKETS, _IDLE, _UNBALANCED = 1, 2, 3
_MEMBER = struct.Struct("=IBBH")
_NEXT_HOP = struct.Struct("=HBBi")
_NDMSG = struct.Struct("=BxxxiHBB")
_NDA_DST, _NDA_LLADDR = 1, 2
_DEAD, _ONLINK, _LINKDOWN = 1, 4, 16
_KEPT = _ONLINK


class Hop:
    """A next hop: interface index, gateway (family and address; empty: the destination is on the link), flags."""

    def __init__(self, index: int, family: int, gateway: bytes, flags: int = 0, weight: int = 1) -> None:
        self.index, self.family, self.gateway = index, family, gateway
        self.flags, self.weight = flags & _KEPT, weight
        self.is_usable = not flags & (_DEAD | _LINKDOWN)

    @property
    def key(self) -> tuple[int, int, bytes, int, int]:
        """Key for comparison: two next hops are equal if their keys are."""
        return self.index, self.family, self.gateway, self.flags, self.weight


class Route:
    """A route of a table: its next hops, or the next-hop group that it uses."""

    def __init__(self, table: int, prefix: str, protocol: int, hops: Sequence[Hop], group: int = 0) -> None:
        self.table, self.prefix, self.protocol, self.hops, self.group = table, prefix, protocol, hops, group


class Rule:
    """A policy rule: the table to look up, for packets to a prefix (None: any) with a mark (0: any).

    `interface` is the port at which the packets arrive; empty: any. `others` is what else limits or changes the rule,
    such as a port of UDP or an action that is not a lookup; rules of schemes have none of it.
    """

    def __init__(
        self,
        priority: int,
        table: int,
        prefix: str | None,
        mark: int,
        interface: str = "",
        protocol: int = PROTOCOL,
        others: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        self.priority, self.table, self.prefix, self.mark, self.protocol = priority, table, prefix, mark, protocol
        self.interface, self.others = interface, others

    @property
    def key(self) -> RuleKey:
        """Key for comparison: two rules are equal if their keys are."""
        return self.priority, self.table, self.prefix, self.mark, self.interface, self.others


class NextHopObject:
    """A next-hop object (ip-nexthop(8)): a group with `members`, or a single `hop`. `buckets` is 0 unless resilient."""

    def __init__(self, id_: int, protocol: int, members: tuple[int, ...], hop: Hop | None, buckets: int) -> None:
        self.id, self.protocol, self.members, self.hop, self.buckets = id_, protocol, members, hop, buckets

    @property
    def key(self) -> tuple[object, ...]:
        """Key for comparison: two objects are equal if their keys are."""
        return self.members, self.hop.key if self.hop else None


class Neighbour:
    """A neighbour entry: interface index, address and link address (empty: not known), and its state (NUD_*)."""

    def __init__(self, index: int, address: bytes, link_address: bytes, state: int, *, is_deleted: bool) -> None:
        self.index, self.address, self.link_address, self.state = index, address, link_address, state
        self.is_deleted = is_deleted

    @property
    def key(self) -> tuple[int, bytes]:
        """Key of the entry: its interface and its address."""
        return self.index, self.address


class Kernel:
    """One routing socket in the namespace in which it was made."""

    def __init__(self) -> None:
        self._netlink = Netlink(socket.NETLINK_ROUTE)

    @property
    def port_id(self) -> int:
        """Origin of the changes that this object makes, in the kernel's notifications."""
        return self._netlink.port_id

    def routes(self, *, every_kind: bool = False, has_local: bool = False) -> Iterator[Route]:
        """Yield unicast routes of the main table and of those that schemes own.

        `every_kind` includes blackholes, and `has_local` the table of the switch's own addresses.
        """
        for _, body in self._netlink.dump(_GETROUTE, bytes([socket.AF_INET]) + bytes(11)):
            _family, length, _src, _tos, table, protocol, _scope, kind, flags = _RTMSG.unpack_from(body)
            attrs = attributes(body[_RTMSG.size :])
            table = _number(attrs.get(_TABLE), table)
            is_read = table == MAIN or TABLE <= table <= LAST_TABLE or (has_local and table == LOCAL)
            if (kind == _UNICAST or every_kind) and is_read:
                prefix = f"{socket.inet_ntoa(attrs.get(_DST, bytes(4)))}/{length}"
                yield Route(table, prefix, protocol, tuple(_hops(attrs, flags)), _number(attrs.get(_NH_ID)))

    def neighbours(self) -> Iterator[Neighbour]:
        """Yield the neighbour entries of IPv4 and IPv6."""
        for family in (socket.AF_INET, socket.AF_INET6):
            for kind, body in self._netlink.dump(_GETNEIGH, bytes([family]) + bytes(_NDMSG.size - 1)):
                if (neighbour := neighbour_of(kind, body)) is not None:
                    yield neighbour

    def put_route(self, table: int, prefix: str, hops: Sequence[Hop], group: int = 0) -> None:
        """Add a route of ours, or replace it."""
        body = _route(table, prefix, hops[0].flags if len(hops) == 1 and not group else 0)
        if group:
            body += attribute(_NH_ID, _u32(group))
        elif len(hops) == 1:
            body += attribute(_OIF, _u32(hops[0].index)) + _gateway(hops[0])
        else:
            body += attribute(RTA_MULTIPATH, b"".join(map(_next_hop, hops)))
        self._change(_NEWROUTE, body, flags=_CREATE | _REPLACE)

    def remove_route(self, table: int, prefix: str) -> None:
        """Remove a route of ours; a route that is already gone is no error."""
        self._remove(_DELROUTE, _route(table, prefix, 0))

    def rules(self) -> Iterator[Rule]:
        """Yield every rule."""
        for _, body in self._netlink.dump(_GETRULE, bytes([socket.AF_INET]) + bytes(11)):
            _family, length, source, tos, table, _res1, _res2, action, flags = _RULE.unpack_from(body)
            attrs = attributes(body[_RULE.size :])
            prefix = f"{socket.inet_ntoa(attrs[_RULE_DST])}/{length}" if _RULE_DST in attrs else None
            yield Rule(
                _number(attrs.get(_RULE_PRIORITY)),
                _number(attrs.get(_RULE_TABLE), table),
                prefix,
                _number(attrs.get(_RULE_MARK)),
                attrs.get(_RULE_INTERFACE, b"").rstrip(b"\0").decode(),
                _number(attrs.get(_RULE_PROTOCOL)),
                tuple(_others(attrs, source, tos, action, flags)),
            )

    def add_rule(self, rule: Rule) -> None:
        """Add a rule of ours."""
        self._change(_NEWRULE, _rule(rule), flags=_CREATE)

    def remove_rule(self, rule: Rule) -> None:
        """Remove a rule of ours; a rule that is already gone is no error."""
        self._remove(_DELRULE, _rule(rule))

    def next_hop_objects(self) -> Iterator[NextHopObject]:
        """Yield next-hop objects with ids of the range that schemes own."""
        for _, body in self._netlink.dump(_GETNEXTHOP, bytes(_NHMSG.size)):
            family, _scope, protocol, _pad, flags = _NHMSG.unpack_from(body)
            attrs = attributes(body[_NHMSG.size :])
            number = _number(attrs.get(_ID))
            if number < NEXT_HOP:
                continue
            raw = attrs.get(_GROUP, b"")
            members = tuple(_MEMBER.unpack_from(raw, at)[0] for at in range(0, len(raw), _MEMBER.size))
            hop = None if raw else Hop(_number(attrs.get(_NHA_OIF)), family, attrs.get(_NHA_GATEWAY, b""), flags)
            table = attributes(attrs.get(_RESILIENT_GROUP, b""))
            yield NextHopObject(number, protocol, members, hop, int.from_bytes(table.get(_BUCKETS, b""), sys.byteorder))

    def put_next_hop(self, number: int, hop: Hop) -> None:
        """Add a next hop of ours, or replace it."""
        body = _NHMSG.pack(hop.family, 0, PROTOCOL, 0, hop.flags) + attribute(_ID, _u32(number))
        body += attribute(_NHA_OIF, _u32(hop.index)) + attribute(_NHA_GATEWAY, hop.gateway)
        self._change(_NEWNEXTHOP, body, flags=_CREATE | _REPLACE)

    def put_resilient(self, number: int, members: Sequence[int], buckets: int) -> None:
        """Add a resilient group of ours, or replace its members: only the buckets of members that have gone move.

        Timers are 0: when a member has come back, a bucket moves to it at once, even if the bucket is not idle.
        """
        body = _NHMSG.pack(socket.AF_UNSPEC, 0, PROTOCOL, 0, 0) + attribute(_ID, _u32(number))
        body += attribute(_GROUP, b"".join(_MEMBER.pack(member, 0, 0, 0) for member in members))
        body += attribute(_GROUP_TYPE, struct.pack("=H", _RESILIENT))
        table = attribute(_BUCKETS, struct.pack("=H", buckets)) + attribute(_IDLE, _u32(0))
        body += attribute(_RESILIENT_GROUP | 0x8000, table + attribute(_UNBALANCED, _u32(0)))
        self._change(_NEWNEXTHOP, body, flags=_CREATE | _REPLACE)

    def remove_next_hop(self, number: int) -> None:
        """Remove a next-hop object of ours, with the routes that use it; an object that is already gone is no error."""
        self._remove(_DELNEXTHOP, _NHMSG.pack(0, 0, 0, 0, 0) + attribute(_ID, _u32(number)))

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def _change(self, kind: int, body: bytes, *, flags: int = 0) -> None:
        self._netlink.request(kind, body, flags=REQUEST | ACK | flags)

    def _remove(self, kind: int, body: bytes) -> None:
        try:
            self._change(kind, body)
        except (ProcessLookupError, FileNotFoundError):
            return


def neighbour_of(kind: int, body: bytes) -> Neighbour | None:
    """Return the neighbour entry that a message of the kernel is about; None: it is about something else."""
    if kind not in (_NEWNEIGH, _DELNEIGH):
        return None
    _family, index, state, _flags, _type = _NDMSG.unpack_from(body)
    attrs = attributes(body[_NDMSG.size :])
    return Neighbour(index, attrs.get(_NDA_DST, b""), attrs.get(_NDA_LLADDR, b""), state, is_deleted=kind == _DELNEIGH)


def is_of_main(kind: int, body: bytes) -> bool:
    """Return whether a message of the kernel may mean that the main or the local table is not as before."""
    if kind in (_NEWNEIGH, _DELNEIGH):
        return False
    if kind in (_NEWROUTE, _DELROUTE):
        return _table_of(body) in (MAIN, LOCAL)
    return not is_of_scheme(kind, body)  # a link, or a next hop of BGP


def is_of_scheme(kind: int, body: bytes) -> bool:
    """Return whether a message of the kernel is about a rule, or about a route or next hop in the range of schemes."""
    if kind in (_NEWROUTE, _DELROUTE):
        return TABLE <= _table_of(body) <= LAST_TABLE
    if kind in (_NEWNEXTHOP, _DELNEXTHOP):
        return _number(attributes(body[_NHMSG.size :]).get(_ID)) >= NEXT_HOP
    return kind in (_NEWRULE, _DELRULE)


def _others(attrs: dict[int, bytes], source: int, tos: int, action: int, flags: int) -> Iterator[tuple[str, bytes]]:
    """Yield what a rule has besides priority, table, destination, mark and interface, each as a name and its value."""
    fields = {"source": source, "tos": tos, "action": action if action != _TO_TABLE else 0, "not": flags & _INVERTED}
    yield from ((name, bytes([value])) for name, value in fields.items() if value)
    no_part = {_RULE_SUPPRESS: _u32(_ANY_MASK), **({_RULE_MASK: _u32(_ANY_MASK)} if _RULE_MARK in attrs else {})}
    for number in sorted(attrs.keys() - _RULE_COMPARED):
        if attrs[number] != no_part.get(number):
            yield f"attribute {number}", attrs[number]


def _table_of(body: bytes) -> int:
    return _number(attributes(body[_RTMSG.size :]).get(_TABLE), body[4])


def _hops(attrs: dict[int, bytes], flags: int) -> Iterator[Hop]:
    if RTA_MULTIPATH not in attrs:
        if _OIF in attrs:
            yield _hop(flags, _number(attrs[_OIF]), attrs)
        return
    for one_flags, index, weight, inside in next_hops(attrs[RTA_MULTIPATH]):
        yield _hop(one_flags, index, inside, weight=weight)


def _hop(flags: int, index: int, attrs: dict[int, bytes], *, weight: int = 1) -> Hop:
    if _VIA in attrs:
        (family,) = struct.unpack_from("=H", attrs[_VIA])
        return Hop(index, family, attrs[_VIA][2:], flags, weight)
    return Hop(index, socket.AF_INET, attrs.get(_GATEWAY, b""), flags, weight)


def _route(table: int, prefix: str, flags: int) -> bytes:
    address, _, length = prefix.partition("/")
    head = _RTMSG.pack(socket.AF_INET, int(length), 0, 0, 0, PROTOCOL, 0, _UNICAST, flags)
    return head + attribute(_DST, socket.inet_aton(address)) + attribute(_TABLE, _u32(table))


def _gateway(hop: Hop) -> bytes:
    if not hop.gateway:
        return b""
    if hop.family == socket.AF_INET:
        return attribute(_GATEWAY, hop.gateway)
    return attribute(_VIA, struct.pack("=H", hop.family) + hop.gateway)


def _next_hop(hop: Hop) -> bytes:
    inside = _gateway(hop)
    return _NEXT_HOP.pack(_NEXT_HOP.size + len(inside), hop.flags, hop.weight - 1, hop.index) + inside


def _rule(rule: Rule) -> bytes:
    address, _, length = (rule.prefix or "/0").partition("/")
    body = _RULE.pack(socket.AF_INET, int(length), 0, 0, 0, 0, 0, _TO_TABLE, 0)
    body += attribute(_RULE_DST, socket.inet_aton(address)) if address else b""
    body += attribute(_RULE_PRIORITY, _u32(rule.priority)) + attribute(_RULE_TABLE, _u32(rule.table))
    body += attribute(_RULE_PROTOCOL, bytes([rule.protocol]))
    if rule.interface:
        body += attribute(_RULE_INTERFACE, rule.interface.encode() + b"\0")
    if rule.mark:
        body += attribute(_RULE_MARK, _u32(rule.mark)) + attribute(_RULE_MASK, _u32(0xFFFFFFFF))
    return body


def _u32(value: int) -> bytes:
    return struct.pack("=I", value)


def _number(raw: bytes | None, default: int = 0) -> int:
    return int.from_bytes(raw, sys.byteorder) if raw else default
