"""`make bench`, or `python -m harness.bench`: the numbers of the README, measured here and now."""
