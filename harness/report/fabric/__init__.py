"""Drawings of the fabric and of its states during a run."""
