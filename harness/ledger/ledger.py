"""The ledger of a run: its claims with their statuses, and the verdict as a fold over them.

`ledger.json` is written before the lab is touched, with every claim unknown, and again when the run is judged. A run
that was killed in between therefore leaves a ledger that folds to INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from faultbed.harness.json_text import json_text
from faultbed.harness.ledger.claims import NOT_SETTLED, Broken, Claim, Holds, Status
from faultbed.harness.verdict import Verdict, worst

__all__ = ["Entry", "Ledger", "decode", "encode", "fold", "planned", "verdict_of"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A claim and its status."""

    claim: Claim
    status: Status = NOT_SETTLED


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """`ledger.json`. `errors` are those of the harness itself: any of them makes the run an ERROR."""

    schema: Literal[1] = 1
    entries: tuple[Entry, ...]
    errors: tuple[str, ...] = ()

    @property
    def statuses(self) -> Mapping[str, Status]:
        """Statuses by the names of the claims."""
        return {entry.claim.name: entry.status for entry in self.entries}


def planned(claims: Iterable[Claim]) -> Ledger:
    """Return the ledger of a run that has not begun: every claim is unknown.

    Raises:
        ValueError: two claims have one name, or a claim depends on one that is not planned.
    """
    entries = tuple(Entry(claim=claim) for claim in claims)
    names = [entry.claim.name for entry in entries]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two claims are named {min(repeated)}")
    for entry in entries:
        if unplanned := set(entry.claim.depends) - {*names}:
            raise ValueError(f"{entry.claim.name} depends on {min(unplanned)}, which is not claimed")
    return Ledger(entries=entries)


def verdict_of(status: Status) -> Verdict:
    """Return what the status of one claim means for a run."""
    if isinstance(status, Holds):
        return Verdict.PASS
    return Verdict.FAIL if isinstance(status, Broken) else Verdict.INCONCLUSIVE


def fold(ledger: Ledger) -> Verdict:
    """Return the verdict of a run.

    ERROR after an error of the harness; else FAIL if a claim is broken; else INCONCLUSIVE if one is unknown, or if
    there is none; else PASS.
    """
    return Verdict.ERROR if ledger.errors else worst(verdict_of(entry.status) for entry in ledger.entries)


def encode(ledger: Ledger) -> bytes:
    """Return the bytes of `ledger.json`."""
    return json_text(ledger)


def decode(content: bytes) -> Ledger:
    """Read `ledger.json`.

    Raises:
        msgspec.ValidationError: the content is no ledger of schema 1.
    """
    return msgspec.json.decode(content, type=Ledger)
