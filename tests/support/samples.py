"""How often a property is sampled: all samples in `make nightly`, a fifth in `make unit`, but at least five."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

ALL = "FAULTBED_ALL_SAMPLES" in os.environ
LEAST = 5


def samples(count: int) -> int:
    """Return how many of `count` samples to take now."""
    return count if ALL else min(count, max(LEAST, -(-count // 5)))


def some_of(cases: Sequence[Any], count: int) -> list[Any]:
    """Mark all but the first `count` cases of a table as slow: `make nightly` runs them, `make unit` does not."""
    rest = (case if isinstance(case, tuple) else (case,) for case in cases[count:])
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
