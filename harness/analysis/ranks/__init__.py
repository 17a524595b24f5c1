"""Which ranks are slow: fail-slow detection, and stragglers that a fault made."""
