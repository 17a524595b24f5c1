"""Commands about experiments and faults."""
