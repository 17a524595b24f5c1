"""Predicted experiments: routing, drains, faults, and what the model refuses by name."""

import pytest
from house import HOUSE

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.toml_text import inline
from faultbed.harness.model.experiment_prediction import default_parameters, predict
from faultbed.harness.model.fault_effects import drained_links
from faultbed.harness.model.step_times import StepParameters
from faultbed.harness.run.prepare.resolve import resolve
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.effect import Effect
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.model.topology import Topology

SOFT, THREE, ZONES = (
    lab_inventory.load(HOUSE / "inventory" / f"{name}.yml") for name in ("soft", "soft-3rack", "soft-zones")
)
JOB = """
name = "job"
[workload]
collective = "{collective}"
algorithm = "{algorithm}"
size = "1MiB"
iterations = {iterations}
{more}
"""
COMPUTING = StepParameters(alpha_ns=13e6, overhead_ns=6e6, compute_ns=5e6)


def predicted(
    text="", *, lab=SOFT, collective="all-reduce", algorithm="ring", iterations=10, more="", parameters=None, **options
):
    content = JOB.format(collective=collective, algorithm=algorithm, iterations=iterations, more=more) + text
    experiment = decode(content.encode(), source="job.toml")
    resolved = resolve(experiment, content.encode(), lab)
    return predict(resolved.experiment, resolved.faults, lab, parameters or default_parameters(lab.kind), **options)


def fault(kind, target, *, at="1s", lasts="2s", **params):
    values = inline(CATALOGUE[kind].spelled(params))
    return f'[[faults]]\nkind = "{kind}"\ntarget = "{target}"\nat = "{at}"\nfor = "{lasts}"\nset = {values}\n'


FLOW = """
name = "flow"
[workload]
flow = "write"
pattern = "{pattern}"
duration = "30s"
{more}
"""


def flows(pattern, *, lab=ZONES, more="", text="", **options):
    content = FLOW.format(pattern=pattern, more=more) + text
    resolved = resolve(decode(content.encode(), source="flow.toml"), content.encode(), lab)
    return predict(resolved.experiment, resolved.faults, lab, default_parameters(lab.kind), **options)


def test_flows_across_a_taper_get_what_the_uplinks_leave():
    inside, across = flows("in-zone").fault_free, flows("across-zones").fault_free
    assert across.goodput_bps.median < 0.6 * inside.goodput_bps.median
    assert across.worst_share == pytest.approx(1.0)
    assert across.worst_link.split(":")[1].startswith("atsw") or across.worst_link.startswith("atsw")
    assert inside.iteration_s is None


def test_flows_paced_by_their_rate_stay_below_it():
    paced = flows("in-zone", more='rate = "0.5Mb/s"').fault_free
    assert paced.goodput_bps.median == pytest.approx(8 * 0.5e6)
    assert paced.worst_share < 1


def test_iteration_by_default_parameters_equals_alpha_beta_on_a_lab_without_rates():
    phase = predicted().fault_free
    assert phase.iteration_s.median == pytest.approx(6 * (13e-3 + (1 << 18) * 130e-9))
    assert phase.worst_share == pytest.approx(1.0)


def test_job_time_has_the_fault_in_its_window_only():
    slow = predicted(fault("gpu.throttle", "host1:gpu0", percent=50), more="compute_units = 20", parameters=COMPUTING)
    free, hit = slow.phases
    assert hit.faults == ("gpu.throttle",)
    assert hit.iteration_s.median - free.iteration_s.median == pytest.approx(20 * 5e-3)
    healthy = 1 / free.iteration_s.median
    left = 10 - healthy - 2 / hit.iteration_s.median
    assert slow.job_s == pytest.approx(
        3 + left * free.iteration_s.median if left > 0 else 1 + (10 - healthy) * hit.iteration_s.median
    )
    assert slow.fault_free_s == pytest.approx(10 * free.iteration_s.median)


def test_fault_after_the_job_has_no_effect_on_its_time():
    late = predicted(fault("link.rate", "host1:rxe0", rate=1, at="900s"), iterations=2)
    assert late.job_s == late.fault_free_s


@pytest.mark.parametrize("direction", ["to", "from"])
def test_link_rate_limits_one_direction(direction):
    free, hit = predicted(fault("link.rate", "host1:rxe0", rate=4, direction=direction)).phases
    assert hit.iteration_s.median > 3 * free.iteration_s.median
    assert hit.worst_link == ("rtsw1:host1:rxe0" if direction == "to" else "host1:rxe0:rtsw1")


def test_lost_packets_cost_at_least_what_go_back_n_sends_again():
    free, hit = predicted(fault("packet.drop", "host1:rxe0", share=0.01)).phases
    transfer_s = 6 * (1 << 18) * 130e-9
    again = 1 / ((1 - 0.01) / (1 - 0.01 + 64 * 0.01))
    assert hit.iteration_s.median - free.iteration_s.median == pytest.approx(transfer_s * (again - 1))


def test_background_traffic_takes_its_share():
    free, hit = predicted(fault("congestion.background", "host1:rxe0", rate=30)).phases
    assert hit.iteration_s.median > free.iteration_s.median


