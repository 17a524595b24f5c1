"""The section of a workload that is a program of another author."""
