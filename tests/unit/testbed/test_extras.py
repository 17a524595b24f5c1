"""Optional packages: a missing one is one sentence with the command that installs it."""

import sys

import pytest
from click.testing import CliRunner
from house import TRACES

from faultbed.harness.cli.main import cli
from faultbed.testbed.errors import UsageError
from faultbed.testbed.extras import extra
from faultbed.traffic.traces import trace_files


def forget(monkeypatch, *names):
    """Make an import of these modules, and of ours that use them, fail as if they were not installed."""
    for name in [*sys.modules]:
        if name.startswith(names):
            monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_fuzz_without_hypothesis_names_the_extra(monkeypatch, tmp_path):
    for name in [*sys.modules]:
        if name.startswith("faultbed.harness.fuzz"):
            monkeypatch.delitem(sys.modules, name)
    forget(monkeypatch, "hypothesis")
    with pytest.raises(UsageError, match=r"^`faultbed fuzz` needs .*hypothesis.*: pip install 'faultbed\[fuzz\]'$"):
        CliRunner().invoke(
            cli, ["fuzz", "--plan", "--out", str(tmp_path)], standalone_mode=False, catch_exceptions=False
        )


def test_chakra_trace_without_protobuf_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "faultbed.traffic.traces.chakra", raising=False)
    monkeypatch.delitem(sys.modules, "faultbed.traffic.traces.chakra_messages", raising=False)
    monkeypatch.delattr("faultbed.traffic.traces.chakra", raising=False)
    monkeypatch.delattr("faultbed.traffic.traces.chakra_messages", raising=False)
    forget(monkeypatch, "google.protobuf")
    with pytest.raises(
        UsageError, match=r"^a Chakra trace needs .*google\.protobuf.*: pip install 'faultbed\[chakra\]'$"
    ):
        trace_files.load(TRACES / "tensor-parallel")


def test_extra_does_not_hide_a_missing_module_of_our_own():
    """A typing error in our own code must stay a defect with a traceback."""
    with pytest.raises(ModuleNotFoundError), extra("fuzz", "x"):
        import faultbed.testbed.no_such_module  # noqa: F401
