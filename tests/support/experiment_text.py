"""Experiments as text, decoded or rejected on the default soft lab; the workloads that several tests share."""

from __future__ import annotations

import re

import pytest
from synthetic_run import soft_topology

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import ConfigError


def read(text):
    return decode(text.encode(), source="x.toml")


def refused(text):
    """Return the error of a file without line numbers, which have tests of their own."""
    with pytest.raises(ConfigError) as caught:
        fit(read(text), soft_topology(), "soft")
    return re.sub(r"^x\.toml:[0-9]+: ", "x.toml: ", str(caught.value), flags=re.MULTILINE)


COLLECTIVE = 'name = "x"\n[workload]\ncollective = "{0}"\nsize = "1MiB"\niterations = 3\n{1}\n'
FLOW = 'name = "x"\n[workload]\nflow = "{0}"\nsrc = "host1"\ndst = "host3"\nduration = "3s"\n{1}\n'
JOB = """
name = "x"
[workload]
grid = "tp=2,dp=2"
phases = ["tp:all-reduce:64KiB", "dp:all-gather:1MiB:ring"]
iterations = 20
{}
"""
