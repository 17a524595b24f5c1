"""Counters, telemetry, packets, clocks and fingerprints of a lab."""
