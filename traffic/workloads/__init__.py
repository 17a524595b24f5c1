"""Workloads of ranks: collectives, jobs that train, infer and rank, and replayed traces."""
