"""The page of a sweep: its table, and its plot."""
