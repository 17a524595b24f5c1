"""Charts of a report, and the data that they draw."""
