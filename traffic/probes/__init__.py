"""Probes on every path of a fabric, their round trips, and the locations of loss and delay."""
