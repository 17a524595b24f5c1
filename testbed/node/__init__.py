"""What runs on nodes and belongs to no fault and no workload: netlink, and what a machine looks like."""
