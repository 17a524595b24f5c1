"""The lab of a run, how the run left it, and what went wrong with the harness: `evidence/measured/lab.json`."""

from __future__ import annotations

import msgspec

from faultbed.harness.record.plausible import refuse_addresses
from faultbed.harness.verdict import LabState
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.topology import Topology

__all__ = ["LabEvidence"]


class LabEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The lab of a run.

    Attributes:
        rate_scale: a soft lab shapes its links to the topology's speeds divided by this; None: no link is shaped.
        state: CLEAN if the lab is as it was before the run.
        diff: differences of the lab's fingerprint after the run from that before; empty if `state` is CLEAN.
        errors: errors of the harness itself. Any of them makes the run an ERROR.
    """

    name: str
    kind: LabKind
    accelerator: str | None
    topology: Topology
    rate_scale: float | None = None
    state: LabState
    diff: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    def refuse_contradictions(self) -> None:
        """Raise ValueError, with the field, if records contradict each other or a value is impossible."""
        refuse_addresses(self.topology)
        _refuse_loose_links(self.topology)


def _refuse_loose_links(topology: Topology) -> None:
    """Raise ValueError if a link ends at a node or an RNIC that is not in the topology."""
    rnics = {(host.name, rnic.name) for host in topology.hosts for rnic in host.rnics}
    nodes = {*topology.host_by_name, *topology.switch_by_name}
    for link in topology.links:
        if not {link.a.node, link.b.node} <= nodes or (link.rnic is not None and (link.b.node, link.rnic) not in rnics):
            raise ValueError(f"topology.links: {link.name} ends at an unknown node or RNIC")
