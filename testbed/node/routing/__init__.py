"""Routing schemes on a switch: configuration of the kernel, and its notifications."""
