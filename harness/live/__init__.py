"""What is done on a lab while something is measured there, for runs and for commands of their own.

The switches' routing scheme, the capacity of a soft lab's emulation, flows that measure, and what workloads use.
"""
