"""A parameter of a fault that is a time, a size or a rate needs its unit, wherever a person writes it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from local_lab import Here

from faultbed.harness.cli.experiments import faults
from faultbed.harness.experiment.experiment_file import decode
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.param_units import why_no_quantity
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

SOFT = load(inventories() / "soft.yml").topology
FILE = """name = "x"
[workload]
collective = "all-reduce"
size = "64KiB"
duration = "20s"
[[faults]]
kind = "{kind}"
target = "host1:rxe0"
at = "5s"
for = "5s"
set = {{ {set} }}
"""
BARE = [
    ("packet.delay", "delay", 20, '20 has no unit; write "20ms", or another of ns, us, s, m, h, d'),
    ("packet.delay", "delay", "2.5", '2.5 has no unit; write "2.5ms", or another of ns, us, s, m, h, d'),
    ("link.flap", "period", 0.5, '0.5 has no unit; write "0.5s", or another of ns, us, ms, m, h, d'),
    ("link.rate", "rate", 10, '10 has no unit; write "10Mb/s", or another of b/s, kb/s, Gb/s, Tb/s'),
    ("link.mtu", "mtu", 1500, '1500 has no unit; write "1500B", or another of kB, MB, GB, KiB, MiB, GiB'),
    ("host.clock-step", "step", "-30", '-30 has no unit; write "-30s", or another of ns, us, ms, m, h, d'),
]


@pytest.mark.parametrize(("kind", "name", "value", "sentence"), BARE)
def test_file_with_a_bare_number_names_path_value_and_unit(kind, name, value, sentence):
    text = f'"{value}"' if isinstance(value, str) else value
    with pytest.raises(ConfigError) as refused:
        decode(FILE.format(kind=kind, set=f"{name} = {text}").encode(), source="x.toml")
    assert f"faults[0].set.{name}: {sentence}" in str(refused.value)


@pytest.mark.parametrize(("kind", "name", "value", "sentence"), BARE)
def test_command_line_with_a_bare_number_is_refused(tmp_path, kind, name, value, sentence):
    words = [kind, "host1", "--for", "5s", "--set", f"{name}={value}", "--plan"]
    done = CliRunner().invoke(faults.inject, words, obj=Here(tmp_path), standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == f"--set {name}: {sentence}"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("packet.delay", "delay", "20ms"), ("packet.delay", "delay", "0.02s"), ("link.rate", "rate", "10Mbit/s"),
        ("gpu.throttle", "percent", 50), ("packet.drop", "share", 0.1), ("packet.drop", "share", "10%"),
        ("packet.drop", "every", 7), ("gpu.ecc", "rate", 2), ("gpu.overheat", "celsius", 92),
        ("packet.drop", "psn", "+1"), ("no.kind", "delay", 5), ("packet.delay", "no", 5),
        ("packet.delay", "delay", True),
    ],
)  # fmt: skip
def test_value_with_its_unit_or_without_any_unit_is_no_matter_of_units(kind, name, value):
    assert why_no_quantity(kind, name, value) is None


@pytest.mark.parametrize("kind", [kind for kind in CATALOGUE.values() if "soft" in kind.fidelity], ids=lambda k: k.name)
def test_parameters_are_spelled_as_a_person_may_write_them(kind):
    """What a plan has, is written to a file and planned again, is the same."""
    params = kind.example.params
    spelled = kind.spelled(params)
    assert [why_no_quantity(kind.name, name, value) for name, value in spelled.items()] == [None] * len(params)
    plans = [
        plan(FaultSpec(kind=kind.name, target=kind.example.target, for_s=5.0, params=one), SOFT, lab_kind="soft")
        for one in (params, spelled)
    ]
    assert plans[0].spec.params == plans[1].spec.params
