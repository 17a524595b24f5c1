"""Routing schemes on a switch: what the kernel is told, and what it says."""
