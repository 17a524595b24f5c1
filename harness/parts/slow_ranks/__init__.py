"""Slow ranks, found while the job runs."""
