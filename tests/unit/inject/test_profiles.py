"""Schedules from a seed: equal on every machine, different for each seed, and always valid plans."""

from __future__ import annotations

from collections import Counter

import other_process
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from faultbed.inject.fault_plan import plan_all
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.profiles import HPN_FLAPS_S, LLAMA3_54D, PROFILES, digest, drawn_categories, schedule
from faultbed.inject.strategies import fault_specs, schedules
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

SOFT = lab_inventory.load(inventories() / "soft.yml").topology
names = st.sampled_from(sorted(PROFILES))


@given(names, st.integers(0, 1 << 32), st.floats(5, 600))
def test_profile_schedules_can_be_planned(name, seed, duration_s):
    """For every seed targets exist, windows fit into the duration, and no two faults collide."""
    specs = schedule(name, SOFT, seed=seed, duration_s=duration_s)
    plan_all(specs, SOFT, lab_kind="soft")
    assert all(spec.at_s >= 0 and spec.at_s + spec.for_s <= duration_s for spec in specs)
    assert list(specs) == sorted(specs, key=lambda spec: (spec.at_s, spec.target, spec.kind))


@given(names, st.integers(0, 1 << 32))
def test_profile_same_seed_gives_the_same_schedule(name, seed):
    """A schedule is a function of its arguments."""
    assert digest(schedule(name, SOFT, seed=seed, duration_s=60)) == digest(
        schedule(name, SOFT, seed=seed, duration_s=60)
    )


def test_profile_thousand_seeds_give_a_thousand_schedules():
    """At least 990 of 1,000 are different."""
    actual = {digest(schedule("llama3-54d", SOFT, seed=seed, duration_s=120)) for seed in range(1000)}
    assert len(actual) >= 990


# Digests for some seeds, the same in every Python and on every machine: a change would change all replays.
KNOWN = {
    ("llama3-54d", 0): "ed4f1de0c94a02af771241248b3bff32ee05462de787413e58b6ccaecf2afa11",
    ("llama3-54d", 7): "e5da2ce42237bc16741177727b9d3d6ea8d1ba84d2a581e6f5d0f6e9f74a03fa",
    ("llama3-54d", 4294967295): "9887b90a85ce31016968341f6c19f0fa65c90c4f9f071cc779211987b4b32265",
    ("llama3-54d-fatal", 0): "24844509a539c32e1784a5f12154933e6d6e9291cbbdb02cd8ef4aa3b30599c4",
    ("llama3-54d-fatal", 7): "4ca39400f77408f3d66928e7631ea0178bfa83e8ec076d4406b4c013a486e08c",
    ("llama3-54d-fatal", 4294967295): "0d6c70dbe708b477161b2f1e57950da36904fb84c21b1643328a3c77e0ff474e",
    ("hpn-flaps", 0): "2abf086d2538651026588b388fab3574730bfd81932bbd418453f92b840f124c",
    ("hpn-flaps", 7): "8685db1a13cc82cefbdd8911b98df792eb3b34625626dae3990fdaac0972fe19",
    ("hpn-flaps", 4294967295): "556300ffb2048b02c92ec2c013d55f8ea9b18f464f2e32f3d7ba7f0f6cc12102",
    ("early-life", 0): "2001a9d0c074306a50676c7a706590145c45724117b6e2901cf35cf5f7c75e57",
    ("early-life", 7): "07c992b2b143bb98c425f44d6f8119775eaf6a2a907f5b278f6d0a983eca090d",
    ("early-life", 4294967295): "034d95d3838894e8bf7a749fae80292d40b0a3dcb8b01af4f76d68fd09905d7b",
    ("lemon-gpu", 0): "a59add0507805af29663675b596d72765dd5f183e4bdac60b7a75f90f0efdfcc",
    ("lemon-gpu", 7): "7e3fbb82c8f57730f33571d8cf5946ef1889f4b1df47df07007171662406f48d",
    ("lemon-gpu", 4294967295): "3f4a554e9c7cd4fe1457d55c15df50f08129cff86cbfcf9d0d6f65312b7b8112",
    ("diurnal-thermal", 0): "d5108866b546547340df31ede6f427cf1bc0add1f02da3dd397bb6f02aa4db0e",
    ("diurnal-thermal", 7): "7abe540510327fb3300c46940d75a8d07d6b8393a817043de7f14d8e771aa14b",
    ("diurnal-thermal", 4294967295): "f9e92b417fea219b8573a9e5ef86287210d37ee00d211804172bba42f7358681",
}


@pytest.mark.parametrize(("name", "seed"), KNOWN)
def test_profile_known_seed_gives_the_known_digest(name, seed):
    """Replay is independent of the Python version, of hash order and of the machine."""
    assert digest(schedule(name, SOFT, seed=seed, duration_s=60)) == KNOWN[name, seed]


def test_profiles_all_have_known_digests():
    assert {name for name, _ in KNOWN} == PROFILES.keys()


