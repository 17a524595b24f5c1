"""Answers of a fault's holder (`faultbed.inject.node.holder`), decoded as they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from faultbed.testbed.errors import FaultError
from faultbed.testbed.observe.clock import ClockOffset

__all__ = ["NOTHING", "Change", "Observation", "Readiness", "Removal", "decoded"]

T = TypeVar("T", bound=msgspec.Struct)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder has seen of its fault. Times are the target's; `in_controller_time` converts them.

    Attributes:
        on: whether the fault is in place now.
        count: hits so far; None: nothing counts them.
        between_ns: two moments between which it fired first.
        passed: packets from which a share, or every n-th, was taken; None: the fault selects none.
        edges: (time, on) of every confirmed change.
        changes: (begin, end, on) of every confirmed change.
        late_ns: how much too late the fault was armed.
        clear_ns: when the holder was told to clear the fault; None: it was not.
        lost: whether something else had ended the fault before it was removed.
        unread: why its state could not be read just before it was removed.
        unseen: why nothing shows whether something else ended it.
        patience_s: how much longer than usual its changes may take.
        armed_at_ns, armed_readback: time and readback of its first change.
        failure: why it could not be armed.
    """

    state: Literal["idle", "prepared", "scheduled", "active", "over"]
    on: bool = False
    count: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    between_ns: tuple[int, int] | None = None
    passed: int | None = None
    edges: tuple[tuple[int, bool], ...] = ()
    changes: tuple[tuple[int, int, bool], ...] = ()
    late_ns: int = 0
    clear_ns: int | None = None
    lost: bool = False
    unread: str | None = None
    unseen: str | None = None
    patience_s: float = 0.0
    armed_at_ns: int | None = None
    armed_readback: dict[str, Any] | None = None
    failure: str | None = None

    def in_controller_time(self, offset: ClockOffset) -> Observation:
        """Convert the times to controller time. `between_ns` is widened by the error of the clock offset."""

        def at(time_ns: int | None) -> int | None:
            return None if time_ns is None else offset.to_controller(time_ns)

        between_ns = self.between_ns
        if between_ns is not None:
            low_ns, high_ns = map(offset.to_controller, between_ns)
            between_ns = (low_ns - offset.error_ns, high_ns + offset.error_ns)
        return msgspec.structs.replace(
            self,
            first_ns=at(self.first_ns),
            last_ns=at(self.last_ns),
            between_ns=between_ns,
            edges=tuple((offset.to_controller(at_ns), on) for at_ns, on in self.edges),
            changes=tuple(
                (offset.to_controller(begin_ns), offset.to_controller(end_ns), on)
                for begin_ns, end_ns, on in self.changes
            ),
            clear_ns=at(self.clear_ns),
            armed_at_ns=at(self.armed_at_ns),
        )


NOTHING = Observation(state="idle")
"""What is known of a fault whose holder did not answer."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `prepare`: the target's state before the change."""

    before: dict[str, Any]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `arm` and `update`: target time of the change, and its readback; without one it is only scheduled."""

    at_ns: int
    readback: dict[str, Any] | None = None


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `clear`. `at_ns` is target time; None: the change was not removed, or was never made."""

    ok: bool
    at_ns: int | None
    readback: dict[str, Any]
    error: str | None = None
    observed: Observation


def decoded(answer: Mapping[str, Any], kind: type[T], *, where: str) -> T:
    """Decode the answer of a holder.

    Raises:
        FaultError: it is no such answer.
    """
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        problem = f"{where}: its holder's answer is not understood: {error}; run `faultbed heal`"
        raise FaultError(problem) from error
