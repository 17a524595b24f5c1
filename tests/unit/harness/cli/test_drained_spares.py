"""A spare on a host that earlier runs list for drain is refused at planning, on labs whose hosts keep their defects."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from labelled_run import Network

from faultbed.harness.cli.main import cli
from faultbed.harness.findings import Attribution
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

RACK, SOFT = inventories() / "rack-h100.example.yml", inventories() / "soft.yml"
JOB = """\
name = "spares"
[workload]
grid = "dp=2"
phases = ["dp:all-reduce:64KiB"]
iterations = 10
ranks = ["{first}", "{second}"]
[workload.storage]
host = "host4"
checkpoint = "512KiB:5"
[workload.resilience]
restart = "spare"
spares = ["{spare}"]
"""


def rnics(inventory):
    return [f"{host.name}:{host.rnics[0].name}" for host in load(inventory).topology.hosts]


def past_run(folder, number, *, lab, name):
    """Write a run without faults that blames a GPU, `number` days ago."""
    directory = finished(folder / str(number), Network(seed=number + 1).measured(None, None))
    blamed = Attribution(cause="slow-rank", place="gpu", name=name, confidence=0.9, evidence=("it is slow",))
    directory.write_verdict(msgspec.structs.replace(directory.read_verdict(), lab=lab, attribution=(blamed,)))
    day = datetime.now(UTC) - timedelta(days=number)
    directory.path.rename(folder / f"{day:%Y%m%dT%H%M%SZ}-demo-{number}")


def plan(tmp_path, inventory, *, spare):
    names = rnics(inventory)
    first, second = [name for name in names if name != names[spare]][:2]
    file = tmp_path / "spares.toml"
    file.write_text(JOB.format(first=first, second=second, spare=names[spare]))
    words = ["--lab", str(inventory), "run", str(file), "--plan", "--out", str(tmp_path / "runs")]
    return CliRunner().invoke(cli, words, standalone_mode=False)


@pytest.fixture
def runs(tmp_path):
    """Three runs on each of two labs that blame the GPU of host2."""
    for number in range(3):
        past_run(tmp_path / "runs", number, lab=load(RACK).name, name="host2:gpu0")
        past_run(tmp_path / "runs", number + 3, lab=load(SOFT).name, name="host2:gpu0")


@pytest.mark.usefixtures("runs")
def test_spare_on_a_host_to_drain_is_refused_at_planning(tmp_path):
    error = plan(tmp_path, RACK, spare=1).exception
    assert isinstance(error, ConfigError), error
    assert "host2:mlx5_0 is on a host to drain (drain: slow-rank at host2:gpu0)" in str(error)
    assert "name another spare" in str(error)
    assert f"move the runs from before the repair out of {tmp_path / 'runs'}" in str(error)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("inventory", "spare"), [(RACK, 2), (SOFT, 1)])
def test_spare_on_another_host_or_on_a_lab_with_a_snapshot_is_accepted(tmp_path, inventory, spare):
    result = plan(tmp_path, inventory, spare=spare)
    assert result.exception is None, result.exception


def test_spare_is_accepted_without_earlier_runs(tmp_path):
    assert plan(tmp_path, RACK, spare=1).exception is None
