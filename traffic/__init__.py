"""Workloads: flows and collectives over RDMA verbs.

Middle floor: imports `testbed`, never `inject` or `harness`. What runs on the hosts is in `traffic.node`.
"""
