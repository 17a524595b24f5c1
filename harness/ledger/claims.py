"""Claims: everything that a run is to show, made from its plan before the lab is touched.

A claim has *conditions*, each of which has to be shown, *members* (faults, ranks, flows), each of which needs a value,
and other claims on which it *depends*. Its status is Unknown until evidence settles it
(`faultbed.harness.ledger.settle`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["NOT_SETTLED", "Broken", "Claim", "Code", "Holds", "Reason", "Status", "Unknown"]

Code = Literal["not-settled", "no-evidence", "not-shown", "undecided", "depends"]
"""Why a claim is unknown: nothing has settled it yet; no evidence arrived; evidence does not show it; the value does
not decide; a claim that it depends on does not hold."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is to show.

    Attributes:
        name: unique among the claims of a run ("fired.uplink", "jct_ratio max").
        says: the claim as a sentence.
        conditions: what has to be shown, in the order in which it is reported.
        members: what needs a value each.
        depends: names of claims without which this one means nothing.
    """

    name: str
    says: str
    conditions: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a claim is unknown. `subject` is the condition, the member or the claim that is missing."""

    code: Code
    subject: str
    because: str = ""


class Holds(msgspec.Struct, frozen=True, tag_field="status", tag="holds"):
    """The evidence is complete and shows the claim. Only `faultbed.harness.ledger.settle` builds one."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag_field="status", tag="broken"):
    """The evidence shows the opposite."""

    because: str


class Unknown(msgspec.Struct, frozen=True, kw_only=True, tag_field="status", tag="unknown"):
    """Something is missing, so that the claim is neither shown nor refuted."""

    reasons: tuple[Reason, ...]


Status = Holds | Broken | Unknown

NOT_SETTLED = Unknown(reasons=(Reason(code="not-settled", subject="run", because="the run has not ended"),))
"""Status of every claim before the lab is touched. It stays if the run is killed."""
