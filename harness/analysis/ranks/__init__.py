"""Slow ranks: fail-slow detection, and stragglers that a fault causes."""
