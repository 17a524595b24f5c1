"""Sweeps: one experiment at many values of its parameters."""
