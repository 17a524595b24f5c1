"""The verdict of a run, and `verdict.json` for other tools (schema 2).

    {"schema": 2, "experiment": str, "seed": int, "lab": str, "started_utc": "2026-11-27T20:00:00+00:00",
     "verdict": "PASS|FAIL|INCONCLUSIVE|ERROR",
     "checks": [{"name", "verdict", "observed", "bound", "unit", "estimand": "fact|event|contrast|setting",
                 "rule": {"kind", "tail", "tolerance", "runs", ...}, "detail", "comparison": "min|max|equals", "why",
                 "meaning"}],
     "faults": [{"id", "kind", "target", "fidelity", "armed": {}, "fired": {"count", "first_ns", "last_ns",
                 "witness", "must_move": {}, "must_not_move": {}, "between_ns": [int, int]}, "cleared": {},
                 "on_time": {"planned_ns", "measured_ns", "tolerance_ns", ...},
                 "edges": [[int, bool]], "doubts": [str], "unproven": [str]}],
     "lab_state": "CLEAN|DIRTY",
     "attribution": [{"cause", "place", "name", "confidence", "evidence": [str]}],
     "left_out": [{"host", "why"}],
     "routing": {"scheme", "fidelity", "parameters", "armed", "decisions": {"asked", "agreed", "wrong"}, "marked",
                 "carried_packets", "cleared", "unproven"}}

`attribution` has causes and places found without the plan of faults (`faultbed.harness.attribution`); no check depends
on it. `left_out` are hosts that took no part, because preflight found them unfit or the user excluded them. `routing`
exists if the experiment chose a routing scheme.

Verdicts merge to the worst. From best to worst: PASS; INCONCLUSIVE (the run decides nothing); FAIL (the run decides,
and the result is bad); ERROR (the harness itself failed, so none of its other results can be relied on).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from faultbed.harness.exit_code import ExitCode
from faultbed.harness.findings import Attribution
from faultbed.harness.json_text import json_text
from faultbed.harness.ledger.statistics.decision import Estimand, Reason, Rule, Sign
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.kinds.kind import Fidelity

__all__ = [
    "Check",
    "ExcludedHost",
    "ExitCode",
    "LabState",
    "RoutingDecisions",
    "RoutingReceipt",
    "SchemeArmed",
    "SchemeCleared",
    "SchemeDeviation",
    "Verdict",
    "VerdictFile",
    "decode",
    "encode",
    "exit_code",
    "worst",
]

LabState = Literal["CLEAN", "DIRTY"]


class Verdict(enum.StrEnum):
    """The verdict of a check, or of a whole run; best first."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @property
    def is_conclusive(self) -> bool:
        """Whether it shows something: the numbers behind an INCONCLUSIVE or an ERROR show nothing."""
        return self in (Verdict.PASS, Verdict.FAIL)


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts; INCONCLUSIVE for none, because nothing was shown."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.INCONCLUSIVE)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a run.

    Attributes:
        name: of the check; a metric with two bounds has two checks of one name.
        verdict: of this check alone.
        observed: what was measured, in `unit`; None: nothing was.
        bound: what it is compared with, in `unit`; None: the check has no bound.
        unit: of both; empty: none.
        comparison: whether `bound` is a minimum, a maximum, or has to be equal; None: the check has no bound.
        estimand: what the number stands for.
        rule: how the number was decided.
        why: reason code of a check that its number leaves INCONCLUSIVE; None: another reason, or conclusive.
        meaning: what is measured and compared, in words.
        detail: what was seen in this run, in words.
    """

    name: str
    verdict: Verdict
    observed: float | int | str | None
    bound: float | int | str | None
    unit: str
    estimand: Estimand = "fact"
    rule: Rule = Rule(kind="value")
    detail: str = ""
    comparison: Sign | None = None
    why: Reason | None = None
    meaning: str = ""


class ExcludedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that a run went without, and why."""

    host: str
    why: str


class RoutingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of the switches' kernels before the workload, compared with the scheme's; `wrong` lists differences.

    `queried` decisions were requested from the kernels, and `agreed` of them are the scheme's.
    """

    queried: int = msgspec.field(name="asked")
    agreed: int
    wrong: tuple[str, ...] = ()


class SchemeArmed(msgspec.Struct, frozen=True, kw_only=True):
    """Readback of a routing scheme after it was applied: how many switches, rules and routes have it.

    A scheme that was not applied has no readback, and an `error` if there is a reason.
    """

    ok: bool = False
    at_ns: int | msgspec.UnsetType | None = msgspec.UNSET
    switches: int | msgspec.UnsetType = msgspec.UNSET
    rules: int | msgspec.UnsetType = msgspec.UNSET
    routes: int | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class SchemeCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Readback of a routing scheme after its removal, with the actor as in `faultbed.inject.evidence.receipt.Cleared`.

    `copied` counts the next hops that the agent changed after BGP had changed them.
    """

    ok: bool = False
    by: str = "holder"
    at_ns: int | None = None
    copied: int = 0
    error: str | msgspec.UnsetType = msgspec.UNSET


