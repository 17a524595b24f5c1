"""Engine tasks of flows and probes."""
