"""Lossy places are located by the probes that arrive, on synthetic fabrics; without loss no place is named."""

from __future__ import annotations

import numpy as np
import pytest
from probed_fabric import SOFT, TOR

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories
from faultbed.traffic.probes import prober, results
from faultbed.traffic.probes.prober import ProbeSpec
from faultbed.traffic.probes.tomography import BACKGROUND, Probes, links_of, locate

MINI = lab_inventory.load(inventories() / "soft-mini.yml").topology
RACK = {host.name: host.rack for host in SOFT.hosts}


def sent(*, place=(), share=0.0, seed=1, count=200, background=0.0005):
    """Return the probes of `faultbed probe` on the default lab; one place loses a share of them."""
    rng, collected = np.random.default_rng(seed), []
    for src, dst in prober.pairs(SOFT):
        one, two = (TOR[end.partition(":")[0]] for end in (src, dst))
        for _ in range(4):
            middle = (one,) if one == two else (one, str(rng.choice(["ctsw1", "ctsw2"])), two)
            path = (src, *middle, dst)
            hurt = place in Probes(path=path, sent=1, lost=0).places
            lost = int(rng.binomial(count, 1 - (1 - background) * (1 - share * hurt)))
            collected.append(Probes(path=path, sent=count, lost=lost))
    return collected


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize(
    "place",
    [("rtsw1", "ctsw1"), ("ctsw2", "rtsw1"), ("host3:rxe1", "rtsw2"), ("rtsw1", "host1:rxe0"), ("ctsw1",), ("host2",)],
)
def test_locate_names_the_lossy_link_and_its_direction(place, share):
    (located,) = locate(sent(place=place, share=share))
    assert place in (located.place, *located.alike)
    # With two racks, every packet up to a spine goes down to the other rack.
    assert len(located.alike) <= 1
    assert located.lost / located.sent == pytest.approx(share, abs=0.05)


def test_locate_with_two_lossy_places_names_both():
    first = sent(place=("rtsw1", "ctsw1"), share=0.2, seed=3)
    second = sent(place=("rtsw2", "host4:rxe1"), share=0.1, seed=3)
    both = [Probes(path=a.path, sent=a.sent, lost=max(a.lost, b.lost)) for a, b in zip(first, second, strict=True)]
    named = [{one.place, *one.alike} for one in locate(both)]
    assert len(named) == 2
    assert any(("rtsw1", "ctsw1") in one for one in named)
    assert any(("rtsw2", "host4:rxe1") in one for one in named)


def test_locate_in_a_healthy_fabric_names_nothing():
    """This holds in 80 synthetic runs, with as many random losses as on a busy lab."""
    assert [seed for seed in range(80) if locate(sent(seed=seed, background=BACKGROUND))] == []


def test_locate_without_probes_names_nothing():
    assert locate([]) == ()
    assert locate([Probes(path=("a", "b"), sent=0, lost=0)]) == ()


def test_links_of_sums_probes_by_directed_link():
    ways = [Probes(path=("a", "s", "b"), sent=10, lost=1), Probes(path=("a", "s", "c"), sent=5, lost=0)]
    assert links_of(ways) == {("a", "s"): (15, 1), ("s", "b"): (10, 1), ("s", "c"): (5, 0)}


@pytest.mark.parametrize("topology", [SOFT, MINI])
def test_probe_pairs_cover_every_rnic_and_rack(topology):
    chosen = prober.pairs(topology)
    rnics = {f"{host.name}:{rnic.name}" for host in topology.hosts for rnic in host.rnics}
    racks = {host.rack for host in topology.hosts}
    assert {src for src, _ in chosen} == {dst for _, dst in chosen} == rnics
    assert len(chosen) == len(rnics) * len(racks)
    assert all(src.partition(":")[0] != dst.partition(":")[0] for src, dst in chosen)


def test_uncovered_lists_links_without_probes():
    only = (Probes(path=("host1:rxe0", "rtsw1", "host2:rxe0"), sent=1, lost=0),)
    left = results.uncovered(SOFT, only)
    assert "rtsw1 -> ctsw1" in left
    assert "host1:rxe0 -> rtsw1" not in left
    assert "rtsw1 -> host1:rxe0" in left
    silent = (Probes(path=("host1:rxe0", "rtsw1", "host2:rxe0"), sent=0, lost=0),)
    assert "host1:rxe0 -> rtsw1" in results.uncovered(SOFT, silent), "a queue pair that sent nothing took no way"


@pytest.mark.parametrize("spec", [ProbeSpec(duration_s=0), ProbeSpec(per_s=0), ProbeSpec(qps=0)])
def test_probe_spec_without_duration_rate_or_qps_is_refused(spec):
    with pytest.raises(UsageError):
        prober.check(spec)
