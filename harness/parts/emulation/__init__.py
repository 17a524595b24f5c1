"""The load that a workload may offer, and the capacity of a soft lab's emulation."""
