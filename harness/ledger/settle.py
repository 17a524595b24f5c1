"""Settle a claim from findings. The only place that decides what a missing value means. Pure.

A finding is what a part of the experiment has read out of the evidence. Absent findings are unknown: a condition that
nothing was found about, a member without a value, and a claim without any finding never hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from faultbed.harness.ledger.claims import Broken, Claim, Holds, Reason, Status, Unknown

__all__ = ["Finding", "settle"]

Why = Sequence[str]
"""Sentences that say why something is not shown; empty: it is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the evidence says about a claim.

    Attributes:
        conditions: for each condition, why it is not shown. A condition without an entry is unknown.
        members: for each member, why it has no value. A member without an entry is unknown. A member that the claim
            does not name counts as well: not every member (a restart, say) can be planned.
        refuted: the evidence shows the opposite of the claim, for this reason.
        undecided: the evidence is complete and does not decide, for this reason.
    """

    conditions: Mapping[str, Why] = field(default_factory=dict)
    members: Mapping[str, Why] = field(default_factory=dict)
    refuted: str | None = None
    undecided: str | None = None


def settle(claim: Claim, finding: Finding | None, settled: Mapping[str, Status]) -> Status:
    """Return the status of a claim.

    What a claim depends on comes first: it means nothing under a fault that is not proven. Then evidence against it,
    which counts even if it is incomplete. Then everything that is missing.

    Args:
        claim: the claim.
        finding: what the evidence says; None: no evidence arrived.
        settled: statuses of the claims on which it may depend. One that is not there does not hold.
    """
    if reasons := [*_dependencies(claim, settled)]:
        return Unknown(reasons=tuple(reasons))
    if finding is None:
        return Unknown(reasons=(Reason(code="no-evidence", subject=claim.name, because="nothing is known about it"),))
    if finding.refuted is not None:
        return Broken(because=finding.refuted)
    reasons = [*_missing(claim.conditions, finding.conditions), *_missing(claim.members, finding.members)]
    if finding.undecided is not None:
        reasons.append(Reason(code="undecided", subject=claim.name, because=finding.undecided))
    return Unknown(reasons=tuple(reasons)) if reasons else Holds()


def _dependencies(claim: Claim, settled: Mapping[str, Status]) -> list[Reason]:
    return [
        Reason(code="depends", subject=name, because=_because(settled.get(name)))
        for name in claim.depends
        if not isinstance(settled.get(name), Holds)
    ]


def _because(status: Status | None) -> str:
    """Return why the claim that another one depends on does not hold."""
    match status:
        case Broken(because=because):
            return because
        case Unknown(reasons=reasons) if reasons:
            return reasons[0].because
    return "nothing is known about it"


def _missing(names: Sequence[str], found: Mapping[str, Why]) -> list[Reason]:
    reasons = []
    for name in dict.fromkeys((*names, *found)):
        if name not in found:
            reasons.append(Reason(code="no-evidence", subject=name, because="nothing is known about it"))
        else:
            reasons += [Reason(code="not-shown", subject=name, because=why) for why in found[name]]
    return reasons
