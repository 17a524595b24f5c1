"""A fault whose target is chosen by what the workload uses when it is armed (`used-uplink[0]`)."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_faults import SOFT, soft

from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.journal import Journal, read
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms import late_target
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.conflicts import touches
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import FaultError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.model.selectors import candidates, choose, is_chosen_later, select
from faultbed.testbed.shipped import inventories

UPLINKS = ("rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw2:ctsw1", "rtsw2:ctsw2")
RACK = lab_inventory.load(inventories() / "rack-h100.example.yml")

path = st.sampled_from(
    [
        (),
        ("host1", "rtsw1", "host2"),
        *[("host1", "rtsw1", spine, "rtsw2", "host3") for spine in ("ctsw1", "ctsw2")],
        *[("host3", "rtsw2", spine, "rtsw1", "host1") for spine in ("ctsw1", "ctsw2")],
        ("host1", "rtsw1", "ctsw1"),
    ]
)
index = st.sampled_from(["0", "1", "-1", "-2", "*"])
scope = st.sampled_from(["", "rtsw[0]:", "rtsw2:", "ctsw[1]:", "rack[1]:"])


def is_crossed(name, paths):
    near, far = name.split(":")
    return any(
        f" {one} {other} " in f" {' '.join(path)} " for path in paths for one, other in ((near, far), (far, near))
    )


@given(st.lists(path, max_size=6), index, scope, st.integers(0, 2**31 - 1))
def test_target_in_use_is_crossed_by_a_path_or_refused(paths, index, scope, seed):
    planned = plan(
        FaultSpec(kind="link.flap", target=f"{scope}used-uplink[{index}]", for_s=1.0, seed=seed), SOFT, lab_kind="soft"
    )
    crossed = [option for option in planned.candidates if is_crossed(option.target.text, paths)]
    try:
        use = WorkloadUse(at_ns=0, paths=tuple(path for path in paths if path))
        chosen = late_target.chosen(planned, use, SOFT, where="here")
    except FaultError as error:
        assert not crossed or (index != "*" and not -len(crossed) <= int(index) < len(crossed))
        assert "\n" not in str(error)
        assert ("no path of a queue pair is known" in str(error)) == (not any(paths))
        return
    assert chosen in crossed
    assert not chosen.candidates
    assert chosen.id == planned.id
    if index != "*":
        assert chosen is crossed[int(index)]
    assert chosen is late_target.chosen(planned, use, SOFT, where="here")


BETWEEN = {"host1:rxe0>host3:rxe0": (0,), "host1:rxe1>host3:rxe1": (1,), "host1:rxe0>host2:rxe0": (2,)}
USED = WorkloadUse(
    at_ns=0,
    rnics=("host1:rxe0", "host1:rxe1"),
    paths=(
        ("host1", "rtsw1", "ctsw2", "rtsw2", "host3"),
        ("host1", "rtsw1", "ctsw1", "rtsw2", "host3"),
        ("host1", "rtsw1", "host2"),
    ),
    by_pair=BETWEEN,
)


@pytest.mark.parametrize(
    ("kind", "selector", "place"),
    [
        ("link.flap", "path[host1:rxe0>host3:rxe0]", "rtsw1:ctsw2"),
        ("packet.drop", "path[host1:rxe1>host3:rxe1]", "rtsw1:ctsw1"),
        ("switch.reboot", "path[host1:rxe0>host3:rxe0]", "ctsw2"),
        ("link.flap", "path[host[0]:rnic[0]>host[1]:rnic[0]]", "rtsw1:host2:rxe0"),
        ("switch.reboot", "path[host1:rxe0>host2:rxe0]", "rtsw1"),
    ],
)
def test_place_on_a_path_is_where_the_packets_between_its_ends_go(kind, selector, place):
    params = {"share": 0.1} if kind == "packet.drop" else {}
    planned = soft(kind, selector, **params)
    assert planned.target.text == selector
    assert late_target.chosen(planned, USED, SOFT, where="here").target.text == place
    with pytest.raises(FaultError, match="no path of a queue pair between them is known"):
        late_target.chosen(planned, WorkloadUse(at_ns=0, paths=USED.paths, rnics=USED.rnics), SOFT, where="here")


@pytest.mark.parametrize("name", [kind.name for kind in CATALOGUE.values() if {"port", "switch"} & {*kind.targets}])
def test_every_kind_whose_target_is_a_port_or_a_switch_takes_a_path(name):
    kind = CATALOGUE[name]
    params = {key: value for key, value in kind.example.params.items() if kind.param(key).type != "rnic"}
    if "soft" in kind.fidelity:
        assert soft(name, "path[host1:rxe0>host3:rxe0]", for_s=10.0, **params).candidates


@pytest.mark.parametrize(
    ("selector", "problem"),
    [
        ("path[host1:rxe0>host9:rxe0]", 'no target "host9:rxe0" in this lab'),
        ("path[host1>host3:rxe0]", "host1 is no RNIC; name RNICs or roles"),
        ("path[host1:rxe0>host1:rxe0]", "the path ends where it begins"),
        ("path[host[*]:rnic[0]>host3:rxe0]", "selects 4 targets"),
        ("path[host1:rxe0]", "is not a selector"),
    ],
)
def test_path_without_two_rnics_is_refused(selector, problem):
    with pytest.raises(UsageError, match=re.escape(problem)):
        soft("link.flap", selector)


def test_kind_whose_target_is_a_host_takes_no_path():
    with pytest.raises(UsageError, match="host"):
        soft("host.stall", "path[host1:rxe0>host3:rxe0]")


def test_star_chooses_each_used_uplink_for_some_seed():
    chosen = {choose("used-uplink[*]", UPLINKS, seed=seed) for seed in range(40)}
    assert chosen == set(UPLINKS)


def test_candidates_are_the_uplinks_of_the_scope():
    assert candidates(SOFT, "used-uplink[0]") == select(SOFT, "uplink[*]") == UPLINKS
    assert candidates(SOFT, "rtsw[1]:used-uplink[*]") == UPLINKS[2:]
    assert not is_chosen_later("uplink[0]")
    assert not is_chosen_later("used-uplink")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("used-uplink[4]", r"selects nothing: it may become one of 4 uplinks"),
        ("used-uplink[x]", r"does not end with used-uplink and an index"),
        ("used-uplink[0]:rnic[0]", r"does not end with used-uplink and an index"),
        ("host[0]:used-uplink[0]", r"no used-uplink belongs to a host"),
        ("rtsw[9]:used-uplink[0]", r"this lab has 2 of the class rtsw"),
        ("usd-uplink[0]", r"did you mean used-uplink\?"),
    ],
)
def test_wrong_selector_of_a_used_uplink_is_one_sentence(text, message):
    with pytest.raises(UsageError, match=message):
        soft("link.flap", text)


def test_used_uplink_is_only_for_the_target_of_a_fault():
    with pytest.raises(UsageError, match=r"known only while a workload runs.*write uplink\[0\]"):
        select(SOFT, "used-uplink[0]")
    with pytest.raises(UsageError, match=r"cannot target a port"):
        soft("gpu.throttle", "used-uplink[0]", percent=50)


def test_candidates_on_different_machines_are_refused():
    spec = FaultSpec(kind="link.flap", target="used-uplink[0]", for_s=1.0)
    with pytest.raises(UsageError, match=r"one machine has to hold the fault; name a switch, as in \w+:used-uplink"):
        plan(spec, RACK.topology, lab_kind="rack")


def test_plan_of_a_used_uplink_reserves_claims_and_is_judged_for_every_candidate():
    planned = soft("link.flap", "used-uplink[0]")
    assert touches(planned, SOFT) == UPLINKS
    first, second = (
        FaultSpec(kind="link.flap", target=target, for_s=1.0) for target in ("used-uplink[0]", "rtsw2:ctsw2")
    )
    with pytest.raises(UsageError, match=r"both change link rtsw2:ctsw2"):
        plan_all([first, second], SOFT, lab_kind="soft")
    inventory = SimpleNamespace(
        topology=SOFT, name="lab", kind="soft", may_lose_all_uplinks=False,
        safety=lab_inventory.load(inventories() / "soft.yml").safety,
    )  # fmt: skip
    blast_radius.check([planned], inventory)
    both = [soft("link.flap", "rtsw1:ctsw1"), soft("link.flap", "rtsw1:used-uplink[1]")]
    with pytest.raises(safety.Forbidden, match="all uplinks of rtsw1"):
        blast_radius.check(both, inventory)
    allowed = safety.policy_of(RACK)
    forbidding = SimpleNamespace(
        name="lab", topology=SOFT, kind="rack", safety=allowed.__class__(may_disrupt=["rtsw1*"])
    )
    with pytest.raises(safety.Forbidden, match="rtsw2:ctsw1"):
        safety.check(planned, forbidding)


def test_plan_of_a_used_uplink_shows_every_candidate():
    planned = soft("link.flap", "used-uplink[*]")
    assert planned.target.text == "used-uplink[*]"
    assert [option["target"] for option in planned.to_json()["candidates"]] == list(UPLINKS)
    assert "candidates" not in soft("link.flap", "uplink[0]").to_json()
    assert planned.options == planned.candidates
    json.dumps(planned.to_json())


def prepared_on(tmp_path, use_of):
    """Return a prepared fault whose holder answers everything, and the requests that it was sent."""
    sent = []
    planned = soft("link.flap", "used-uplink[*]")
    journal = Journal(tmp_path / "journal")
    injector = SimpleNamespace(
        journal=journal, use_of=use_of, mutate=None, claim_of=lambda planned: {"of": planned.target.text}
    )
    prepared = object.__new__(PreparedFault)
    prepared.__dict__ |= {
        "planned": planned, "_injector": injector, "_lab": SimpleNamespace(topology=SOFT), "_before": None,
        "_armed": None, "_uses": [], "lease": SimpleNamespace(
            where="link.flap on used-uplink[*]", instance="x", ttl_s=1.0,
            request=lambda request: sent.append(request) or {"before": {"up": 1}},
        ),
    }  # fmt: skip
    return prepared, sent


def test_target_is_chosen_before_the_holder_is_told_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setattr("faultbed.inject.prepared_fault.refuse_remote_conflicts", lambda *_, **__: None)
    prepared, sent = prepared_on(tmp_path, lambda _: WorkloadUse(at_ns=0, watched={"rtsw2:ctsw1": True}))
    prepared.prepare_target()
    (request,) = sent
    assert request["args"]["device"] == prepared.planned.target.port.netdev
    assert request["args"]["netns"] == "rtsw2"
    assert request["claim"] == {"of": "rtsw2:ctsw1"}
    done = next(record for record in read(tmp_path / "journal") if record.type == "ok")
    assert done.data["target"] == "rtsw2:ctsw1"
    prepared._before = None
    prepared.prepare_target()
    assert prepared.planned.target.text == "rtsw2:ctsw1"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (WorkloadUse(at_ns=0, paths=(("host1", "rtsw1", "host2"),)), "no queue pair crosses an uplink"),
        (WorkloadUse(at_ns=0, unknown_paths="silence"), r"no path of a queue pair is known \(silence\)"),
        (None, "no path of a queue pair is known, so nothing shows which uplinks are used; start the workload"),
    ],
)
def test_nothing_is_sent_to_the_holder_without_a_target_in_use(tmp_path, use, message):
    for use_of in [lambda _: use] + [None] * (use is None):
        prepared, sent = prepared_on(tmp_path, use_of)
        with pytest.raises(FaultError, match=message):
            prepared.prepare_target()
        assert not sent
        assert not prepared._armed.ok
        assert re.search(message, prepared._armed.error)