def test_collision_puts_all_flows_on_one_uplink():
    free, hit = predicted(
        fault("congestion.hash-collision", "rtsw1:ctsw1"), collective="all-to-all", algorithm="full-mesh"
    ).phases
    assert hit.mmr["rtsw1"] == 2.0
    assert free.mmr["rtsw1"] <= 2.0


def test_drained_spine_leaves_its_links_empty():
    failed = drained_links(SOFT.topology, ["ctsw1"])
    assert failed == {"rtsw1:ctsw1", "rtsw2:ctsw1"} == drained_links(SOFT.topology, ["ctsw1:rtsw1", "rtsw2:ctsw1"])
    assert predicted(failed=failed).fault_free.mmr["rtsw1"] == 2.0


def test_drain_unknown_name_is_refused():
    with pytest.raises(UsageError, match=r"--drain ctsw9: no switch or link .* did you mean"):
        drained_links(SOFT.topology, ["ctsw9"])


def test_drain_of_all_spines_cuts_off_ranks_and_is_refused():
    with pytest.raises(ConfigError, match=r"^job.toml: host\d:rxe0 cannot reach"):
        predicted(failed=drained_links(SOFT.topology, ["ctsw1", "ctsw2"]))


def test_rank_without_its_link_is_refused():
    with pytest.raises(ConfigError, match=r"link\.down cuts off the rank on host1:rxe0"):
        predicted(fault("link.down", "host1:rxe0"))


@pytest.mark.parametrize(
    ("kind", "target", "params", "names"),
    [
        ("packet.forge", "host1:rxe0", {"what": "nak"}, "packet.forge declares no effect"),
        (
            "packet.drop",
            "host1:rxe0",
            {"psn": "+5", "qp": "any"},
            "packet.drop with these parameters declares no effect",
        ),
        ("link.flap", "rtsw1:ctsw1", {"period": 1}, "link.flap with these parameters declares no effect"),
        ("host.freeze", "host1", {}, "host.freeze declares no effect"),
    ],
)
def test_fault_without_an_effect_is_refused_by_name_and_path(kind, target, params, names):
    with pytest.raises(ConfigError, match=rf"^job.toml: faults\[0\].kind: {names}"):
        predicted(fault(kind, target, **params))


def test_slow_gpu_without_a_known_compute_time_is_refused():
    with pytest.raises(ConfigError, match="nothing is known about its time"):
        predicted(fault("gpu.throttle", "host1:gpu0", percent=50), more="compute_units = 20")


def test_compute_without_a_known_time_is_named():
    assert predicted(more="compute_units = 20").unknown == ("the time of the compute phase",)


def test_spray_is_refused_on_a_lab_whose_rnics_go_back():
    with pytest.raises(ConfigError, match=r"fabric\.routing: spray sends the packets of one queue pair"):
        predicted('[fabric]\nrouting = "spray"\n')


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("requests = 5", "no inference workload"),
        ('embedding = "1MiB"\niterations = 3', "no ranking workload"),
        (
            'grid = "dp=4"\nphases = ["dp:barrier:4B"]\niterations = 3\nstorage = { host = "host4", ingest = "1MiB" }',
            "no storage",
        ),
    ],
)
def test_workload_that_the_model_does_not_have_is_refused(workload, message):
    content = f'name = "other"\n[workload]\n{workload}\n'.encode()
    resolved = resolve(decode(content, source="other.toml"), content, SOFT)
    with pytest.raises(ConfigError, match=message):
        predict(resolved.experiment, resolved.faults, SOFT, default_parameters("soft"))


def test_hash_scheme_has_a_spread_and_a_static_one_none():
    draws = {
        scheme: flows("across-zones", text=f'[fabric]\nrouting = "{scheme}"\n')
        for scheme in ("e-ecmp", "static-parity")
    }
    assert draws["static-parity"].draws == 1
    static = draws["static-parity"].fault_free.goodput_bps
    assert static.low == static.high
    assert draws["e-ecmp"].draws == 20


def test_prediction_is_the_same_for_the_same_seed():
    assert predicted(lab=THREE, seed=3) == predicted(lab=THREE, seed=3)


def test_every_effect_is_valid_for_the_example_of_its_kind():
    declared = {name: kind for name, kind in CATALOGUE.items() if kind.effect is not None}
    assert len(declared) > 15
    for kind in declared.values():
        defaults = {param.name: param.default for param in kind.params if param.default is not None}
        effect = kind.effect({**defaults, **kind.example.params})
        if effect is None:
            continue
        assert isinstance(effect, Effect)
        assert 0 < effect.compute <= 1
        assert 0 <= effect.lost < 1
        # An effect on a port needs a target that has one.
        if effect.rate_bps is not None or effect.load_bps or effect.lost or effect.attracts:
            assert set(kind.targets) <= {"port", "rnic"}


def test_topology_of_the_lab_is_not_changed():
    before: Topology = SOFT.topology
    predicted(fault("switch.drain", "ctsw1"))
    assert SOFT.topology is before
