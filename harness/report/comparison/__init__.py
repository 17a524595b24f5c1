"""Comparison of two runs of one experiment, and its page."""
