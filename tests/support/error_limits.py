"""Limits of the number of wrong intervals in a test of intervals."""

from __future__ import annotations

import numpy as np
from scipy import special


def most_errors(series, allowed):
    """Return the number of errors that a correct interval exceeds with a probability of one in a million."""
    return int(np.argmax(special.bdtrc(np.arange(series), series, allowed) < 1e-6))
