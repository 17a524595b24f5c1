"""Faults: catalogue, plan, journal, holder, lease, receipt.

Middle floor: imports `testbed`, never `traffic` or `harness`. What runs on the target is in `inject.node`.
"""
