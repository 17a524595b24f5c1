"""Exposure of a fault: whether it acted on something that workloads used at that time. Pure.

`faultbed run`, `faultbed inject`, pytest sessions and campaigns judge it by `why_not_exposed` alone. A link or a switch
is used by the queue pairs whose data or ACKs cross it. A host, an RNIC or a GPU is used by the ranks and queue pairs on
it, and a host by the job whose storage it has. A spare is not used until a rank moves to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.path_selector import place_of
from faultbed.testbed.model.selectors import candidates, choose, is_chosen_later, path_ends

if TYPE_CHECKING:
    from faultbed.inject.evidence.receipt import Receipt
    from faultbed.testbed.model.topology import Link, Target, Topology

__all__ = ["MAX_GAP_S", "crossed", "default_gpu", "is_used", "why_not_exposed"]

MAX_GAP_S = 15.0
"""Longest time between two readings that still shows that a fault touched nothing."""


def why_not_exposed(receipt: Receipt, spec: FaultSpec, topology: Topology) -> tuple[str, ...]:
    """Return why it is not shown that a fault acted where it should; empty if it is.

    What is unknown counts against both kinds of exposure.

    Args:
        receipt: the fault's receipt, with what workloads used.
        spec: the fault as planned: its target by its name, unless it was chosen when the fault was armed.
        topology: the lab.
    """
    uses, text = receipt.exposed.uses, receipt.target
    if wrong := _why_elsewhere(receipt, topology, spec.target, spec.seed):
        return (wrong,)
    try:
        target = topology.resolve(text)
    except UsageError as error:
        return (f"it is unknown whether the workload used {text}: {error}",)
    if spec.exposed == "none":
        return _why_used(receipt, target, topology)
    ended_ns = receipt.cleared.at_ns
    during = [use for use in uses if ended_ns is None or use.at_ns <= ended_ns]
    states = [is_used(use, target, topology) for use in during]
    if True in states:
        return ()
    if not during or None in states:
        return (_unknown(text, during),)
    unused = f"the workload did not use {text}: no rank was there and no queue pair crossed it"
    return (f'{unused}; choose a target that it uses, or write exposed = "none" for a fault that must touch nothing',)


def _why_used(receipt: Receipt, target: Target, topology: Topology) -> tuple[str, ...]:
    """Return why it is not shown that a fault touched nothing; empty if it is."""
    uses = receipt.exposed.uses
    states = [is_used(use, target, topology) for use in uses]
    if True in states:
        return (f'the workload used {target.text}, although the fault has exposed = "none"',)
    if not uses or None in states:
        return (_unknown(target.text, uses),)
    gap_s = _longest_gap_s(receipt)
    if gap_s is None or gap_s > MAX_GAP_S:
        when = "while the fault was on" if gap_s is None else f"for {gap_s:.0f} s of the fault"
        return (f"it is unknown whether the workload used {target.text}: what it used was not read {when}",)
    return ()


def _longest_gap_s(receipt: Receipt) -> float | None:
    """Return the longest time in which nothing was read while the fault was on; None: nothing was, or it is unknown."""
    armed_ns, cleared_ns = receipt.armed.at_ns, receipt.cleared.at_ns
    if armed_ns is None or cleared_ns is None:
        return None
    readings = sorted(use.at_ns for use in receipt.exposed.uses if use.at_ns >= armed_ns)
    if not readings:
        return None
    return max(later - earlier for earlier, later in pairwise([armed_ns, *readings, cleared_ns])) / 1e9


def _unknown(target: str, uses: Sequence[WorkloadUse]) -> str:
    reasons = [use.unknown_paths for use in uses if use.unknown_paths]
    unread = sorted({host for use in uses for host in use.unread})
    if unread:
        reasons.append(f"the queue pairs of {', '.join(unread)} could not be listed")
    reason = reasons[0] if reasons else "the path of a queue pair was not read"
    return f"it is unknown whether the workload used {target}: {reason}"


def _why_elsewhere(receipt: Receipt, topology: Topology, planned: str, seed: int) -> str | None:
    """Return why it is not shown that a fault acted on its planned target; None if it is.

    A target that was left open is chosen again, from what workloads used when it was chosen.
    """
    if not is_chosen_later(planned):
        return None if receipt.target == planned else f"it acted on {receipt.target}, planned was {planned}"
    if receipt.target == planned:
        return f"it is unknown what it should have acted on: no target was chosen for {planned}"
    try:
        names = candidates(topology, planned, at=place_of(topology, topology.resolve(receipt.target)))
        uses = receipt.exposed.uses[:1]
        meant = choose(planned, crossed(topology, names, uses[0], by=planned) if uses else (), seed=seed)
    except UsageError as error:
        return f"it is unknown whether the workload used {receipt.target}: {error}"
    return None if meant == receipt.target else f"it acted on {receipt.target}, and {planned} was {meant} then"


def crossed(topology: Topology, names: Iterable[str], use: WorkloadUse, *, by: str) -> tuple[str, ...]:
    """Return those of the named targets that workloads provably used, in the order of `names`.

    Args:
        topology: the lab.
        names: candidates of a selector.
        use: what workloads used.
        by: the selector: of a path, only packets between its ends count.

    Raises:
        UsageError: an end of the path does not exist.
    """
    counted = _between(use, path_ends(topology, by))
    return tuple(name for name in names if is_used(counted, topology.resolve(name), topology))


def _between(use: WorkloadUse, ends: tuple[str, str] | None) -> WorkloadUse:
    """Return the part of a use that the packets from one RNIC to another are."""
    if ends is None:
        return use
    indexes = use.by_pair.get(">".join(ends), ())
    paths = tuple(path for index, path in enumerate(use.paths) if index in indexes)
    return WorkloadUse(at_ns=use.at_ns, rnics=ends if paths else (), paths=paths)


def is_used(use: WorkloadUse, target: Target, topology: Topology) -> bool | None:
    """Return whether workloads used a target at one moment; None: unknown."""
    if target.gpu is not None:
        return _known(f"{target.node}:{target.gpu.name}" in use.gpus, target.node, use)
    if target.kind == "host":
        hosts = {name.partition(":")[0] for name in use.rnics} | set(use.hosts)
        return _known(target.node in hosts, target.node, use)
    if target.link is not None:
        return _is_link_used(use, target.link, topology)
    links = topology.links_of(target.node)
    states = [_is_link_used(use, link, topology) for link in links]
    if True in states or any(target.node in path for path in use.paths):
        return True
    return None if None in states else False


def _is_link_used(use: WorkloadUse, link: Link, topology: Topology) -> bool | None:
    if link.rnic is not None:
        return _known(f"{link.b.node}:{link.rnic}" in use.rnics, link.b.node, use)
    states = [topology.crosses(path, link) for path in use.paths]
    is_sprayed = any(_is_sprayed_over(pair, link, topology) for pair in use.sprayed)
    if True in states or use.watched.get(link.name) or is_sprayed:
        return True
    if link.name in use.watched:
        return False
    # Which uplinks farther away sprayed packets take is unknown.
    return None if None in states or use.sprayed or use.unread or use.unknown_paths else False


def _known(is_there: bool, host: str, use: WorkloadUse) -> bool | None:  # noqa: FBT001 (one fact, and whether it is known)
    return None if not is_there and host in use.unread else is_there


def _is_sprayed_over(pair: tuple[str, str], link: Link, topology: Topology) -> bool:
    """Return whether packets that are sprayed between two RNICs take an uplink of their rack switches."""
    racks = {_rack_switch(end, topology) for end in pair}
    return len(racks) > 1 and bool(racks & {link.a.node, link.b.node})


def _rack_switch(rnic: str, topology: Topology) -> str:
    host, _, name = rnic.partition(":")
    return topology.rnic_link(host, name).a.node


def default_gpu(rnic: str, topology: Topology) -> str:
    """Return the GPU (`host1:gpu0`) of a rank at an RNIC that names none: that of the inventory, or the first one."""
    host, _, name = rnic.partition(":")
    rnics = topology.host_by_name[host].rnics if host in topology.host_by_name else ()
    assigned = next((item.gpu for item in rnics if item.name == name), None)
    return f"{host}:{assigned or 'gpu0'}"
