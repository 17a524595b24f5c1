"""Metrics of a run with their confidence intervals: timeline, phases, routing, slow ranks and link loads. Pure."""
