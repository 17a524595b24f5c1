"""`make bench`, or `python -m bench`: the numbers of docs/numbers.md, measured here and now."""
