"""The fault-free twin: the same workload in a pass of its own, before the measured one."""
