"""What workloads use of a machine, whoever started them: queue pairs, and ports that their packets cross."""
