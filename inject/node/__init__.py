"""What runs on the target of a fault: standard library and what the node's distribution provides, nothing else."""
