"""Routing schemes of a run: applied, compared with what the kernels decide, and removed."""
