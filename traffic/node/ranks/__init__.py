"""Engine tasks of ranks: programs of collectives, their memory and their verified data."""
