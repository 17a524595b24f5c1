"""Counters and changes of the machines."""
