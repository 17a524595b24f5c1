"""Several runs of one experiment: repeated, pooled, decided early, and shrunk."""
