"""Mutations of recorded runs, each of which loses evidence or repeats it. They never change a value or the plan.

They are generated from the types: a stream is a tuple or a mapping of records, or a record that may be absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from faultbed.harness.judge import judge, observed_of
from faultbed.harness.ledger.claims import Status, Unknown
from faultbed.harness.ledger.ledger import Ledger
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.part import planned_by

if TYPE_CHECKING:
    from recorded_runs import Recorded

NO_STREAM = {
    "errors": "what the harness itself reports about the run; it does not arrive from elsewhere",
    "failure": "a part of the workload's result, which arrives whole or not at all",
    "twin_failure": "a part of the twin's result, which arrives whole or not at all",
    "accelerator": "a setting of the lab",
    "rate_scale": "a setting of the lab",
    "ranks": "a part of the plan",
    "workload": "a part of the plan",
    "reads": "times of the harness itself",
    "lab_diff": "a part of the comparison of the lab",
    "summary": "computed from the series",
}
"""Fields of a run that are no stream, each with the reason."""


def mutations(recorded: Recorded) -> Iterator[tuple[str, Recorded]]:
    """Yield every mutation of a run, with its name."""
    defaults = dict(
        zip(reversed(recorded.run.__struct_fields__), reversed(recorded.run.__struct_defaults__), strict=False)
    )
    for field in recorded.run.__struct_fields__:
        if field not in NO_STREAM:
            value = getattr(recorded.run, field)
            for name, lost in _less(value, may_be_absent=defaults.get(field, value) is None):
                changed = msgspec.structs.replace(recorded.run, **{field: lost})
                yield f"{field}: {name}", replace(recorded, run=changed)
    for index, evidence in enumerate(recorded.sealed):
        others = recorded.sealed[:index] + recorded.sealed[index + 1 :]
        kind = type(evidence).__name__
        yield f"{kind}: absent", replace(recorded, sealed=others)
        for field in evidence.__struct_fields__:
            for name, lost in _less(getattr(evidence, field), may_be_absent=False):
                try:
                    changed = msgspec.structs.replace(evidence, **{field: lost})
                except ValueError:  # it is refused when it is read
                    continue
                yield f"{kind}.{field}: {name}", replace(recorded, sealed=(*others, changed))


def _less(value: object, *, may_be_absent: bool) -> Iterator[tuple[str, object]]:
    """Yield what is left of a stream: nothing, its begin, its end, all but one record, one record twice."""
    match value:
        case tuple() if value and isinstance(value[0], (msgspec.Struct, tuple)):
            yield "absent", ()
            if len(value) > 1:
                yield "without its begin", value[1:]
                yield "without its end", value[:-1]
            yield "last record twice", (*value, value[-1])
        case dict() if value:
            yield "absent", {}
            first, *others = value
            yield f"without {first}", {name: value[name] for name in others}
        case msgspec.Struct() | int() | float() if may_be_absent:
            yield "absent", None


def ledger_of(recorded: Recorded) -> Ledger:
    """Judge a run as if it had been read from its files."""
    sealed = Sealed().having(*recorded.sealed)
    observed = observed_of(recorded.run, sealed)
    before = planned_by(recorded.plan)
    return judge(before=before, run=recorded.run, observed=observed, sealed=sealed).ledger


def gained(whole: dict[str, Status], less: dict[str, Status]) -> list[str]:
    """Return the claims about which a run with less evidence knows something else, or says nothing at all."""
    return sorted(
        claim
        for claim in {*whole, *less}
        if not isinstance(less.get(claim, whole.get(claim)), Unknown)
        and type(less.get(claim)) is not type(whole.get(claim))
    ) + sorted(claim for claim, status in whole.items() if isinstance(status, Unknown) and claim not in less)
