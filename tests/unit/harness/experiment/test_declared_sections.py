"""What is derived from the declared sections: all errors of a file with their lines, schema, page, and `run --set`."""

from __future__ import annotations

import json
import re
import tomllib

import jsonschema
import pytest
from click.testing import CliRunner
from experiment_text import COLLECTIVE, FLOW, JOB, read
from house import DEMO, HOUSE

from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.declare import editor_schema, key_tables, metric_tables
from faultbed.harness.experiment.declare.section import OneOf, Table, fields_of
from faultbed.harness.experiment.experiment_file import ExperimentFile, decode
from faultbed.harness.experiment.parameters import parse_settings
from faultbed.harness.run import loop
from faultbed.testbed.errors import ConfigError, UsageError

BAD = """name = "X Y"
sed = 3
[workload]
collective = "all-reduce"
size = 4096
iterations = "3"
ranks = ["host1:rxe0", 7]
[[faults]]
kind = "link.flap"
for = "0s"
[[expect]]
metric = "recovry.total"
max = 3
[[expect]]
metric = "dip"
max = "20ms"
"""


def test_all_errors_of_a_file_are_reported_at_once_with_line_path_value_and_remedy():
    with pytest.raises(ConfigError) as caught:
        read(BAD)
    assert str(caught.value).splitlines() == [
        'x.toml:1: name: "X Y" must be 1 to 63 lower-case letters, digits, dots and dashes; correct it',
        'x.toml:2: no key "sed" here; did you mean seed?',
        'x.toml:5: workload.size: 4096 has no unit; write "4096B", or another of kB, MB, GB, KiB, MiB, GiB',
        'x.toml:6: workload.iterations: expected a whole number, got "3"; write one such as 1',
        "x.toml:7: workload.ranks[1]: expected text, got 7; write it in quotes",
        "x.toml:8: faults[0]: `target` and `at` are missing; add them",
        'x.toml:10: faults[0].for: "0s" is out of range; write more than 0s',
        'x.toml:12: expect[0].metric: no metric "recovry.total"; did you mean recovery.total?',
        'x.toml:16: expect[1].max: "20ms" is not a share; write a number and one of %, such as "20%"',
    ]


def test_many_errors_are_counted_instead_of_listed():
    text = COLLECTIVE.format("all-reduce", "".join(f"x{number} = 1\n" for number in range(100)))
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).splitlines()[-1] == "x.toml: 60 more values are invalid; correct these first"


@pytest.mark.parametrize(
    ("metric", "written", "bound"), [("dip", "20%", 0.2), ("goodput.mean", "1.5Gb/s", 1.5), ("jfi", "0.9", 0.9)]
)
def test_bound_may_have_the_unit_of_its_metric(metric, written, bound):
    text = COLLECTIVE.format("all-reduce", f'[[expect]]\nmetric = "{metric}"\nmax = "{written}"')
    assert read(text).expectations[0].maximum == bound


@pytest.mark.parametrize(("written", "rate_bps"), [('"20Mb/s"', 20e6), ('"0.4Gb/s"', 400e6), ('"0b/s"', 0)])
def test_rate_of_a_flow_has_a_unit(written, rate_bps):
    assert read(FLOW.format("write", f"rate = {written}")).workload.rate_bps == rate_bps


@pytest.mark.parametrize("written", ["20", "0", '"20"'])
def test_rate_of_a_flow_without_a_unit_is_refused(written):
    number = written.strip('"')
    with pytest.raises(ConfigError, match=f'workload.rate: {number} has no unit; write "{number}Mb/s"'):
        read(FLOW.format("write", f"rate = {written}"))


@pytest.mark.parametrize(("metric", "unit"), [("goodput.mean", "Gb/s"), ("recovery.total", "s")])
def test_bound_on_a_time_or_a_rate_needs_its_unit(metric, unit):
    text = COLLECTIVE.format("all-reduce", f'[[expect]]\nmetric = "{metric}"\nmax = 2')
    with pytest.raises(ConfigError, match=rf'expect\[0\].max: 2 has no unit; write "2{unit}"'):
        read(text)


def test_schema_and_pages_are_up_to_date():
    """The commands in CONTRIBUTING.md write them again."""
    assert (HOUSE / "tests/experiments/schema.json").read_text() == editor_schema.schema_text()
    assert (HOUSE / "docs/experiment-file.md").read_text() == key_tables.page()
    assert (HOUSE / "docs/metrics.md").read_text() == metric_tables.page()


