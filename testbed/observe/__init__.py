"""What a lab counts, captures and looks like: counters, telemetry, packets, clocks and fingerprints."""
