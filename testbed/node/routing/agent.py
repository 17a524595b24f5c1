"""Apply a routing scheme to one switch and keep its tables in step with BGP.

The agent never changes a route of BGP. The kernel notifies it (rtnetlink multicast) when the main table, a link or a
next hop has changed, and the agent copies the main table's next hops again. A next hop that BGP has withdrawn stays in
the scheme's tables between the notification and that copy. If an interface goes down, the kernel itself removes its
next hops from all tables.

If another program changes rules, tables, groups or marks of the scheme, the agent compares them with the scheme, and
records the times at which they differed and those at which BGP had lost a next hop
(`faultbed.testbed.node.routing.deviations`). It also records routes that other programs add to the main or the local
table for the scheme's prefixes, changes of the settings of ECMP, and wrong neighbour entries of next hops
(`faultbed.testbed.node.routing.path_choice`). Plain ECMP has nothing to install: its agent only watches.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from faultbed.testbed.node import netns
from faultbed.testbed.node.netlink import notifications
from faultbed.testbed.node.routing.deviations import BGP, FOREIGN, UNWATCHED, Deviation, DeviationLog
from faultbed.testbed.node.routing.kernel import LOCAL, MAIN, Hop, Kernel, Rule, is_of_main, is_of_scheme, neighbour_of
from faultbed.testbed.node.routing.marking_rules import (
    concerns_marks,
    delete_marks,
    foreign_tables,
    install_marks,
    mark_rules,
    marked_packets,
)
from faultbed.testbed.node.routing.owned_numbers import (
    GROUP,
    LAST_TABLE,
    NEXT_HOP,
    NFT_TABLE,
    PRIORITY,
    PROTOCOL,
    SHARED_TABLE,
    STEER_PRIORITY,
    STEER_TABLE,
    TABLE,
)
from faultbed.testbed.node.routing.path_choice import NeighbourWatch, SettingWatch
from faultbed.testbed.node.routing.switch_routes import SwitchRoutes, read_routes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from faultbed.testbed.node.routing.kernel import RuleKey

__all__ = ["SwitchAgent"]

_GROUPS = (1, 3, 7, 8, 32)  # RTNLGRP_LINK, RTNLGRP_NEIGH, RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV4_RULE, RTNLGRP_NEXTHOP
_NETFILTER, _NFT_GROUPS = 12, (7,)  # NETLINK_NETFILTER, NFNLGRP_NFTABLES (linux/netfilter/nfnetlink.h)
_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33
_BUFFER_BYTES = 1 << 20
"""Notifications that wait for the agent; a switch whose BGP converges sends some tens of kilobytes."""
_COMPARE_NS = 200_000_000
"""Least time between two comparisons, or from a reading of the main table until it is repeated."""
_ATTEMPTS = 3
_LAST_BEFORE_MAIN = 32765
"""Priority of the last rule that the kernel looks at before that of the main table."""
_OF_THE_KERNEL = {Rule(0, LOCAL, None, 0).key, Rule(_LAST_BEFORE_MAIN + 1, MAIN, None, 0).key}
"""The rules of every namespace that lead to the local and to the main table."""
_OF_A_FAULT = Rule(STEER_PRIORITY, STEER_TABLE, None, 0).key
"""The rule of `congestion.hash-collision`, which has a receipt of its own."""


class SwitchAgent:
    """Agent that installs, updates and removes a routing scheme on one switch.

    Args:
        request: what `faultbed.testbed.routing.switch_tables.SchemeTables.request` returns. Its `netns` is the network
            namespace of the switch; None: this machine is the switch.

    Raises:
        FileNotFoundError: there is no such namespace.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._netns: str | None = request["netns"]
        self._prefixes: dict[str, list[str]] = request["prefixes"]
        self._port_of: dict[int, str] = {int(table): port for table, port in request["tables"].items()}
        self._weights: dict[str, int] = request["weights"]
        self._buckets: int = request["buckets"]
        self._rules = [Rule(*rule) for rule in request["rules"]]
        self._marks: list[str] = request["marks"]
        netns.enter(self._netns)
        try:
            self._kernel = Kernel()
            self._notifications = _subscribed(socket.NETLINK_ROUTE, _GROUPS)
            self._nft_notifications = _subscribed(_NETFILTER, _NFT_GROUPS) if self._marks else None
            self._index_of = {name: index for index, name in socket.if_nameindex()}
            self._settings = SettingWatch()
        finally:
            netns.enter(None)
        ports = {port for hops in self._prefixes.values() for port in hops}
        self._neighbours = NeighbourWatch({index: name for name, index in self._index_of.items() if name in ports})
        self._are_neighbours_unknown = False
        self._scheme_log, self._main_log = DeviationLog(), DeviationLog()
        self._is_watching = self._are_marks_changed = False
        self._drained_ns = self._compared_ns = 0
        self._changed_ns: list[int] = []  # the first and the last change since the last comparison
        self._copy_again_ns = 0  # when to read the main table once more; 0: not
        self._compares_again = False
        self._routes = SwitchRoutes(self._prefixes)  # as last copied
        self._known_foreign: set[tuple[int, str, int]] = set()
        self._kernels_rules: set[RuleKey] = set()
        self._mark_rules: list[Any] | None = None
        self._nft_deviations: dict[str, Deviation] = {}

    @property
    def name(self) -> str:
        """Name of the switch in messages."""
        return self._netns or "this machine"

    @property
    def is_due(self) -> bool:
        """Whether the switch still has to be read or to be compared with the scheme."""
        return self._is_watching and bool(self._changed_ns or self._copy_again_ns)

    @property
    def is_watching(self) -> bool:
        """Whether the switch is watched, so that `watch` has to be called every `LOOK_S`."""
        return self._is_watching

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when the kernel reports a change."""
        return [source.fileno() for source in (self._notifications, self._nft_notifications) if source is not None]

    def conflict(self) -> str:
        """Return why the scheme cannot be applied (state in its ranges, or a missing port); empty if it can."""
        ports = dict.fromkeys(port for hops in self._prefixes.values() for port in hops)
        ports |= dict.fromkeys(rule.interface for rule in self._rules if rule.interface)
        if missing := [port for port in ports if port not in self._index_of]:
            return f"{self.name}: no port {missing[0]}; check that the lab is provisioned (`faultbed up`)"
        conflicts = [
            (
                f"a rule of priority {rule.priority} (lookup {rule.table})",
                rule.protocol,
                f"rule del priority {rule.priority} table {rule.table}",
            )
            for rule in self._kernel.rules()
            if rule.priority == PRIORITY or TABLE <= rule.table <= LAST_TABLE
        ]
        conflicts += [
            (
                f"a route to {route.prefix} in table {route.table}",
                route.protocol,
                f"route del {route.prefix} table {route.table}",
            )
            for route in self._kernel.routes(every_kind=True)
            if route.table != MAIN
        ]
        conflicts += [
            (f"a next hop {next_hop.id}", next_hop.protocol, f"nexthop del id {next_hop.id}")
            for next_hop in self._kernel.next_hop_objects()
        ]
        if self._marks and marked_packets(self._netns) is not None:
            conflicts.append((f"an nftables table {NFT_TABLE}", PROTOCOL, ""))
        if not conflicts:
            return ""
        found, protocol, removal = conflicts[0]
        inside = f"-n {self._netns} " if self._netns else ""
        advice = (
            "run `faultbed heal`"
            if protocol == PROTOCOL
            else f"faultbed did not make it and does not remove it: `ip {inside}{removal}` does"
        )
        return f"{self.name}: {found} already exists in the range reserved for routing schemes; {advice}"

    def apply(self) -> None:
        """Install tables, then nftables marks, then rules, so that a rule never points to an incomplete table.

        Raises:
            OSError: the kernel or nft refused. What was installed until then remains; `remove` deletes it.
        """
        self._copy(is_first=True)
        if self._marks:
            install_marks(self._netns, self._marks)
        for rule in self._rules:
            self._kernel.add_rule(rule)

    def replace_rules(self, rules: list[list[Any]]) -> int:
        """Make the scheme's rules `rules`, with additions before removals. Returns the number of changes.

        The kernel adds a rule behind those of its priority (fib_nl_newrule in net/core/fib_rules.c). A key that moves
        therefore keeps its old rule until that rule is removed, and has a rule at every moment.

        Raises:
            OSError: the kernel refused. Rules that were changed until then remain changed.
            ValueError: a rule names a port or a table that the scheme does not have.
        """
        desired = {rule.key: rule for rule in (Rule(*rule) for rule in rules)}
        for rule in desired.values():
            if rule.interface and rule.interface not in self._index_of:
                raise ValueError(f"{self.name}: no port {rule.interface}; the rules are of another switch")
            if rule.table not in self._port_of:
                raise ValueError(f"{self.name}: no table {rule.table} in this scheme; the rules are of another switch")
        if self._is_watching:
            # What another program has changed until now is recorded before it is put right.
            self.drain()
            if self._changed_ns:
                self._compare()
        installed = {rule.key: rule for rule in self._kernel.rules() if rule.protocol == PROTOCOL}
        self._rules = [*desired.values()]
        added, removed = desired.keys() - installed.keys(), installed.keys() - desired.keys()
        for key in added:
            self._kernel.add_rule(desired[key])
        for key in removed:
            self._kernel.remove_rule(installed[key])
        return len(added) + len(removed)

    def follow(self) -> int:
        """Copy BGP's present next hops into the scheme's tables. Returns the number of changes.

        A next hop that the kernel refuses because its port has just gone down is left out. The kernel also reports the
        change of that port, which causes the next copy.
        """
        changes = self._copy(is_first=False)
        if self._is_watching:
            self._main_log.update(self._drained_ns, self._drained_ns, self._changes_of_main())
        return changes

    def _copy(self, *, is_first: bool) -> int:
        """Make the scheme's tables match the main table; return the number of changes."""
        self._routes = read_routes(self._kernel, self._prefixes)
        main, installed = self._routes.main, self._routes.installed
        changes = self._follow_groups(main, is_first=is_first) if self._buckets else 0
        desired = self._desired(main)
        for (table, prefix), (hops, group) in desired.items():
            if installed.get((table, prefix)) != self._key(hops, group):
                try:
                    self._kernel.put_route(table, prefix, hops, group)
                except OSError:
                    if is_first:
                        raise
                    self._kernel.remove_route(table, prefix)
                changes += 1
        for table, prefix in installed.keys() - desired.keys():
            self._kernel.remove_route(table, prefix)
            changes += 1
        return changes

    def drain(self) -> bool:
        """Read all pending notifications of the kernel. Returns whether the tables have to be copied again."""
        is_due = is_foreign = False
        ours = (0, self._kernel.port_id)
        for datagram in self._received(self._notifications):
            is_due, is_foreign = is_due or datagram is None, is_foreign or datagram is None
            for kind, origin, body in notifications(datagram or b""):
                if (neighbour := neighbour_of(kind, body)) is not None and self._is_watching:
                    self._neighbours.changed(neighbour, self._drained_ns, time.monotonic_ns())
                is_due = is_due or is_of_main(kind, body)
                is_foreign = is_foreign or (origin not in ours and is_of_scheme(kind, body))
        for datagram in self._received(self._nft_notifications):
            if datagram is None or concerns_marks(datagram):
                is_foreign = self._are_marks_changed = True
        self._drained_ns = time.monotonic_ns()
        if is_due:
            self._copy_again_ns = self._drained_ns + _COMPARE_NS
        if is_foreign or (is_due and self._scheme_log.has_open):  # following BGP overwrites foreign routes
            self._changed_ns = [*self._changed_ns[:1], self._drained_ns]
            self._compares_again = True
        return is_due

    def _received(self, source: socket.socket | None) -> Iterator[bytes | None]:
        """Yield all pending datagrams of a socket; None: the kernel dropped some, because its buffer was full."""
        while source is not None:
            try:
                yield source.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                if self._is_watching:
                    reason = "the kernel dropped notifications, because more came than were read"
                    self._scheme_log.not_watched(self._drained_ns, time.monotonic_ns(), reason)
                    self._are_neighbours_unknown = True
                yield None

    def begin_watch(self) -> None:
        """Record from now on when the switch differs from the scheme, which `apply` has just installed.

        Raises:
            OSError: the kernel or nft refused.
        """
        self.drain()
        self._kernels_rules = {rule.key for rule in self._kernel.rules()} & _OF_THE_KERNEL
        if what := self._wrong_rules():
            self._scheme_log.begin(self._drained_ns, {"rules": Deviation(FOREIGN, what)})
        if self._marks:
            self._mark_rules = mark_rules(self._netns)
            self._nft_deviations = self._wrong_nftables()
            self._scheme_log.begin(self._drained_ns, self._nft_deviations)
        self._known_foreign = self._routes.foreign
        self._neighbours.begin(self._kernel.neighbours())
        self._settings.begin(time.monotonic_ns())
        self._is_watching = True
        self._main_log.update(self._drained_ns, self._drained_ns, self._changes_of_main())

    def watch(self, now_ns: int) -> int:
        """Follow BGP, and compare the switch with the scheme, if the kernel has reported a change that calls for it.

        After a change the switch is read twice, at once and `_COMPARE_NS` later. The reason is that the kernel reports
        the deletion of a route before it deletes the route (fib_table_delete in net/ipv4/fib_trie.c). A reading does
        not wait for the end of the deletion (since Linux 6.9), and the holder has a higher priority than most programs.

        Returns the number of changes that were made to follow BGP.
        """
        copied = 0
        if self._is_watching:
            self._settings.look(time.monotonic_ns())
        if self.drain():
            copied = self.follow()
        elif self._copy_again_ns and now_ns >= self._copy_again_ns:
            copied = self.follow()
            self._copy_again_ns = 0
        if self._is_watching and self._changed_ns and now_ns >= self._compared_ns + _COMPARE_NS:
            again_ns = list(self._changed_ns) if self._compares_again else []
            self._compares_again = False
            copied += self._compare()
            self._compared_ns = time.monotonic_ns()
            self._changed_ns = self._changed_ns or again_ns
        if self._are_neighbours_unknown:
            self._compare_neighbours()
        return copied

    def _compare_neighbours(self) -> None:
        used = {(hop.index, hop.gateway) for hops in self._routes.main.values() for hop in hops if hop.is_usable}
        self._neighbours.compare(self._kernel.neighbours(), used, self._drained_ns, time.monotonic_ns())
        self._are_neighbours_unknown = False

    def end_watch(self) -> None:
        """Compare for the last time, because the scheme is about to be removed. An error is recorded, not raised."""
        try:
            if self._is_watching:
                self._settings.look(time.monotonic_ns())
                if self.drain():
                    self.follow()
                self._changed_ns = [*self._changed_ns[:1], self._drained_ns]
                self._compare()
                self._compare_neighbours()
                if self._changed_ns:
                    reason = "the main table changed during each of the last comparisons"
                    self._scheme_log.not_watched(self._changed_ns[0], time.monotonic_ns(), reason)
        except OSError as error:
            reason = f"its routing could not be read: {error}"
            self._scheme_log.not_watched(self._drained_ns, time.monotonic_ns(), reason)
        self._is_watching = False

    def report(self) -> list[dict[str, Any]]:
        """Return when the switch differed from the scheme, as plain data, with its network namespace."""
        sources = (self._scheme_log, self._main_log, self._settings, self._neighbours)
        return [{**entry, "netns": self._netns} for source in sources for entry in source.report()]

    def _compare(self) -> int:
        """Compare the switch with the scheme, and record the differences. Returns the changes made to follow BGP.

        If the kernel reports a change of the main table after the reading, the scheme's tables may be behind BGP, and
        the reading is repeated.
        """
        copied, first_ns, last_ns = 0, self._changed_ns[0], self._changed_ns[-1]
        self._changed_ns = []
        for _ in range(_ATTEMPTS):
            try:
                present = self._differences()
            except OSError as error:
                unread = Deviation(UNWATCHED, f"its routing could not be read: {error}")
                self._scheme_log.begin(first_ns, {"unread": unread})
                break
            if not self.drain():
                self._scheme_log.update(first_ns, last_ns, present)
                return copied
            copied += self.follow()
            last_ns = self._drained_ns
        self._changed_ns = [first_ns, last_ns]  # read again later
        return copied

    def _differences(self) -> dict[str, Deviation]:
        """Return how the switch differs from the scheme now, by subject."""
        found = read_routes(self._kernel, self._prefixes)
        present = {}
        if what := self._wrong_routes(found):
            present["routes"] = Deviation(FOREIGN, what)
        if what := self._wrong_rules():
            present["rules"] = Deviation(FOREIGN, what)
        if self._buckets and (wrong := sum(self._wrong_groups(found.main))):
            present["groups"] = Deviation(FOREIGN, f"{wrong} next hops or next-hop groups were not the scheme's")
        if self._are_marks_changed:
            self._nft_deviations = self._wrong_nftables()
            self._are_marks_changed = False
        return present | self._nft_deviations

    def _wrong_nftables(self) -> dict[str, Deviation]:
        present = {}
        if mark_rules(self._netns) != self._mark_rules:
            present["marks"] = Deviation(FOREIGN, "the nftables marks were not the scheme's")
        if tables := foreign_tables(self._netns):
            what = f"nftables had a table of another program, whose rules may change marks: {', '.join(tables)}"
            present["tables"] = Deviation(FOREIGN, what)
        return present

    def _changes_of_main(self) -> dict[str, Deviation]:
        """Return what was wrong in the main table when it was last copied, by subject.

        That is each next hop of the scheme that was missing, and each route that another program has added since the
        watch began.
        """
        names = {index: name for name, index in self._index_of.items()}
        main, added = self._routes.main, self._routes.foreign - self._known_foreign
        present = {
            f"{port} {prefix}": Deviation(BGP, f"BGP had no next hop by {port}", port, prefix)
            for prefix, ports in self._prefixes.items()
            for port in set(ports) - {names.get(hop.index) for hop in main.get(prefix, ())}
        }
        for table, prefix, protocol in added:
            name = "local" if table == LOCAL else "main"
            what = f"the {name} table had a route to {prefix} of another program (protocol {protocol})"
            present[f"foreign {table} {prefix} {protocol}"] = Deviation(FOREIGN, what)
        if not self._port_of and not self._buckets:
            present |= {f"shares of {prefix}": Deviation(FOREIGN, what) for prefix, what in self._wrong_shares(names)}
        return present

    def _wrong_shares(self, names: dict[int, str]) -> Iterator[tuple[str, str]]:
        """Yield prefixes whose packets the main table spreads over more than the planned ports, or unevenly, and how.

        A prefix that lacks a planned port is left out, because BGP may have another path then.
        """
        for prefix, ports in self._prefixes.items():
            hops = self._routes.main.get(prefix, ())
            used = [names.get(hop.index, "?") for hop in hops]
            if set(ports) - set(used):
                continue
            if more := sorted(set(used) - set(ports)):
                yield prefix, f"the main table had a next hop by {more[0]} to {prefix}, which is not planned"
            elif not self._weights and len({hop.weight for hop in hops}) > 1:
                yield prefix, f"the main table had next hops with unequal weights to {prefix}"

    def _wrong_routes(self, found: SwitchRoutes) -> str:
        if not self._rules:  # nothing leads to the tables of schemes
            return ""
        desired = self._desired(found.main)
        wrong = [at for at, route in desired.items() if found.installed.get(at) != self._key(*route)]
        wrong += found.by_table.keys() - desired.keys()
        wrong += found.repeated - set(wrong)
        if not wrong:
            return ""
        names = {index: name for name, index in self._index_of.items()}
        (table, prefix), route = wrong[0], found.by_table.get(wrong[0])
        hops = [names.get(hop.index, "?") for hop in route.hops if hop.is_usable] if route else []
        led = f"led to {', '.join(hops) or 'no port'}" if route else "was missing"
        return f"{len(wrong)} of {len(desired)} routes were not the scheme's: {prefix} in table {table} {led}"

    def _wrong_rules(self) -> str:
        rules = list(self._kernel.rules())
        ours, keys = {rule.key for rule in rules if rule.protocol == PROTOCOL}, {rule.key for rule in rules}
        if missing := [rule for rule in self._rules if rule.key not in ours]:
            return f"{len(missing)} of {len(self._rules)} rules of the scheme were missing"
        expected = self._kernels_rules | {rule.key for rule in self._rules}
        last = PRIORITY if self._rules else _LAST_BEFORE_MAIN
        for rule in rules:
            if rule.priority <= last and rule.key != _OF_A_FAULT and rule.key not in expected:
                return f"a rule of priority {rule.priority} (lookup {rule.table}) was there, which is not the scheme's"
        for priority, table, *_ in self._kernels_rules - keys:
            if priority <= last or table == MAIN:
                return f"a rule of priority {priority} (lookup {table}) was gone"
        return ""

    def _wrong_groups(self, main: dict[str, list[Hop]]) -> Iterator[bool]:
        """Yield whether each next hop and each resilient group differs from what BGP's next hops imply."""
        installed = {next_hop.id: next_hop for next_hop in self._kernel.next_hop_objects()}
        hops, groups = self._desired_groups(main)
        for number, hop in hops.items():
            known = installed.get(number)
            yield known is None or known.hop is None or known.hop.key != hop.key
        for number, members in groups.items():
            known = installed.get(number)
            is_as_planned = known is not None and tuple(sorted(known.members)) == members
            yield bool(members) and not (is_as_planned and known is not None and known.buckets == self._buckets)

    def remove(self) -> None:
        """Remove rules first, so that BGP's table decides on every packet at once, then marks, tables and next hops.

        Parts that are already gone are skipped.

        Raises:
            OSError: the kernel or nft refused.
        """
        for rule in list(self._kernel.rules()):
            if rule.protocol == PROTOCOL and rule.priority == PRIORITY:
                self._kernel.remove_rule(rule)
        if marked_packets(self._netns) is not None:
            delete_marks(self._netns)
        for route in list(self._kernel.routes()):
            if route.table != MAIN and route.protocol == PROTOCOL:
                self._kernel.remove_route(route.table, route.prefix)
        for next_hop in sorted(
            self._kernel.next_hop_objects(), key=lambda next_hop: -next_hop.id
        ):  # groups before their members
            if next_hop.protocol == PROTOCOL:
                self._kernel.remove_next_hop(next_hop.id)

    def counts(self) -> dict[str, int]:
        """Count the installed parts of the scheme: its rules, routes and nftables marks, and the required numbers.

        `left` counts every part of any scheme that is on the switch. `is_only_watching` says that the switch is watched
        for a scheme that installs nothing.
        """
        installed_keys = {rule.key for rule in self._kernel.rules() if rule.protocol == PROTOCOL}
        routes = [route for route in self._kernel.routes() if route.table != MAIN and route.protocol == PROTOCOL]
        marked = marked_packets(self._netns)
        return {
            "rules": sum(rule.key in installed_keys for rule in self._rules),
            "wanted_rules": len(self._rules),
            "left": len(installed_keys)
            + len(routes)
            + sum(1 for _ in self._kernel.next_hop_objects())
            + (marked is not None),
            "routes": len(routes),
            "marks": 0 if marked is None else len(marked),
            "wanted_marks": len(self._marks),
            "is_only_watching": self._is_watching and not self._rules,
        }

    def close(self) -> None:
        """Close the sockets to the kernel, and the files of settings."""
        self._settings.close()
        self._kernel.close()
        self._notifications.close()
        if self._nft_notifications is not None:
            self._nft_notifications.close()

    def _desired(self, main: dict[str, list[Hop]]) -> dict[tuple[int, str], tuple[list[Hop], int]]:
        """Return the scheme's routes by (table, prefix): either next hops, or the id of a next-hop group that is not 0.

        Each port has a table with the routes that leave by it. Schemes by group or by weight have a shared table.
        """
        desired: dict[tuple[int, str], tuple[list[Hop], int]] = {}
        names = {index: name for name, index in self._index_of.items()}
        for table, port in self._port_of.items():
            for prefix, hops in main.items():
                if by_port := [hop for hop in hops if names.get(hop.index) == port]:
                    desired[table, prefix] = (by_port[:1], 0)
        if self._buckets:
            for number, prefix in enumerate(self._prefixes):
                if main.get(prefix):
                    desired[SHARED_TABLE, prefix] = ([main[prefix][0]], GROUP + number)
        elif self._weights:
            for prefix, hops in main.items():
                if hops:
                    desired[SHARED_TABLE, prefix] = ([self._weighted(hop, names) for hop in hops], 0)
        return desired

    def _weighted(self, hop: Hop, names: dict[int, str]) -> Hop:
        """Return a next hop with the scheme's weight of its port, or 1."""
        weight = self._weights.get(names.get(hop.index, ""), 1)
        return Hop(hop.index, hop.family, hop.gateway, hop.flags, weight)

    def _follow_groups(self, main: dict[str, list[Hop]], *, is_first: bool) -> int:
        """Make next hops and resilient groups those of the main table; ids depend on port and prefix alone."""
        try:
            return self._copy_groups(main)
        except OSError:
            if is_first:
                raise
            return 0

    def _copy_groups(self, main: dict[str, list[Hop]]) -> int:
        installed = {
            next_hop.id: next_hop for next_hop in self._kernel.next_hop_objects() if next_hop.protocol == PROTOCOL
        }
        hops, groups = self._desired_groups(main)
        changes = 0
        for number, hop in hops.items():
            known = installed.get(number)
            if known is None or known.hop is None or known.hop.key != hop.key:
                self._kernel.put_next_hop(number, hop)
                changes += 1
        for number, members in groups.items():
            known = installed.get(number)
            if members and (known is None or tuple(sorted(known.members)) != members):
                self._kernel.put_resilient(number, members, self._buckets)
                changes += 1
            elif not members and known is not None:
                self._kernel.remove_next_hop(number)
                changes += 1
        return changes

    def _desired_groups(self, main: dict[str, list[Hop]]) -> tuple[dict[int, Hop], dict[int, tuple[int, ...]]]:
        """Return the scheme's next hops by id, and the sorted members of its groups by id; empty: there is no group."""
        ports = list(dict.fromkeys(port for hops in self._prefixes.values() for port in hops))
        id_of = {self._index_of[port]: NEXT_HOP + number for number, port in enumerate(ports)}
        by_index = {hop.index: hop for hops in main.values() for hop in hops}
        return {id_of[index]: hop for index, hop in by_index.items() if index in id_of}, {
            GROUP + number: tuple(sorted(id_of[hop.index] for hop in main.get(prefix, ()) if hop.index in id_of))
            for number, prefix in enumerate(self._prefixes)
        }

    def _key(self, hops: list[Hop], group: int) -> tuple[object, ...]:
        """Return the key of a desired route, for comparison with the keys of `SwitchRoutes.installed`."""
        return (group,) if group else (0, *(self._as_read(hop, len(hops)) for hop in hops))

    def _as_read(self, hop: Hop, count: int) -> tuple[object, ...]:
        """Return the key of a next hop as it is read back: a single one has no weight."""
        return hop.key if count > 1 else Hop(hop.index, hop.family, hop.gateway, hop.flags).key


def _subscribed(family: int, groups: tuple[int, ...]) -> socket.socket:
    """Return a socket that receives the kernel's notifications of some groups, in the present namespace."""
    source = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
    source.bind((0, 0))
    with contextlib.suppress(PermissionError):  # beyond net.core.rmem_max, which needs CAP_NET_ADMIN of the machine
        source.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    for group in groups:
        source.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    source.setblocking(False)  # noqa: FBT003 (the socket module's own form)
    return source
