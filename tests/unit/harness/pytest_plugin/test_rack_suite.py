"""Tests and experiments that `make rack-nightly` collects for a rack.

This checks only which items exist and that their faults can be planned; none has run on hardware.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from common_faults import CASES
from house import HOUSE

from faultbed.harness.experiment.experiment_file import load as load_experiment
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.policy import safety
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

SOFT, RACK = load(inventories() / "soft.yml"), load(inventories() / "rack-h100.example.yml")
LEAST = 30

LIST = """
import pathlib

def pytest_collection_finish(session):
    with pathlib.Path({path!r}).open("w") as file:
        for item in session.items:
            print(item.nodeid, *sorted(mark.name for mark in item.iter_markers()), sep="\\t", file=file)
"""


def arguments(target):
    """The arguments that the Makefile gives to pytest."""
    output = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", "setup", target],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (words,) = re.findall(r"-m pytest (.*)", output)
    return words


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Every item that `make rack-nightly` collects for the example of a rack, with the names of its marks."""
    folder = tmp_path_factory.mktemp("rack")
    (folder / "list_items.py").write_text(LIST.format(path=str(folder / "items")))
    options = f"-q --collect-only -p no:cacheprovider -p list_items --lab={RACK.path}"
    subprocess.run(
        ["sh", "-c", f"PYTHONPATH={folder} exec {sys.executable} -m pytest {options} {arguments('rack-nightly')}"],
        cwd=HOUSE, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split("\t") for line in (folder / "items").read_text().splitlines()]
    return [SimpleNamespace(nodeid=nodeid, marks=set(marks)) for nodeid, *marks in lines]


def is_soft_experiment(nodeid):
    """Return whether an item is an experiment that names `soft` as its kind of lab, and is skipped on a rack."""
    path = HOUSE / nodeid.partition("::")[0]
    return path.suffix == ".toml" and load_experiment(path).lab_kind == "soft"


@pytest.mark.process
def test_rack_nightly_collects_thirty_items_that_are_not_for_soft_labs_alone(collected):
    """A rack skips every module of tests/soft, because it has the mark `soft`: the items must come from elsewhere."""
    ours = [item.nodeid for item in collected if "soft" not in item.marks and not is_soft_experiment(item.nodeid)]
    assert len(ours) >= LEAST, ours
    assert {name.split("/")[1] for name in ours} == {"common", "experiments"}
    assert len({name for name in ours if name.startswith("tests/experiments/rack-")}) >= 2


@pytest.mark.process
def test_rack_nightly_collects_no_soft_lab_test(collected):
    assert not [item.nodeid for item in collected if item.nodeid.startswith("tests/soft/")]


@pytest.mark.process
def test_common_tests_carry_needs_and_not_a_kind_of_lab(collected):
    common = [item for item in collected if item.nodeid.startswith("tests/common/")]
    assert common
    assert [item.nodeid for item in common if "needs" not in item.marks] == []
    assert [item.nodeid for item in common if item.marks & {"soft", "lab"}] == []


@pytest.mark.parametrize("name", CASES)
def test_common_fault_can_be_planned_and_is_permitted_on_both_kinds_of_lab(name):
    case = CASES[name]
    for inventory in (SOFT, RACK):
        for_s, params = case.of(inventory.kind)
        spec = FaultSpec(kind=case.kind, target=case.target, for_s=for_s, params=params)
        safety.check(plan(spec, inventory.topology, lab_kind=inventory.kind), inventory)
