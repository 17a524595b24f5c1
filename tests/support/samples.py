"""How often a property is sampled: all samples in `make nightly`, a third in `make unit`.

It is for properties that many cases of one test sample, each on its own: together they still take hundreds.
"""

import os

ALL = "FAULTBED_ALL_SAMPLES" in os.environ


def samples(count: int) -> int:
    """Return how many of `count` samples to take now."""
    return count if ALL else -(-count // 3)
