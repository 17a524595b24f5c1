"""Start of a collective on stand-ins for engines."""

from __future__ import annotations

from engine_labs import RankLab

from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec


def start(on_start, *, engines=None, lab=None, **change):
    lab = lab or RankLab(on_start)
    return collective.start(lab, CollectiveSpec(**{"algorithm": "ring", "iterations": 1, **change}), engines=engines)
