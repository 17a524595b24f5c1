"""Traffic matrices: which pairs of RNICs a pattern means. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import UsageError

__all__ = ["PATTERNS", "pairs"]

PATTERNS = ("incast", "outcast", "permutation", "all-pairs")
MIN_ENDS = 2


def pairs(pattern: str, ends: Sequence[str], *, shift: int = 0) -> tuple[tuple[str, str], ...]:
    """The (src, dst) of every flow.

    incast: all others to the first of `ends`. outcast: the first one to all others. permutation: everybody sends to the
    one `shift` places on and receives from one (0: half way round, which is another rack where there are two).
    all-pairs: everybody to everybody.

    Raises:
        UsageError: no such pattern, too few ends, or a shift that brings everybody back to itself.
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
            by = shift or max(1, count // 2)
            if by % count == 0:
                raise UsageError(f"a permutation of {count} RNICs by {by} places sends nothing anywhere")
            return tuple((src, ends[(index + by) % count]) for index, src in enumerate(ends))
        case _:
            return tuple((src, dst) for src in ends for dst in ends if src != dst)
