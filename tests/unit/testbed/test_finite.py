"""NaN, infinite and oversized numbers are refused wherever a user can write one, with their place."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from experiment_text import refused

import faultbed.traffic.flows.flow_spec
import faultbed.traffic.probes.prober
import faultbed.traffic.workloads.collective
import faultbed.traffic.workloads.inference
import faultbed.traffic.workloads.job
import faultbed.traffic.workloads.ranking
import faultbed.traffic.workloads.replay_batches
from faultbed.harness.cli.main import cli
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.experiment.declare.field_types import Number, Rate
from faultbed.harness.experiment.declare.section import AnyScalar, Named, OneOf, fields_of
from faultbed.harness.experiment.experiment_file import ExperimentFile
from faultbed.testbed.errors import ConfigError, FaultbedError
from faultbed.testbed.finite import wrong_number
from faultbed.testbed.inventory import schema

COLLECTIVE = 'collective = "all-reduce"\nsize = "1MiB"\niterations = 10\n'
FAULT = '[[faults]]\nkind = "link.down"\ntarget = "rtsw1:ctsw1"\nat = "8s"\nfor = "1s"\n'
WITH = f'name = "x"\n[workload]\n{COLLECTIVE}'
TEXTS = {
    "Collective": ("workload", WITH),
    "Ranking": ("workload", 'name = "x"\n[workload]\nembedding = "1MiB"\niterations = 5\n'),
    "Replay": ("workload", 'name = "x"\n[workload]\nreplay = "nothing.json"\n'),
    "Flow": ("workload", 'name = "x"\n[workload]\nflow = "write"\nsrc = "host1"\ndst = "host3"\nduration = "3s"\n'),
    "_Probe": ("probe", f"{WITH}[probe]\n"),
    "Bystander": ("bystander", f'{WITH}[bystander]\nsrc = "host1:rxe1"\ndst = "host2:rxe1"\n'),
    "Fault": ("faults[0]", f"{WITH}{FAULT}"),
    "_Expect": ("expect[0]", f'{WITH}[[expect]]\nmetric = "qp_errors"\n'),
    "_Stop": ("stop[0]", f'{WITH}{FAULT}[[stop]]\nmetric = "qp_errors"\n'),
}
"""A section of each class with a field for a float, at the end of a file, and its path."""


def sections(section=ExperimentFile):
    """Every section class and each of its fields that takes a float."""
    for field in fields_of(section):
        inner = field.type.kinds.values() if isinstance(field.type, OneOf) else [getattr(field.type, "section", None)]
        for one in inner:
            if one is not None:
                yield from sections(one)
        if isinstance(field.type, Number | Rate | AnyScalar):
            yield section.__name__, field.key
        elif isinstance(field.type, Named) and isinstance(field.type.of, AnyScalar):
            yield section.__name__, f"{field.key}.share"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", str(10**400)])
@pytest.mark.parametrize(("section", "field"), sorted(set(sections())))
def test_experiment_non_finite_float_is_rejected_with_its_path(section, field, number):
    """A new float field of the file format is a new case here; one without a sample section fails as a KeyError."""
    path, text = TEXTS[section]
    reported = refused(f"{text}{field} = {number}\n")
    assert f"x.toml: {path}.{field}: " in reported
    assert "usable number" in reported or "not a finite number" in reported


def test_experiment_format_has_float_fields_in_known_sections_only():
    assert {section for section, _ in sections()} == set(TEXTS)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ("min = 3\nmax = 1", "expect[0]: min (3) is above max (1)"),
        ("min = nan\nmax = 1", "expect[0].min: nan is not a finite number"),
        ("equals = nan", "expect[0].equals: nan is not a finite number"),
    ],
)
def test_expectation_with_contradictory_bounds_is_refused(bounds, message):
    text = f'name = "x"\n[workload]\n{COLLECTIVE}[[expect]]\nmetric = "qp_errors"\n{bounds}\n'
    assert message in refused(text)


def test_expectation_with_contradictory_times_is_refused():
    text = f'name = "x"\n[workload]\n{COLLECTIVE}{FAULT}[[expect]]\nmetric = "recovery.total"\nmin = "3s"\nmax = "1s"\n'
    assert "expect[0]: min (3s) is above max (1s)" in refused(text)


def test_expectation_of_a_noisy_metric_by_equality_is_refused():
    text = f'name = "x"\n[workload]\n{COLLECTIVE}[[expect]]\nmetric = "jct_ratio"\nequals = 1.0\n'
    assert "expect[0].equals: jct_ratio differs from run to run" in refused(text)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"a": [{"b": float("nan")}]}, "a[0].b"),
        ([1.0, float("inf")], "[1]"),
        ({"n": 2**63}, "n"),
        ({"ok": 2**63 - 1, "flag": True, "text": "nan"}, None),
    ],
)
def test_wrong_number_returns_its_path(raw, path):
    result = wrong_number(raw)
    assert (result and result[0]) == path


def test_wrong_number_reads_shared_containers_once():
    """Each level refers twice to the level below, as with YAML aliases: 2**60 paths, but only 60 containers."""
    tree = [1.0]
    for _ in range(60):
        tree = [tree, tree]
    assert wrong_number(tree) is None


INVENTORY = [
    (schema.CarrierVars, "faultbed_safety", {"longest_fault_s": float("nan")}, "safety.longest_fault_s"),
    (schema.HostVars, "faultbed_busbw", [{"at_least_gbytes_per_s": float("inf")}], "busbw[0].at_least"),
]


@pytest.mark.parametrize(("kind", "variable", "value", "path"), INVENTORY)
def test_inventory_non_finite_float_is_rejected_with_its_place(kind, variable, value, path, tmp_path):
    with pytest.raises(ConfigError, match="is not a finite number") as caught:
        schema.decode({variable: value}, kind, file=tmp_path / "lab.yml", place="hosts.host1")
    assert f"hosts.host1.{path}" in str(caught.value)


def options():
    """Every option of every command, with the command's words."""
    todo = [((), cli)]
    while todo:
        words, command = todo.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            todo += [((*words, name), command.get_command(context, name)) for name in command.list_commands(context)]
        for param in command.params:
            yield words, param


