"""The faults of an experiment: prepared, armed and cleared at their times, each with its receipt and its claim."""
