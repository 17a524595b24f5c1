"""Effects of faults on goodput, and the times in which faults acted."""
