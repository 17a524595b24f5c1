"""The lab: topology, inventory, nodes over SSH, provisioning, counters, fingerprint, soft lab.

Ground floor of the house: this package imports none of the other three.
"""
