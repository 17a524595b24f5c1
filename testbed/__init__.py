"""The lab: topology, inventory, nodes over SSH, provisioning, counters, fingerprint, soft lab.

The lowest layer: this package imports none of the other three.
"""
