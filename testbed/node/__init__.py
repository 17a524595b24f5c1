"""Code on nodes that belongs to no fault and no workload: netlink, counters, and the state of a machine."""
