"""Faults: from the catalogue and the plan to the holder and the receipt.

Middle layer: imports `testbed`, never `traffic` or `harness`. What runs on the target is in `faultbed.inject.node`.
"""

# A checkout has this folder beside the package, too: imported from there, each module would exist twice.
if not __name__.startswith("faultbed."):
    raise ImportError("import faultbed.inject instead: inject is a part of the package faultbed, no module by itself")