def test_schema_accepts_shipped_experiments_and_rejects_what_the_decoder_rejects():
    schema = json.loads(editor_schema.schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in sorted((HOUSE / "tests/experiments").glob("*.toml")):
        assert path.read_text().startswith("#:schema ./schema.json\n")
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    storage = '[workload.storage]\nhost = "host4"\ncheckpoint = "4MiB:5:async"\n'
    flow = FLOW.format("send", 'rate = "20Mb/s"\ncheck = true')
    for text in (COLLECTIVE.format("barrier", ""), flow, JOB.format(storage)):
        read(text)
        jsonschema.validate(tomllib.loads(text), schema)
    for old, new in (("1MiB", "1MiBB"), ("iterations = 3", "iterations = 0"), ("size", "sise"), ("all-reduce", "x")):
        text = COLLECTIVE.format("all-reduce", "").replace(old, new)
        with pytest.raises(ConfigError):
            read(text)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(text), schema)


def sections(section=ExperimentFile):
    yield section
    for field in fields_of(section):
        kinds = field.type.kinds.values() if isinstance(field.type, OneOf) else ()
        for inner in (field.type.section,) if isinstance(field.type, Table) else kinds:
            yield from sections(inner)


@pytest.mark.parametrize("section", sorted(set(sections()), key=lambda section: section.__name__))
def test_every_declared_default_is_read_back_from_what_is_written(section):
    """What help, schema and page show as the default is the default."""
    for field in fields_of(section):
        assert field.type.says.endswith("."), field.key
        if not field.required and field.default not in (None, (), {}, "") and not isinstance(field.type, Table):
            assert field.type.read(field.type.write(field.default)) == field.default, field.key


def planned(*words):
    done = CliRunner().invoke(cli, ["run", str(DEMO), "--plan", "--json", *words], standalone_mode=False)
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def test_run_set_changes_the_plan_and_the_recorded_file_alike(monkeypatch, tmp_path):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    recorded, resolve = [], loop.resolve
    monkeypatch.setattr(loop, "resolve", lambda *args, **kwargs: recorded.append(args[1]) or resolve(*args, **kwargs))
    words = ("--set", "workload.size=1MiB", "--set", "faults[1].for=2s", "--set", "faults[1].set.share=20%")
    plan = planned(*words)
    text = json.dumps(plan)
    assert '"size_bytes": 1048576' in text
    assert '"size_bytes": 262144' in json.dumps(planned())
    (with_settings, unchanged) = recorded
    assert with_settings.startswith(b"# demo.toml with workload.size=1MiB; faults[1].for=2s")
    again = decode(with_settings, source="experiment.toml")
    assert (again.workload.size_bytes, again.faults[1].duration_ns) == (1 << 20, 2_000_000_000)
    assert again.faults[1].parameters == {"share": "20%"}
    assert unchanged == DEMO.read_bytes()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("workload.siz=1MiB", "workload.siz: this experiment has no such parameter; did you mean workload.size?"),
        ("workload.size=big", 'workload.size: "big" is not a size; write a number and one of B,'),
        ("faults[0].for=3", 'faults[0].for: 3 has no unit; write "3s"'),
        ("expect[9].max=3", "expect[9].max: this experiment has no such parameter; did you mean expect["),
        ("workload.size", "--set workload.size: write PATH=VALUE, such as workload.size=1MiB"),
        ("seed=3", "seed: this experiment has no such parameter"),
        ("workload.iterations=3", "workload: give either iterations or duration (with workload.iterations=3)"),
        ("workload.size=a\nb", "--set workload.size: a control character"),
    ],
)
def test_run_set_with_a_wrong_path_or_value_is_one_sentence(setting, message):
    done = CliRunner().invoke(cli, ["run", str(DEMO), "--plan", "--set", setting], standalone_mode=False)
    assert isinstance(done.exception, UsageError), done.output
    assert re.search(re.escape(message), str(done.exception))
    assert "\n" not in str(done.exception)


def test_run_set_of_one_path_twice_is_refused():
    with pytest.raises(UsageError, match=r"workload\.qps is set twice, first to 1; remove one"):
        parse_settings(["workload.qps=1", "workload.qps=2"])