def float_options():
    return [(words, one) for words, one in options() if isinstance(one.type, click.types.FloatParamType)]


def test_command_line_has_float_options():
    assert len(float_options()) >= 8


@pytest.mark.parametrize(("words", "param"), float_options(), ids=str)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_float_option_that_is_not_finite_is_a_usage_error(words, param, number):
    assert isinstance(param.type, FiniteRange), (
        f"{' '.join(words)} {param.name}: use faultbed.harness.cli.options.numbers.FiniteRange"
    )
    with pytest.raises(click.BadParameter):
        param.type.convert(number, param, None)


@pytest.mark.parametrize(
    "words",
    [
        ["traffic", "replay", "x.json", "--speed", "nan"],
        ["inject", "packet.drop", "host1:rxe0", "--for", "nan"],
        ["inject", "packet.drop", "host1:rxe0", "--for", "inf"],
        ["inject", "packet.drop", "host1:rxe0", "--for", "1s", "--set", "share=nan", "--plan"],
        ["inject", "packet.drop", "host1:rxe0", "--for", "1s", "--set", "share=inf", "--plan"],
    ],
)
def test_command_with_a_number_that_is_not_finite_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, FaultbedError | SystemExit), done.output
    assert done.exit_code != 0
    assert "Traceback" not in done.output


SPECS = [
    (
        faultbed.traffic.workloads.collective.check,
        faultbed.traffic.workloads.collective.CollectiveSpec,
        {},
        "deadline_s",
        (),
    ),
    (
        faultbed.traffic.workloads.inference.check,
        faultbed.traffic.workloads.inference.InferenceSpec,
        {"requests": 1},
        "prefill_ms",
        (4,),
    ),
    (
        faultbed.traffic.workloads.ranking.check,
        faultbed.traffic.workloads.ranking.RankingSpec,
        {"embedding_bytes": 4, "iterations": 1},
        "skew",
        (4,),
    ),
    (
        faultbed.traffic.workloads.replay_batches.check,
        faultbed.traffic.workloads.replay_batches.ReplaySpec,
        {},
        "speed",
        (),
    ),
    (faultbed.traffic.probes.prober.check, faultbed.traffic.probes.prober.ProbeSpec, {}, "per_s", ()),
    (
        faultbed.traffic.flows.flow_spec.check,
        faultbed.traffic.flows.flow_spec.FlowSpec,
        {"src": "a", "dst": "b"},
        "rate_bps",
        (),
    ),
]


@pytest.mark.parametrize(("check", "kind", "words", "field", "more"), SPECS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_traffic_spec_with_a_number_that_is_not_finite_is_refused(check, kind, words, field, more, number):
    with pytest.raises(FaultbedError, match=f"{field}: .* is not a finite number"):
        check(kind(**words, **{field: number}), *more)
