"""Faults of a run: prepared, armed and cleared at their times, and ended early by the live guard."""
