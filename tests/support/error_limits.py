"""How many wrong intervals of so many are chance."""

from __future__ import annotations

import numpy as np
from scipy import special


def most_errors(series, allowed):
    """The number of errors that a right interval exceeds once in a million."""
    return int(np.argmax(special.bdtrc(np.arange(series), series, allowed) < 1e-6))
