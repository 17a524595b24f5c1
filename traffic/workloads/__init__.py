"""Workloads on ranks: collectives, training, inference and ranking jobs, and replayed traces."""
