"""Evidence of the parts that every run has, and the run that is assembled from it."""
