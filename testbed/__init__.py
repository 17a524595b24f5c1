"""The lab: topology, inventory, nodes over SSH, provisioning, counters, fingerprint, soft lab.

The lowest layer: this package imports none of the other three.
"""

# A checkout has this folder beside the package, too: imported from there, each module would exist twice.
if not __name__.startswith("faultbed."):
    raise ImportError("import faultbed.testbed instead: testbed is a part of the package faultbed, no module by itself")
