"""Synthetic round trips of probes."""

from __future__ import annotations

import numpy as np
from probed_fabric import SOFT, TOR

from faultbed.traffic.probes import prober
from faultbed.traffic.probes.rtt import Echo, Trip
from faultbed.traffic.probes.tomography import Probes

US = 1000


def round_trips(*, place=(), times=1.0, seed=1, count=60, scale=1.0, spread=0.25):
    """Return round trips on the default lab, four queue pairs per pair of RNICs; those across a place are longer."""
    rng, collected = np.random.default_rng(seed), []
    for src, dst in prober.pairs(SOFT):
        one, two = (TOR[end.partition(":")[0]] for end in (src, dst))
        for _ in range(4):
            ways = []
            for ends, tors in (((src, dst), (one, two)), ((dst, src), (two, one))):
                middle = (one,) if one == two else (tors[0], str(rng.choice(["ctsw1", "ctsw2"])), tors[1])
                ways.append((ends[0], *middle, ends[1]))
            there, back = ways
            hurt = place in Probes(path=(*there, *back[1:]), sent=1, lost=0).places
            hops = len(there) + len(back)
            took = scale * hops * 50 * US * rng.lognormal(0.0, spread, count) * (times if hurt else 1.0)
            collected += [Trip(there=there, back=back, echo=echo(int(ns) + 30 * US, 30 * US)) for ns in took]
    return collected


def echo(whole_ns, responder_ns, *, sent_ns=0, came=True):
    return Echo(connection=0, sent_ns=sent_ns, came=came, whole_ns=whole_ns, responder_ns=responder_ns)
