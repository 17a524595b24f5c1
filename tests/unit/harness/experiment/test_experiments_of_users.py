"""Experiments that users of other tools ask for: each is a plan, or a refusal that names the nearest thing there is."""

from pathlib import Path

import pytest

from faultbed.harness.experiment import experiment_file
from faultbed.harness.run import loop as run
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

SOFT = load(inventories() / "soft.yml")
CASES = Path(__file__).parents[3] / "data" / "experiments-of-users"


def resolved(content):
    return run.resolve(experiment_file.decode(content, source="a.toml"), content, SOFT)


def test_experiment_of_lumina_names_packets_of_the_third_and_fourth_queue_pair():
    faults = resolved((CASES / "lumina.toml").read_bytes()).faults
    bound = [(fault.kind, fault.mechanism.late_binding.qp, fault.mechanism.late_binding.psn_ahead) for fault in faults]
    assert bound == [("packet.mark", "any", 4), ("packet.drop", "any[2]", 3), ("packet.drop", "any[3]", 5)]


def test_experiment_of_nccl_issue_1819_is_refused_with_the_kind_that_takes_an_address_away():
    content = (CASES / "nccl1819.toml").read_bytes()
    with pytest.raises((ConfigError, UsageError), match=r'"rnic\.gid-change"; did you mean rnic\.address\?$'):
        resolved(content)
    (fault,) = resolved(content.replace(b"rnic.gid-change", b"rnic.address")).faults
    assert (fault.kind, fault.target.text) == ("rnic.address", "host2:rxe0")


def test_experiment_of_perftest_issue_214_is_refused_with_the_metric_of_a_run_without_faults():
    content = (CASES / "perftest214.toml").read_bytes()
    with pytest.raises((ConfigError, UsageError), match=r"bound goodput\.lowest"):
        resolved(content)
    (bound,) = resolved(content.replace(b"goodput_min_ratio", b"goodput.lowest")).experiment.expectations
    assert (bound.metric.name, bound.metric.about_faults) == ("goodput.lowest", False)
