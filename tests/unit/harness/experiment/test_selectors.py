"""Selectors resolve against any inventory: one text selects each lab's own parts, or the error lists known names."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.run_plan import encode
from faultbed.harness.run import loop as run
from faultbed.inject.fault_plan import plan as plan_fault
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.model.selectors import CLASSES, is_selector, resolve, select, select_one
from faultbed.testbed.observe.packet_capture import port_named
from faultbed.testbed.shipped import inventories
from faultbed.traffic.engine.engine_client import endpoint
from faultbed.traffic.workloads.ranks import RanksSpec, place

NAMES = (
    "soft.yml",
    "soft-mini.yml",
    "soft-3rack.yml",
    "soft-tapered.yml",
    "rack-h100.example.yml",
    "linux-box.example.yml",
)
LABS = {name: load(inventories() / name) for name in NAMES}
SOFT, RACK = LABS["soft.yml"], LABS["rack-h100.example.yml"]


@pytest.mark.parametrize(
    ("text", "soft", "rack"),
    [
        ("uplink[0]", "rtsw1:ctsw1", "rtsw1:ctsw1"),
        ("uplink[-1]", "rtsw2:ctsw2", "rtsw2:ctsw4"),
        ("rnic[0]", "host1:rxe0", "host1:mlx5_0"),
        ("host[1]:gpu[0]", "host2:gpu0", "host2:gpu0"),
        ("host[1]", "host2", "host2"),
        ("host1:rnic[1]", "host1:rxe1", "host1:mlx5_1"),
        ("switch[2]", "ctsw1", "ctsw1"),
        ("spine[1]", "ctsw2", "ctsw2"),
        ("ctsw[1]", "ctsw2", "ctsw2"),
        ("rtsw[-1]", "rtsw2", "rtsw2"),
        ("rack[1]:host[0]:rnic[0]", "host3:rxe0", "host3:mlx5_0"),
        ("rack[1]:rtsw[0]", "rtsw2", "rtsw2"),
        ("zone[0]:rack[0]:uplink[1]", "rtsw1:ctsw2", "rtsw1:ctsw2"),
        ("spine[0]:uplink[1]", "ctsw1:rtsw2", "ctsw1:rtsw2"),
        ("host[0]:downlink[0]", "rtsw1:host1:rxe0", "rtsw1:host1:mlx5_0"),
        ("rtsw[1]:downlink[0]", "rtsw2:host3:rxe0", "rtsw2:host3:mlx5_0"),
        ("host1:rxe0", "host1:rxe0", None),  # a plain name selects itself
        ("host[0]:rxe0", "host1:rxe0", None),
    ],
)
def test_select_one_index_names_the_things_of_each_lab(text, soft, rack):
    assert select(SOFT.topology, text) == (soft,)
    assert resolve(SOFT.topology, text).text == soft
    if rack is not None:
        assert select(RACK.topology, text) == (rack,)
        assert resolve(RACK.topology, text).text == rack


def test_select_all_returns_each_once_in_inventory_order():
    topology = SOFT.topology
    assert select(topology, "host[*]:rnic[0]") == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
    assert select(topology, "rtsw[0]:uplink[*]") == ("rtsw1:ctsw1", "rtsw1:ctsw2")
    assert select(topology, "rack[*]:rnic[*]") == select(topology, "rnic[*]")
    assert len(select(RACK.topology, "rnic[*]")) == 32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", CLASSES)
def test_select_all_of_each_class_gives_targets_of_every_shipped_lab(name, word):
    topology = LABS[name].topology
    text = f"{word}[*]:host[*]" if word in ("zone", "rack") else f"{word}[*]"
    if word == "atsw" or (word == "gpu" and not any(host.gpus for host in topology.hosts)):
        with pytest.raises(UsageError, match=f"this lab has no {word}"):
            select(topology, text)
        return
    for target in select(topology, text):
        assert topology.resolve(target).text == target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "uplink[4]",
            r'"uplink\[4\]" selects nothing: this lab has 4 of the class uplink: uplink\[0\] \(rtsw1:ctsw1\) to',
        ),
        ("rnic[-9]", r"this lab has 8 of the class rnic"),
        ("host[*]:gpu[1]", r"host1 has 1 of the class gpu: gpu\[0\] \(host1:gpu0\)$"),
        ("rack[1]:host[2]", r"rack rack2 has 2 of the class host"),
        ("atsw[0]", r"this lab has no atsw"),
        ("uplnk[0]", r'no class "uplnk"; did you mean uplink\?'),
        ("host[0]:uplink[0]", r"no uplink belongs to a host; choose one of rnic, gpu, downlink"),
        ("rnic[0]:gpu[0]", r"no gpu belongs to a rnic; end the selector there"),
        ("uplink[0]:rnic[0]", r"no rnic belongs to a port"),
        ("rack[0]", r"is a rack, not a target; continue with host"),
        ("host[0]:mlx5_0", r"host1 has no mlx5_0"),
        ("host9:rnic[0]", r"this lab has no host9"),
        ("host[x]", r"is not a selector; write a class and an index"),
        ("host[]", r"is not a selector"),
        ("host[0", r"is not a selector"),
        ("[0]", r"is not a selector"),
        ("host[0]:", r"is not a selector"),
        ("host[0]:rnic[0] ", r"is not a selector"),
        ("host[1.0]", r"is not a selector"),
        ("host[9999999]", r"is not a selector"),
    ],
)
def test_select_without_a_match_lists_what_the_lab_has(text, message):
    assert is_selector(text)
    with pytest.raises(UsageError, match=message):
        select(SOFT.topology, text)


WORDS = st.sampled_from([*CLASSES, "host1", "rtsw1", "ctsw2", "rxe0", "gpu0", "mlx5_0", "nothing", ""])
INDEXES = st.sampled_from(["", "[0]", "[1]", "[-1]", "[*]", "[7]", "[-9]", "[x]", "["])
STEPS = st.builds(str.__add__, WORDS, INDEXES)


@given(text=st.lists(STEPS, min_size=1, max_size=4).map(":".join), name=st.sampled_from(NAMES))
def test_select_of_any_text_returns_targets_of_the_lab_or_rejects_it(text, name):
    topology = LABS[name].topology
    try:
        names = select(topology, text)
    except UsageError as error:
        assert f'"{text}"' in str(error)
        return
    assert names == select(topology, text)
    assert len(set(names)) == len(names) > 0
    if is_selector(text):
        assert [topology.resolve(name).text for name in names] == list(names)
    else:
        assert names == (text,)


def test_select_one_of_several_is_refused_with_their_number():
    with pytest.raises(UsageError, match=r"selects 8 targets \(host1:rxe0, .*, \.\.\.\), but one is needed"):
        select_one(SOFT.topology, "rnic[*]")


def test_functions_that_take_a_name_take_a_selector():
    for inventory, rnic in ((SOFT, "rxe0"), (RACK, "mlx5_0")):
        topology = inventory.topology
        assert endpoint(topology, "host[-1]:rnic[0]").name == f"host4:{rnic}"
        ranks = place(SimpleNamespace(topology=topology), RanksSpec(ranks=("host1", "rack[1]:host[*]:rnic[0]")))
        assert [rank.name for rank in ranks] == [f"host{number}:{rnic}" for number in (1, 3, 4)]
        spec = FaultSpec(kind="link.flap", target="host[0]:downlink[0]", for_s=1.0)
        assert plan_fault(spec, topology, lab_kind=inventory.kind).target.text == f"rtsw1:host1:{rnic}"
    assert port_named(SOFT.topology, "rack[1]:rnic[0]")[0] == "rtsw2:host3:rxe0"
    spec = FaultSpec(kind="packet.drop", target="host[2]:rnic[0]", for_s=1.0, params={"src": "rnic[0]", "share": 0.1})
    assert plan_fault(spec, SOFT.topology, lab_kind="soft").spec.params["src"] == "host1:rxe0"
    with pytest.raises(UsageError, match=r"fault.target: .*selects 4 targets"):
        plan_fault(FaultSpec(kind="link.flap", target="uplink[*]", for_s=1.0), SOFT.topology, lab_kind="soft")


TEXT = """
name = "anywhere"

