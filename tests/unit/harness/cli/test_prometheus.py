"""The Prometheus text passes a strict parser of its format, and each series keeps its name and labels."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from watched_lab import Watched

from faultbed.harness.cli.lab import watching
from faultbed.harness.cli.lab.prometheus import exposition
from faultbed.harness.cli.main import cli
from faultbed.testbed.observe.counters import STATES

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"(?P<name>{NAME})\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}} (?P<value>-?[0-9]+)")
HELP = re.compile(rf"# HELP (?P<name>{NAME}) (?P<words>(?:[^\\\n]|\\\\|\\n)+)")
TYPE = re.compile(rf"# TYPE (?P<name>{NAME}) (?P<type>counter|gauge)")


def read(text):
    """Parse an exposition into {metric: (type, {labels: value})} and reject what format 0.0.4 forbids."""
    assert not text or text.endswith("\n")
    assert "\r" not in text.replace("\\r", "")
    actual, helped, current = {}, set(), None
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            match = HELP.fullmatch(line)
            assert match, line
            assert match["name"] not in helped, "one line of help a metric"
            helped.add(match["name"])
            current = None
        elif line.startswith("# TYPE "):
            match = TYPE.fullmatch(line)
            assert match, line
            assert match["name"] in helped
            assert match["name"] not in actual, "one type a metric, before its samples, which stand together"
            current = match["name"]
            actual[current] = (match["type"], {})
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match["name"] == current, "samples of a metric stand together"
            samples = actual[current][1]
            names = [one.partition("=")[0] for one in re.findall(LABEL, match["labels"])]
            assert len(names) == len(set(names))
            assert match["labels"] not in samples, "no series twice"
            samples[match["labels"]] = int(match["value"])
    return actual


def test_prometheus_counters_and_states_have_their_type():
    """Each is a family of its own with node and device as labels."""
    text = exposition("soft", {"host1": {"rxe0.send_err": 2, "be0.carrier": 1}})
    assert text == (
        "# HELP faultbed_carrier State carrier of a node's kernel, driver or RNIC.\n"
        "# TYPE faultbed_carrier gauge\n"
        'faultbed_carrier{lab="soft",node="host1",device="be0"} 1\n'
        "# HELP faultbed_send_err Counter send_err of a node's kernel, driver or RNIC.\n"
        "# TYPE faultbed_send_err counter\n"
        'faultbed_send_err{lab="soft",node="host1",device="rxe0"} 2\n'
    )
    assert set(read(text)) == {"faultbed_carrier", "faultbed_send_err"}


ANY = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
# `device.what`, or `what` alone: no counter begins with the dot after its device.
NAMES = ANY.filter(lambda name: not name.startswith("."))
COUNTERS = st.dictionaries(ANY, st.dictionaries(NAMES, st.integers(-1, 2**64 - 1), max_size=8), max_size=4)


@given(lab=ANY, counters=COUNTERS)
def test_prometheus_text_is_well_formed_for_any_names(lab, counters):
    result = read(exposition(lab, counters))
    assert sum(len(samples) for _, samples in result.values()) == sum(len(values) for values in counters.values())
    values = sorted(value for _, samples in result.values() for value in samples.values())
    assert values == sorted(value for each in counters.values() for value in each.values())


def test_prometheus_names_mapped_to_one_metric_stay_two_series():
    result = read(exposition("soft", {"host1": {"rxe0.rx-drops": 1, "rxe0.rx drops": 2, "rxe0.rx_drops": 3}}))
    assert set(result) == {"faultbed_rx_drops"}
    assert sorted(result["faultbed_rx_drops"][1].values()) == [1, 2, 3]


@given(counters=COUNTERS, seed=st.randoms())
def test_prometheus_series_do_not_depend_on_order_or_value(counters, seed):
    """A series keeps its name and labels if the values are read later and in another order."""
    nodes = list(counters.items())
    seed.shuffle(nodes)
    again = {node: {name: value + 1 for name, value in reversed(values.items())} for node, values in nodes}
    first, second = read(exposition("soft", counters)), read(exposition("soft", again))
    assert {metric: (kind, set(samples)) for metric, (kind, samples) in first.items()} == {
        metric: (kind, set(samples)) for metric, (kind, samples) in second.items()
    }


def test_prometheus_increments_are_gauges():
    result = read(exposition("soft", {"host1": {"rxe0.send_err": 2}}, increments=True))
    assert result["faultbed_send_err"][0] == "gauge"


def test_prometheus_text_of_no_counters_is_empty():
    assert exposition("soft", {}) == exposition("soft", {"host1": {}}) == ""


@pytest.mark.parametrize("arguments", [(), ("--changed", "0.1", "--name", "lo.*")])
def test_prometheus_text_of_this_machine_is_well_formed(monkeypatch, arguments):
    """The command runs the node's own program; no label holds a process id or a time."""
    monkeypatch.setattr(watching, "open_lab", lambda _inventory: Watched())
    done = CliRunner().invoke(cli, ["counters", "--prometheus", *arguments], standalone_mode=False)
    assert done.exception is None
    result = read(done.output)
    if not arguments:
        assert result["faultbed_mtu"][0] == "gauge"
        assert {kind for metric, (kind, _) in result.items() if metric.removeprefix("faultbed_") not in STATES} == {
            "counter"
        }
    else:
        assert {kind for kind, _ in result.values()} <= {"gauge"}
