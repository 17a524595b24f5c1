"""Routing schemes on a lab: held under a lease, as faults are."""
