"""Mutations of recorded runs, each of which loses evidence or repeats it. They never change a value or the plan.

They are generated from the types: a file of evidence is there or not, and a stream in it is a tuple or a mapping of
records, or a record that may be absent. A single value is no stream: a file is written whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

from faultbed.harness.judge import judge, observed_of, planned_ledger
from faultbed.harness.ledger.claims import Status, Unknown
from faultbed.harness.ledger.ledger import Ledger
from faultbed.harness.ledger.sealed import Checked, Kind, Phase, Sealed
from faultbed.harness.parts.part import planned_by
from faultbed.harness.record.evidence.run_evidence import RunEvidence, assembled

if TYPE_CHECKING:
    from recorded_runs import Recorded

Files = Mapping[tuple[Phase, Kind], msgspec.Struct]
"""The evidence of a run, as its files hold it."""


def files_of(recorded: Recorded) -> Files:
    """Return the evidence of a run, by pass and type."""
    of_run = {field.name: getattr(recorded.run, field.name) for field in fields(RunEvidence)}
    twin = of_run.pop("twin")
    calibrated = {("calibrate", type(one)): one for one in (of_run.pop("emulation"),) if one is not None}
    measured = {("measured", type(one)): one for one in (*of_run.values(), *recorded.sealed) if one is not None}
    files = {**calibrated, **measured}
    return files if twin is None else {**files, ("twin", type(twin)): twin}


def mutations(recorded: Recorded) -> Iterator[tuple[str, Files]]:
    """Yield what is left of the evidence of a run after every mutation, with its name."""
    files = files_of(recorded)
    for place, evidence in files.items():
        phase, kind = place
        yield f"{phase}/{kind.__name__}: absent", {other: one for other, one in files.items() if other != place}
        defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
        for field in kind.__struct_fields__:
            value = getattr(evidence, field)
            for name, lost in _less(value, may_be_absent=defaults.get(field, value) is None):
                try:
                    less = msgspec.structs.replace(evidence, **{field: lost})
                    if isinstance(less, Checked):
                        less.refuse_contradictions()
                except ValueError:  # it is refused when it is read
                    continue
                yield f"{phase}/{kind.__name__}.{field}: {name}", {**files, place: less}


def _less(value: object, *, may_be_absent: bool) -> Iterator[tuple[str, object]]:
    """Yield what is left of a stream: nothing, without begin, end or middle, one record twice."""
    match value:
        case tuple() if value and isinstance(value[0], (msgspec.Struct, tuple)):
            yield "absent", ()
            if len(value) > 1:
                yield "without its begin", value[1:]
                yield "without its end", value[:-1]
                yield "with a gap", (*value[: len(value) // 2], *value[len(value) // 2 + 1 :])
            yield "last record twice", (*value, value[-1])
        case dict() if value and all(isinstance(one, dict) for one in value.values()):
            yield "absent", {}
            first, *others = value
            yield f"without {first}", {name: value[name] for name in others}
        case msgspec.Struct() if may_be_absent:
            yield "absent", None


def ledger_of(recorded: Recorded, files: Files) -> Ledger:
    """Judge a run as if its files had been read. Without a file that every run has, it stays as it was planned."""
    sealed, before = Sealed(files), planned_by(recorded.plan)
    try:
        run = assembled(sealed)
    except KeyError:
        return planned_ledger(before)
    return judge(before=before, run=run, observed=observed_of(run, sealed), sealed=sealed).ledger


def gained(whole: dict[str, Status], less: dict[str, Status]) -> list[str]:
    """Return the claims about which a run with less evidence knows something else, or says nothing at all."""
    return sorted(
        claim
        for claim in {*whole, *less}
        if not isinstance(less.get(claim, whole.get(claim)), Unknown)
        and type(less.get(claim)) is not type(whole.get(claim))
    ) + sorted(claim for claim, status in whole.items() if isinstance(status, Unknown) and claim not in less)
