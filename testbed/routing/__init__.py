"""Routing schemes: how a fabric shares load over equal-cost paths. Pure functions."""