[workload]
grid = "tp=2,dp=2"
phases = ["tp:all-reduce:64KiB"]
iterations = 100
ranks = ["rack[0]:host[*]:rnic[0]", "rack[1]:host[*]:rnic[0]"]
compute_units = 1

[workload.storage]
host = "host[-1]"
ingest = "64KiB"

[[faults]]
id = "link"
kind = "link.flap"
target = "TARGET"
at = "10s"
for = "1s"

[[expect]]
metric = "straggler"
equals = "host[1]"
"""


def resolved(inventory, target, *, seed=1, text=TEXT):
    source = text.replace("TARGET", target).encode()
    return run.resolve(decode(source, source="x.toml"), source, inventory, seed=seed)


def test_decide_resolves_selectors_of_an_experiment_on_either_kind_of_lab():
    for inventory, rnic in ((SOFT, "rxe0"), (RACK, "mlx5_0")):
        one = resolved(inventory, "host[0]:downlink[0]")
        assert one.plan.workload["ranks"] == [f"host{number}:{rnic}" for number in (1, 2, 3, 4)]
        assert one.plan.workload["storage"]["host"] == "host4"
        assert one.plan.faults[0].target == one.faults[0].target.text == f"rtsw1:host1:{rnic}"
        assert one.experiment.expectations[0].equals == "host2"
        assert b"[*]" not in encode(one.plan)
        assert b"[0]" not in encode(one.plan)


def test_plan_holds_the_selector_of_a_target_that_is_chosen_later():
    one, other = (resolved(SOFT, "rtsw[0]:used-uplink[*]") for _ in range(2))
    assert one.plan.faults[0].target == one.faults[0].target.text == "rtsw[0]:used-uplink[*]"
    assert encode(one.plan) == encode(other.plan)
    assert [option.target.text for option in one.faults[0].candidates] == ["rtsw1:ctsw1", "rtsw1:ctsw2"]
    assert run.touched(one, SOFT.topology)[-2:] == ("rtsw1:ctsw1", "rtsw1:ctsw2")
    with pytest.raises(ConfigError, match=r"x.toml:18: faults\[0\].target: .*does not end with used-uplink"):
        resolved(SOFT, "used-uplink[0]:rnic[0]")


def test_decide_draws_a_target_from_a_selector_as_from_the_list_of_names():
    names = '", "'.join(select(SOFT.topology, "uplink[*]"))
    listed = TEXT.replace('"TARGET"', '["TARGET"]')
    drawn = set()
    for seed in range(12):
        plan = resolved(SOFT, "uplink[*]", seed=seed).plan
        assert plan == resolved(SOFT, names, seed=seed, text=listed).plan
        assert plan == resolved(SOFT, "uplink[*]", seed=seed).plan
        drawn.add(plan.faults[0].target)
    assert len(drawn) > 1


def test_decide_names_the_place_of_a_selector_that_selects_nothing():
    with pytest.raises(ConfigError, match=r'x.toml:18: faults\[0\].target: "uplink\[9\]" selects nothing: this lab'):
        resolved(SOFT, "uplink[9]")
    text = TEXT.replace("host[-1]", "host[*]")
    with pytest.raises(ConfigError, match=r"x.toml:12: workload.storage.host: .*selects 4 targets"):
        resolved(SOFT, "uplink[0]", text=text)
    text = TEXT.replace("rack[1]:host[*]:rnic[0]", "rack[7]:rnic[0]")
    with pytest.raises(ConfigError, match=r"x.toml:8: workload.ranks\[1\]: .*this lab has 2 of the class rack"):
        resolved(SOFT, "uplink[0]", text=text)


FLOW = """
name = "flow"

[workload]
flow = "write"
src = "rnic[0]"
dst = "rack[-1]:rnic[0]"
duration = "30s"

[capture]
ports = ["rtsw[0]:uplink[*]", "rnic[0]"]

[[faults]]
kind = "packet.drop"
target = "rack[-1]:rnic[0]"
at = "10s"
for = "1s"
set = { share = 0.1, src = "rnic[0]" }
"""


def test_decide_resolves_selectors_of_flows_captures_and_parameters():
    one = run.resolve(decode(FLOW.encode(), source="x.toml"), FLOW.encode(), SOFT)
    assert (one.plan.workload["src"], one.plan.workload["dst"]) == ("host1:rxe0", "host3:rxe0")
    assert one.plan.workload["pairs"] == [["host1:rxe0", "host3:rxe0"]]
    assert one.plan.capture == ("rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw1:host1:rxe0")
    assert one.plan.faults[0].params == {"share": 0.1, "src": "host1:rxe0"}
    same = FLOW.replace("rack[-1]:rnic[0]", "rnic[0]")
    with pytest.raises(ConfigError, match="the flow ends where it begins"):
        run.resolve(decode(same.encode(), source="x.toml"), same.encode(), SOFT)
