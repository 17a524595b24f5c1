"""The data that arrived are those that were sent, whether or not an expectation names them."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Planned, Row, View
from faultbed.harness.record.measurements import Measurements

__all__ = ["claims", "found", "row"]

_BYTES, _ELEMENTS, _TWIN = "wrong_bytes", "wrong_elements", "twin_wrong_elements"
_COMPARED = "bytes of every flow were compared"


def claims(_planned: Planned) -> Iterator[Claim]:
    """Yield nothing: what is compared follows from the workload that ran (`found`)."""
    yield from ()


def found(view: View) -> Iterator[Claim]:
    """Yield a claim about bytes if a flow was to compare them, and one about elements if some were wrong.

    An expectation may say how many elements may be wrong. Those of the fault-free twin may never be.
    """
    if view.run.checked_bytes is not None:
        says = "No byte of the flows' messages differs from those that were sent"
        yield Claim(name=_BYTES, says=says, conditions=(_COMPARED,))
    named = {expectation.metric.name for expectation in view.planned.expectations}
    if _ELEMENTS not in named and _wrong(view):
        yield Claim(name=_ELEMENTS, says="No element of a result is wrong; the experiment has no bound for them")
    if _wrong_in_twin(view.run):
        yield Claim(name=_TWIN, says="No element of the fault-free twin's results is wrong")


def row(claim: Claim, view: View) -> Row | None:
    """Return how many bytes or elements were wrong."""
    run = view.run
    if claim.name == _BYTES:
        unchecked = f", but none of {run.unchecked_flows[0]}" if run.unchecked_flows else ""
        detail = f"{run.checked_bytes or 0:,} bytes compared{unchecked}"
        finding = Finding(
            conditions={_COMPARED: () if run.checked_bytes and not unchecked else (detail,)},
            refuted=f"{run.wrong_bytes} bytes were wrong" if run.wrong_bytes else None,
        )
        return Row(finding=finding, observed=run.wrong_bytes, bound=0, comparison="equals", unit="count", detail=detail)
    wrong = _wrong(view) if claim.name == _ELEMENTS else _wrong_in_twin(run)
    observation = view.observed.metrics.get(_ELEMENTS)
    detail = "no fault was there to cause them" if claim.name == _TWIN or observation is None else observation.detail
    finding = Finding(refuted=f"{wrong} elements were wrong" if wrong else None)
    return Row(finding=finding, observed=wrong, bound=0, comparison="equals", unit="count", detail=detail)


def _wrong(view: View) -> int:
    observation = view.observed.metrics.get(_ELEMENTS)
    return int(observation.value or 0) if observation is not None and not isinstance(observation.value, str) else 0


def _wrong_in_twin(run: Measurements) -> int:
    return sum(step.wrong for rank in run.twin or () for step in rank.iterations)
