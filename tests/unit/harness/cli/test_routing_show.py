"""`routing show`: readable rules, tables, groups and marks of a switch, and leftovers of a scheme."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.lab import routing_commands
from faultbed.harness.cli.main import cli
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.shipped import inventory_named

TOPOLOGY = lab_inventory.load(inventory_named("soft-3rack")).topology
TO_HOST3 = "10.77.2.0/31"
STATE = {"rules": [], "tables": {"main": {TO_HOST3: ["ctsw1", "ctsw2"]}}, "groups": {}, "marked": None}


def rule(table, *, to=None, mark=None):
    return {"priority": 1000, "table": table, "to": to, "mark": mark, "in": None}


def shown(monkeypatch, state, *words, held=("static-parity",)):
    lab = SimpleNamespace(
        topology=TOPOLOGY, name="soft-3rack", carried=lambda nodes: {"fabric": dict.fromkeys(nodes)},
        request=lambda _machine, request: {"nodes": dict.fromkeys(request["nodes"], STATE | state), "held": list(held)},
    )  # fmt: skip
    monkeypatch.setattr(routing_commands, "open_lab", lambda _: contextlib.nullcontext(lab))
    return CliRunner().invoke(cli, ["--lab", "soft-3rack", "routing", "show", *words])


@pytest.mark.parametrize(
    ("state", "row"),
    [
        ({"rules": [rule(1002, to=TO_HOST3)], "tables": {"1002": {TO_HOST3: ["ctsw2"]}}}, "to 10.77.2.0/31 1002 ctsw2"),
        ({"rules": [rule(1002, to=TO_HOST3)], "tables": {}}, "to 10.77.2.0/31 1002 none: as BGP"),
        ({"rules": [rule(1001, mark=1001)], "tables": {"1001": {TO_HOST3: ["ctsw1"]}}}, "with mark 1001 1001 ctsw1"),
        ({"rules": [], "marked": [300, 41]}, "341 marked so far nftables"),
        (
            {
                "rules": [rule(1000)],
                "tables": {"1000": {TO_HOST3: ["group 1001000"]}},
                "groups": {"1001000": {"ports": ["ctsw1", "ctsw2"], "buckets": 64}},
            },
            "all 1000 ctsw1, ctsw2 (64 buckets)",
        ),
        ({}, "to 1 prefixes main (BGP) ctsw1, ctsw2"),
    ],
)
def test_routing_show_lists_table_and_next_hop(monkeypatch, state, row):
    done = shown(monkeypatch, state, "rtsw1")

    assert done.exit_code == 0, done.output
    assert row in [" ".join(line.split()[1:]) for line in done.output.splitlines()]
    assert "scheme: static-parity" in done.output


def test_routing_show_reports_rules_without_a_holder_as_leftovers(monkeypatch):
    done = shown(monkeypatch, {"rules": [rule(1001, mark=1001)]}, "rtsw1", held=())

    assert "rules left on rtsw1, although no scheme is held; run `faultbed heal`" in done.output


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({"marked": [0]}, "marks"),
        ({"tables": {"main": {}, "1001": {TO_HOST3: ["ctsw1"]}}}, "routes"),
        ({"groups": {"1001000": {"ports": ["ctsw1"], "buckets": 64}}}, "next-hop groups"),
    ],
)
def test_routing_show_reports_every_part_without_a_holder_as_a_leftover(monkeypatch, state, parts):
    """Rules are removed first, so that a removal that was cut short leaves the other parts."""
    done = shown(monkeypatch, state, "rtsw1", held=())

    assert f"{parts} left on rtsw1, although no scheme is held; run `faultbed heal`" in done.output


def test_routing_show_reports_a_held_scheme_without_rules(monkeypatch):
    done = shown(monkeypatch, {})
    assert (
        "static-parity is held, but no switch has a rule of it; if no run is in progress, run `faultbed heal`"
        in done.output
    )
    assert "scheme: static-parity" in shown(monkeypatch, {}, "ctsw1").output, "a spine has no choice"


def test_routing_show_prints_every_switch_as_json(monkeypatch):
    output = json.loads(shown(monkeypatch, {}, "--json").output)

    assert output["schemes"] == ["static-parity"]
    assert (
        set(output["switches"])
        == set(TOPOLOGY.switch_by_name)
        >= set(scheme_tables(TOPOLOGY, "pinned", Routing()).switches)
    )


def test_routing_show_rejects_an_unknown_switch(monkeypatch):
    done = shown(monkeypatch, {}, "rtsw9")

    assert isinstance(done.exception, UsageError)
    assert "no switch rtsw9 in soft-3rack; did you mean rtsw" in str(done.exception)
