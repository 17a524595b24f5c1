"""`make bench`, or `python -m harness.bench`: the numbers of docs/numbers.md, measured here and now."""
