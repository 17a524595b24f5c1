"""What runs on a host: pyverbs, numpy and the standard library, nothing else."""
