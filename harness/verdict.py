"""The verdict of a run, and `verdict.json` as the world outside reads it (schema 1).

    {"schema": 1, "experiment": str, "seed": int, "lab": str, "verdict": "PASS|FAIL|INCONCLUSIVE|ERROR",
     "checks": [{"name", "verdict", "observed", "bound", "unit", "rule", "detail"}],
     "faults": [{"id", "kind", "target", "fidelity", "armed": {}, "fired": {"count", "first_ns", "last_ns",
                 "witness", "must_move": {}, "must_not_move": {}, "between_ns": [int, int]}, "cleared": {},
                 "on_time": {"planned_ns", "measured_ns", "tolerance_ns", ...}, "unproven": [str]}],
     "lab_state": "CLEAN|DIRTY",
     "attribution": [{"cause", "place", "name", "confidence", "evidence": [str]}],
     "left_out": [{"host", "why"}],
     "routing": {"scheme", "fidelity", "parameters", "armed", "decisions": {"asked", "agreed", "wrong"}, "marked",
                 "carried_packets", "cleared", "unproven"}}

`attribution` is what the measurements say without the plan of faults (`harness.attribution`); no check rests on it.
`left_out` are hosts that took no part, because preflight found them unfit or somebody named them. `routing` is there
when the experiment chose a routing scheme.

Verdicts merge to the worst: PASS, then INCONCLUSIVE (we cannot tell), then FAIL (we can tell, and it is bad),
then ERROR (the harness itself broke, so nothing it says about the rest can be relied on).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from harness.findings import Finding
from harness.json_text import json_text
from inject.evidence.firing_times import OnTime

__all__ = [
    "Check",
    "ExitCode",
    "Fidelity",
    "Fired",
    "LabState",
    "LeftOut",
    "Receipt",
    "RoutingDecisions",
    "RoutingReceipt",
    "Verdict",
    "VerdictFile",
    "decode",
    "encode",
    "exit_code",
    "unproven",
    "worst",
]

LabState = Literal["CLEAN", "DIRTY"]
Fidelity = Literal["real", "emulated", "modelled"]


class Verdict(enum.StrEnum):
    """What a check, or a whole run, comes to. In order, best first."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @property
    def is_conclusive(self) -> bool:
        """Whether it shows something: the numbers behind an INCONCLUSIVE or an ERROR show nothing."""
        return self in (Verdict.PASS, Verdict.FAIL)


class ExitCode(enum.IntEnum):
    """What the command line ends with."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    ERROR = 3
    USAGE = 4
    DIRTY = 5


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Merge verdicts: the worst one. Nothing at all is INCONCLUSIVE, because nothing was shown."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.INCONCLUSIVE)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a run. `observed` and `bound` are in `unit`; `rule` says how they compare."""

    name: str
    verdict: Verdict
    observed: float | int | str | None
    bound: float | int | str | None
    unit: str
    rule: str
    detail: str = ""


class Fired(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The proof that a fault happened. Times are the controller's monotonic clock; None: it never fired.

    `first_ns` is when it was first seen to have fired; it did so between the two moments of `between_ns`, in which the
    clocks' error is allowed for. None: it never fired, or the run is older than that.
    `must_move` and `must_not_move` map a counter to how much it moved while the fault was in place. `passed` is the
    number of packets that a share, or every n-th, was taken of; None: the fault takes none.
    """

    count: int
    first_ns: int | None
    last_ns: int | None
    witness: str | None
    must_move: dict[str, float | int | None]
    must_not_move: dict[str, float | int | None]
    between_ns: tuple[int, int] | None = None
    passed: int | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one fault of a run.

    `armed` and `cleared` are the readbacks after the change and after its removal, as the fault kind gives
    them, with two keys that every kind has: `ok` (bool) and `at_ns` (controller's monotonic clock).
    `on_time` is how long it was on, and was to be (`inject.evidence.firing_times`); None: nothing was read, or the run
    is older than that. `unproven` are the reasons why it does not prove its fault.
    """

    id: str
    kind: str
    target: str
    fidelity: Fidelity
    armed: dict[str, Any]
    fired: Fired
    cleared: dict[str, Any]
    on_time: OnTime | None = None
    unproven: tuple[str, ...] = ()


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A host that a run went without, and why."""

    host: str
    why: str


class RoutingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """What the switches' kernels answered before the workload, against the scheme: `wrong` has one sentence each."""

    asked: int
    agreed: int
    wrong: tuple[str, ...] = ()


class RoutingReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the routing scheme of a run.

    `armed` and `cleared` are the readbacks after it was applied and after it was removed, each with `ok`. `marked` are
    the packets that each switch has marked; None: the scheme marks none. `carried_packets` are those that left by
    ports among which the scheme chooses, while the workload ran; None: not read. `unproven` are the reasons why it
    does not prove that the scheme routed the workload.
    """

    scheme: str
    fidelity: Fidelity
    parameters: dict[str, Any] = {}
    armed: dict[str, Any]
    decisions: RoutingDecisions
    marked: dict[str, int] | None = None
    carried_packets: int | None = None
    cleared: dict[str, Any]
    unproven: tuple[str, ...] = ()


class VerdictFile(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict.json`."""

    schema: Literal[1] = 1
    experiment: str
    seed: int
    lab: str
    verdict: Verdict
    checks: tuple[Check, ...]
    faults: tuple[Receipt, ...]
    lab_state: LabState
    attribution: tuple[Finding, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    routing: RoutingReceipt | msgspec.UnsetType = msgspec.UNSET


def unproven(receipt: Receipt | None) -> tuple[str, ...]:
    """Why this receipt does not prove that the fault happened; empty when it does."""
    if receipt is None:
        return ("it was never tried",)
    fired = receipt.fired
    problems = []
    if receipt.armed.get("ok") is not True:
        problems.append("no readback shows that it was armed")
    if fired.count <= 0 or fired.first_ns is None:
        problems.append(f"it never fired ({fired.witness or 'no witness'} counts {fired.count})")
    if fired.must_move and not any(delta is not None and delta > 0 for delta in fired.must_move.values()):
        problems.append(f"what must move did not ({', '.join(fired.must_move)})")
    # Some kinds move no counter: a second look while it was on saw the state that it makes, and its value is judged
    # where it was read (`inject.evidence.receipt`).
    if not fired.must_move and fired.witness not in receipt.armed.get("while_on", {}):
        problems.append("nobody but its holder has seen it: no counter moved, and no state was looked at")
    for name, delta in fired.must_not_move.items():
        if delta is None:
            problems.append(f"{name} must not move and could not be read")
        elif delta:
            problems.append(f"{name} must not move and moved by {delta:g}")
    if receipt.cleared.get("ok") is not True:
        problems.append("no readback shows that it was cleared")
    return tuple(problems)


def exit_code(verdict: Verdict, lab_state: LabState) -> ExitCode:
    """Return the command line's exit code. A DIRTY lab outranks every verdict, because it needs attention first."""
    return ExitCode.DIRTY if lab_state == "DIRTY" else ExitCode[verdict.name]


def encode(verdict: VerdictFile) -> bytes:
    """`verdict.json` as bytes: indented, in the order of the contract, ending in a newline."""
    return json_text(verdict)


def decode(content: bytes) -> VerdictFile:
    """Read `verdict.json`.

    Raises:
        msgspec.ValidationError: not a verdict of schema 1.
    """
    return msgspec.json.decode(content, type=VerdictFile)
