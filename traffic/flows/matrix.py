"""Traffic matrices: the pairs of RNICs that form a pattern. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import UsageError

__all__ = ["PATTERNS", "pairs"]

PATTERNS = ("incast", "outcast", "permutation", "all-pairs")
MIN_ENDS = 2


def pairs(pattern: str, ends: Sequence[str], *, shift: int = 0) -> tuple[tuple[str, str], ...]:
    """Return the (src, dst) of every flow.

    incast: all RNICs send to the first of `ends`. outcast: the first one sends to all others. permutation: each RNIC
    sends to the one `shift` positions further on and receives from one (0: half of the list, which is another rack if
    there are two). all-pairs: each RNIC sends to every other one.

    Raises:
        UsageError: the pattern is unknown, there are too few ends, or the shift maps each RNIC to itself.
    """
    count = len(ends)
    if pattern not in PATTERNS:
        raise UsageError(f'no pattern "{pattern}"; there is {", ".join(PATTERNS)}')
    if count < MIN_ENDS:
        raise UsageError(f"{pattern} needs at least {MIN_ENDS} RNICs, got {count}")
    match pattern:
        case "incast":
            return tuple((src, ends[0]) for src in ends[1:])
        case "outcast":
            return tuple((ends[0], dst) for dst in ends[1:])
        case "permutation":
            step = shift or max(1, count // 2)
            if step % count == 0:
                raise UsageError(
                    f"a permutation of {count} RNICs with shift {step} maps each RNIC to itself; use another shift"
                )
            return tuple((src, ends[(index + step) % count]) for index, src in enumerate(ends))
        case _:
            return tuple((src, dst) for src in ends for dst in ends if src != dst)
