"""Faults: from the catalogue and the plan to the holder and the receipt.

Middle layer: imports `testbed`, never `traffic` or `harness`. What runs on the target is in `inject.node`.
"""
