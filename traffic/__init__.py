"""Workloads: flows and collectives over RDMA verbs.

Middle layer: imports `testbed`, never `inject` or `harness`. What runs on the hosts is in `faultbed.traffic.node`.
"""

# A checkout has this folder beside the package, too: imported from there, each module would exist twice.
if not __name__.startswith("faultbed."):
    raise ImportError("import faultbed.traffic instead: traffic is a part of the package faultbed, no module by itself")