@pytest.mark.process
def test_profile_digest_is_the_same_in_another_process():
    """No hash order leaks into a schedule."""
    code = (
        "from faultbed.testbed.inventory.lab_inventory import load;"
        "from faultbed.testbed.shipped import inventories;from faultbed.inject.profiles import *;"
        "t=load(inventories()/'soft.yml').topology;"
        "print(digest(schedule('llama3-54d',t,seed=7,duration_s=60)))"
    )
    assert other_process.printed(code, hash_seed=99) == KNOWN["llama3-54d", 7]


def test_profile_causes_have_their_published_frequencies():
    """419 interruptions; over many draws each kind's share is the table's, within four standard deviations."""
    assert sum(category.count for category in LLAMA3_54D) == 419
    counts = Counter(
        spec.kind
        for seed in range(60)
        for spec in schedule("llama3-54d", SOFT, seed=seed, duration_s=36_000, events=50)
    )
    total = sum(counts.values())
    known = {category.kind: 0 for category in LLAMA3_54D if category.kind}
    for category in LLAMA3_54D:
        if category.kind:
            known[category.kind] += category.count
    for kind, count in known.items():
        share = count / sum(known.values())
        assert abs(counts[kind] - total * share) <= 4 * (total * share * (1 - share)) ** 0.5


def test_profile_categories_agree_with_the_published_table_at_419_events():
    """Chi-square over the categories with an expected count of 5 or more, the rarer ones together; 40 seeds."""
    from scipy.stats import chisquare  # importing it takes half a second of CPU time in every worker

    names = {category.name: category.count for category in LLAMA3_54D}
    often = [name for name, count in names.items() if count >= 5]
    expected = [*(names[name] for name in often), sum(count for count in names.values() if count < 5)]
    chances = []
    for seed in range(40):
        counts = Counter(category.name for category in drawn_categories(seed, 419))
        observed = [*(counts[name] for name in often), sum(counts[name] for name in names.keys() - set(often))]
        chances.append(float(chisquare(observed, expected).pvalue))
    assert min(chances) > 0.05 / 40, "the chance of a false alarm in any of 40 seeds is 5 %"
    assert 0.2 < sum(chances) / 40 < 0.8, "and the fit is not too good to be drawn"


def test_profile_fatal_kills_and_reboots_instead_of_hangs_and_freezes():
    plain = schedule("llama3-54d", SOFT, seed=7, duration_s=36_000, events=400)
    fatal = schedule("llama3-54d-fatal", SOFT, seed=7, duration_s=36_000, events=400)
    kinds, others = Counter(spec.kind for spec in fatal), Counter(spec.kind for spec in plain)
    assert not {"host.rank-hang", "host.freeze"} & set(kinds)
    assert kinds["host.rank-kill"] / kinds.total() == pytest.approx(others["host.rank-hang"] / others.total(), abs=0.1)
    assert kinds["host.reboot"] > 0
    assert kinds["link.down"] > 0


def test_profile_flaps_keep_the_proportions_of_the_field():
    """The published lengths are 1, 5, 9, 30, 60 and 120 s; compression keeps their proportions."""
    specs = schedule("hpn-flaps", SOFT, seed=3, duration_s=456)
    assert sorted(round(spec.for_s) for spec in specs) == sorted(HPN_FLAPS_S)


def test_profile_invalid_arguments_are_rejected():
    """The profile is unknown, the duration zero, or the number of events zero."""
    for name, kwargs in (("llama4", {}), ("hpn-flaps", {"duration_s": 0.0}), ("hpn-flaps", {"events": 0})):
        with pytest.raises(UsageError):
            schedule(name, SOFT, **{"seed": 1, "duration_s": 60.0, **kwargs})


@given(schedules(SOFT))
def test_strategies_draw_compatible_schedules(specs):
    """Every drawn schedule can be planned as a whole, and is sorted by start time."""
    planned = plan_all(specs, SOFT, lab_kind="soft")
    assert [(one.kind, one.target.text, one.spec.at_s) for one in planned] == [
        (x.kind, x.target, x.at_s) for x in specs
    ]
    assert list(specs) == sorted(specs, key=lambda spec: spec.at_s)


def test_strategies_draw_schedules_of_several_faults():
    """Schedules with several compatible faults must remain, not only single faults."""
    assert len(find(schedules(SOFT, most=6), lambda specs: len(specs) > 2)) == 3


def test_failing_schedule_shrinks_to_the_fault_that_matters():
    """Many faults shrink to the one that matters, at its earliest and simplest."""
    least = find(schedules(SOFT, most=6), lambda specs: any(spec.kind == "packet.drop" for spec in specs))
    assert [spec.kind for spec in least] == ["packet.drop"]
    assert (least[0].at_s, least[0].for_s, least[0].params) == (0.0, 0.1, {"share": 0.001})


@given(fault_specs(SOFT, kinds=["link.flap", "gpu.throttle"]))
def test_strategies_draw_only_the_requested_kinds(spec):
    """Irreversible kinds are never drawn unless requested."""
    assert spec.kind in ("link.flap", "gpu.throttle")
    assert CATALOGUE[spec.kind].reversible