class SchemeDeviation(msgspec.Struct, frozen=True, kw_only=True):
    """A time of the workload, in seconds of the run, at which a switch did not route as its scheme was installed.

    `to_s` None: it lasted until the scheme was removed. `cause`: another program changed the scheme, BGP lost next
    hops, a setting of ECMP differed, or changes could not be watched. `fault` is the name of the fault that explains
    lost next hops or a setting; empty: none.
    """

    switch: str
    cause: Literal["foreign", "bgp", "setting", "unwatched"]
    what: str
    from_s: float
    to_s: float | None
    fault: str = ""


class FlowPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A placement of flows that a controller wrote to the switches and read back.

    Attributes:
        at_ns: controller time at which the cycle began.
        done_ns: controller time after the readback.
        cause: the begin of the run, the end of a cycle, or a change that a switch reported.
        failed: links between switches that carried nothing.
        keys: source RNICs and destination hosts that were placed.
        moved: keys that had another uplink before.
        without_path: keys that no live link carries.
        bound_ratio: bytes of the fullest link over the bytes of the fullest rack divided by its live uplinks; None: no
            key has any demand.
    """

    at_ns: int
    done_ns: int
    cause: Literal["start", "cycle", "change"]
    failed: tuple[str, ...] = ()
    keys: int = 0
    moved: int = 0
    without_path: int = 0
    bound_ratio: float | None = None


class FlowPlacements(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller of a placed scheme did while the scheme was applied.

    `cycles` ended without an error; `largest_gap_s` is the longest time from one to the next, or to the end. `errors`
    are those of the other cycles. A cycle that left all rules as they were has no placement.
    """

    cycles: int
    largest_gap_s: float | None
    placements: tuple[FlowPlacement, ...] = ()
    errors: tuple[str, ...] = ()


class RoutingReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the routing scheme of a run.

    `marked` are the packets that each switch has marked; None: the scheme marks none. `carried_packets` are those that
    left by ports among which the scheme chooses, while the workload ran; None: not read. `deviations` are the times at
    which a switch did not route by it. `placements` are those of the scheme's controller; None: the scheme has none.
    `unproven` are the reasons why it does not prove that the scheme routed the
    workload.
    """

    scheme: str
    fidelity: Fidelity
    parameters: dict[str, Any] = {}
    armed: SchemeArmed
    decisions: RoutingDecisions
    marked: dict[str, int] | None = None
    carried_packets: int | None = None
    deviations: tuple[SchemeDeviation, ...] = ()
    placements: FlowPlacements | None = None
    cleared: SchemeCleared
    unproven: tuple[str, ...] = ()


class VerdictFile(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict.json`. `started_utc` is when the run began (ISO 8601)."""

    schema: Literal[2] = 2
    experiment: str
    seed: int
    lab: str
    started_utc: str = ""
    verdict: Verdict
    checks: tuple[Check, ...]
    faults: tuple[Receipt, ...]
    lab_state: LabState
    attribution: tuple[Attribution, ...] = ()
    left_out: tuple[ExcludedHost, ...] = ()
    routing: RoutingReceipt | msgspec.UnsetType = msgspec.UNSET


def exit_code(verdict: Verdict, lab_state: LabState) -> ExitCode:
    """Return the command line's exit code. A DIRTY lab outranks every verdict, because it needs attention first."""
    return ExitCode.DIRTY if lab_state == "DIRTY" else ExitCode[verdict.name]


def encode(verdict: VerdictFile) -> bytes:
    """Return the bytes of `verdict.json`: indented, in the order of the contract, ending in a newline."""
    return json_text(verdict)


def decode(content: bytes) -> VerdictFile:
    """Read `verdict.json`.

    Raises:
        msgspec.ValidationError: not a verdict of schema 2.
        ValueError: the verdict is better than its own checks, or PASS although a fault is not proven.
    """
    verdict = msgspec.json.decode(content, type=VerdictFile)
    bad = next((check for check in verdict.checks if _RANK[check.verdict] > _RANK[verdict.verdict]), None)
    if bad is not None:
        raise ValueError(f"verdict: {verdict.verdict} although {bad.name} is {bad.verdict}")
    if verdict.verdict is Verdict.PASS:
        unproven = next((fault for fault in verdict.faults if fault.unproven), None)
        if unproven is not None:
            raise ValueError(f"verdict: PASS although {unproven.id} is not proven: {unproven.unproven[0]}")
    return verdict
