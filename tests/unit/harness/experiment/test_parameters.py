"""Parameters of an experiment by path: all paths of a file are known, and a wrong one is refused with the nearest."""

from __future__ import annotations

import tomllib

import house
import pytest
from experiment_text import COLLECTIVE, FLOW, JOB
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.parameters import known_paths, parse, with_values
from faultbed.testbed.errors import ConfigError, UsageError

DEMO = house.DEMO.read_bytes()


def raw_of(content, **values):
    made, _ = with_values(content, values, source="x.toml")
    return tomllib.loads(made.decode())


def refused(content, path, value):
    with pytest.raises(ConfigError) as caught:
        with_values(content, {path: value}, source="x.toml")
    return str(caught.value)


def test_parse_reads_values_in_order_and_commas_within_quotes():
    result = parse('workload.grid="tp=2,dp=2", dp=4')
    assert (result.path, result.values) == ("workload.grid", ("tp=2,dp=2", "dp=4"))
    assert parse("faults[0].set.share=0.1").values == ("0.1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workload.size", "write PATH=V1,V2"),
        ("=1", "write PATH=V1,V2"),
        ("workload.size=", "write PATH=V1,V2"),
        ("workload.size=1,,2", "a value is empty"),
        ("workload.qps=1,2,1", "1 appears twice; use --repeat"),
    ],
)
def test_parse_rejects_invalid_parameters(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


def test_file_without_new_values_stays_the_same_experiment():
    made, experiment = with_values(DEMO, {}, source="demo")
    assert tomllib.loads(made.decode()) == tomllib.loads(DEMO.decode())
    assert experiment == decode(DEMO, source="demo")


@pytest.mark.parametrize(
    "content", [DEMO, (COLLECTIVE.format("all-reduce", "")).encode(), FLOW.format("write", "").encode()]
)
def test_parameter_path_accepts_the_value_already_there(content):
    """Every value in the file can be set by its path and keeps its meaning."""
    raw = tomllib.loads(content.decode())
    for path in known_paths(raw):
        here = raw
        try:
            for step in path.replace("[", ".[").split("."):
                here = here[int(step[1:-1])] if step.startswith("[") else here[step]
        except (KeyError, TypeError):
            continue  # an optional parameter that the file does not set
        text = str(here).lower() if isinstance(here, bool) else str(here)
        if not isinstance(here, list | dict):
            assert raw_of(content, **{path: text}) == raw, path


def test_parameter_of_a_fault_keeps_the_others_and_adds_missing_sections():
    text = FLOW.format(
        "write", '[[faults]]\nkind = "packet.drop"\ntarget = "host3:rxe0"\nat = "1s"\nfor = "1s"\n'
    ).encode()
    made = raw_of(text, **{"faults[0].set.share": "0.25", "workload.qp.timeout": "17"})
    assert made["faults"] == [
        {"kind": "packet.drop", "target": "host3:rxe0", "at": "1s", "for": "1s", "set": {"share": 0.25}}
    ]
    assert made["workload"]["qp"] == {"timeout": 17}


def test_parameter_value_is_converted_for_its_place():
    text = FLOW.format("write", "").encode()
    assert raw_of(text, **{"workload.size": "4096B"})["workload"]["size"] == "4096B"
    assert raw_of(text, **{"workload.qps": "4"})["workload"]["qps"] == 4
    assert raw_of(text, **{"workload.latency": "true"})["workload"]["latency"] is True
    together = raw_of(text, **{"workload.check": "true", "workload.flow": "send"})
    assert together["workload"]["check"] is True, "neither of the two fits the file without the other"
    assert raw_of(JOB.format("").encode(), **{"workload.phases[1]": "dp:all-gather:2MiB"})["workload"]["phases"][1] == (
        "dp:all-gather:2MiB"
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workload.colective", "x", "no such parameter; did you mean workload.collective?"),
        ("faults[1].set.shar", "1", "did you mean faults[1].set.share?"),
        ("faults[7].set.share", "1", "no such parameter; did you mean"),
        ("name", "x", "no such parameter"),
        ("seed", "3", "no such parameter"),
        ("workload.compute_units", "-1", "x.toml: workload.compute_units: -1 is out of range; write at least 0"),
        ("workload.compute_units", "many", 'expected a whole number, got "many"'),
        ("workload.size", "big", 'x.toml: workload.size: "big" is not a size'),
        ("faults[0].for", "0s", 'x.toml: faults[0].for: "0s" is out of range; write more than 0s'),
        ("expect[0].max", "nan", "x.toml: expect[0]"),
    ],
)
def test_parameter_with_a_wrong_path_or_value_is_rejected_with_its_location(path, value, message):
    assert message in refused(DEMO, path, value)


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_parameter_text_round_trips_through_toml(key, text):
    """The output is TOML, whatever characters a value or a key of `set` has."""
    from faultbed.harness.experiment.toml_text import experiment_toml as _toml

    raw = {"name": "x", "workload": {"collective": text, "qp": {key: 1}}, "faults": [{"set": {key: text}}]}
    assert tomllib.loads(_toml(raw).decode()) == raw


def test_routing_scheme_of_a_file_without_one_can_be_swept():
    assert raw_of(FLOW.format("write", "").encode(), **{"fabric.routing": "ecmp"})["fabric"] == {"routing": "ecmp"}


@pytest.mark.parametrize("value", ["a\nb", "\udcff", "1" * 5000, "x" * 200_000, "\0"])
def test_parse_value_that_no_shell_means_is_one_sentence(value):
    with pytest.raises(UsageError, match=r"--over workload\.size: a control character, or more than 4000 characters"):
        parse(f"workload.size={value}")


def test_weight_of_a_link_can_be_swept_by_its_name():
    text = FLOW.format("write", '[fabric]\nrouting = "weighted"\nweights = { "rtsw1:ctsw1" = 3 }\n').encode()
    assert raw_of(text, **{"fabric.weights.rtsw1:ctsw1": "2"})["fabric"]["weights"] == {"rtsw1:ctsw1": 2}
    assert "did you mean fabric.weights.rtsw1:ctsw1?" in refused(text, "fabric.weights.rtsw1:ctsw2", "2")


def test_weights_as_a_whole_are_no_parameter():
    """The value of a parameter is a number or a text, but the weights of links are a table."""
    text = FLOW.format("write", '[fabric]\nrouting = "weighted"\n').encode()
    assert "no such parameter" in refused(text, "fabric.weights", "3")
    assert known_paths(tomllib.loads(text.decode())).count("fabric.buckets") == 1


def test_restart_policy_of_a_job_can_be_swept():
    section = '[workload.storage]\nhost = "host4"\ncheckpoint = "1MiB:5"\n[workload.resilience]\nspares = ["host4"]\n'
    text = JOB.format(section).encode()
    made = raw_of(text, **{"workload.resilience.most_restarts": "2", "workload.resilience.rejoin": "90s"})
    assert made["workload"]["resilience"] == {"spares": ["host4"], "most_restarts": 2, "rejoin": "90s"}
    assert "workload.resilience" not in known_paths(tomllib.loads(text.decode())), "a section is no value"
    message = refused(JOB.format("").encode(), "workload.resilience.most_restarts", "2")
    assert "x.toml: workload.resilience: a job restarts from checkpoints, and this one stores none" in message
