"""Workloads: flows and collectives over RDMA verbs.

Middle layer: imports `testbed`, never `inject` or `harness`. What runs on the hosts is in `traffic.node`.
"""
