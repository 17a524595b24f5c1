"""The data that arrived are those that were sent, whether or not an expectation names them."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View

__all__ = ["PART"]

_BYTES, _ELEMENTS = "wrong_bytes", "wrong_elements"
_COMPARED = "bytes of every flow were compared"


_BYTES_CLAIM = Claim(
    name=_BYTES, says="No byte of the flows' messages differs from those that were sent", conditions=(_COMPARED,)
)


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim about bytes if the flows are to compare them."""
    if planned.plan.workload.get("check") is True:
        yield _BYTES_CLAIM


def _found(view: View) -> Iterator[Claim]:
    """Yield a claim about bytes if a flow compared them, and one about elements if some were wrong.

    An expectation may say how many elements may be wrong.
    """
    if view.run.workload.checked_bytes is not None:
        yield _BYTES_CLAIM
    named = {expectation.metric.name for expectation in view.planned.expectations}
    if _ELEMENTS not in named and _wrong(view):
        yield Claim(name=_ELEMENTS, says="No element of a result is wrong; the experiment has no bound for them")


def _row(claim: Claim, view: View) -> Row | None:
    """Return how many bytes or elements were wrong."""
    run = view.run
    if claim.name == _BYTES:
        if run.workload.checked_bytes is None:
            return None
        unchecked = f", but none of {run.workload.unchecked_flows[0]}" if run.workload.unchecked_flows else ""
        detail = f"{run.workload.checked_bytes or 0:,} bytes compared{unchecked}"
        finding = Finding(
            conditions={_COMPARED: () if run.workload.checked_bytes and not unchecked else (detail,)},
            refuted=f"{run.workload.wrong_bytes} bytes were wrong" if run.workload.wrong_bytes else None,
        )
        return Row(
            finding=finding,
            observed=run.workload.wrong_bytes,
            bound=0,
            comparison="equals",
            unit="count",
            detail=detail,
        )
    wrong, observation = _wrong(view), view.observed.metrics.get(_ELEMENTS)
    detail = "" if observation is None else observation.detail
    finding = Finding(refuted=f"{wrong} elements were wrong" if wrong else None)
    return Row(finding=finding, observed=wrong, bound=0, comparison="equals", unit="count", detail=detail)


def _wrong(view: View) -> int:
    observation = view.observed.metrics.get(_ELEMENTS)
    return int(observation.value or 0) if observation is not None and not isinstance(observation.value, str) else 0


PART = Part(name="data", claims=_claims, found=_found, row=_row)
