"""Rack experiments fit the example rack, and are skipped on a lab of the other kind unless they name both kinds."""

import pytest
from house import DEMO

from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment.run_plan import encode
from faultbed.harness.report.step_summary import JobResults, markdown, read_junit
from faultbed.harness.run import loop as run
from faultbed.inject.policy import safety
from faultbed.testbed.directories import cache_dir
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

pytest_plugins = ["pytester"]

FOLDER = DEMO.parent
RACK, SOFT, BOX = (
    load(inventories() / name) for name in ("rack-h100.example.yml", "soft.yml", "linux-box.example.yml")
)
CACHE = str(cache_dir())
OF_RACKS = sorted(FOLDER.glob("rack-*.toml"))


@pytest.mark.parametrize("path", OF_RACKS, ids=lambda path: path.stem)
def test_rack_experiment_fits_the_example_and_its_policy(path):
    resolved = run.resolve(experiment_module.load(path), path.read_bytes(), RACK)
    assert resolved.faults
    for fault in resolved.faults:
        safety.check(fault, RACK)
    with pytest.raises(Unsupported, match="it is for a rack lab, but soft is a soft lab"):
        run.resolve(resolved.experiment, path.read_bytes(), SOFT)


def test_experiment_with_selectors_is_planned_on_both_kinds_of_lab_and_always_the_same():
    path = FOLDER / "anywhere.toml"
    experiment = experiment_module.load(path)
    assert experiment.lab_kind is None
    for inventory, rnic in ((SOFT, "rxe0"), (RACK, "mlx5_0")):
        resolved = run.resolve(experiment, path.read_bytes(), inventory)
        assert [fault.target.text for fault in resolved.faults] == [f"rtsw1:host1:{rnic}", "host2:gpu0"]
        assert run.refusal(resolved, inventory) is None
        assert encode(resolved.plan) == encode(run.resolve(experiment, path.read_bytes(), inventory).plan)


EXACT = """
name = "one-packet"

[lab]
kind = "rack"

[workload]
flow = "write"
src = "host2:mlx5_0"
dst = "host1:mlx5_0"
size = "64KiB"
duration = "30s"

[capture]
ports = ["PORT"]

[[faults]]
id = "drop"
kind = "packet.drop"
target = "host1:mlx5_0"
at = "10s"
for = "1s"
set = { qp = "any", psn = "+100" }

[[expect]]
metric = "nak_episodes"
min = 1
"""


def decided_on(inventory, port, tmp_path):
    path = tmp_path / "exact.toml"
    path.write_text(EXACT.replace("PORT", port))
    return run.resolve(experiment_module.load(path), path.read_bytes(), inventory)


def test_rack_linux_box_drops_one_packet_and_captures_it(tmp_path):
    """The box's owner permits the fault; packets that the ASIC at the other end forwards cannot be captured."""
    resolved = decided_on(BOX, "host1:mlx5_0", tmp_path)
    assert resolved.experiment.capture == ("box1:host1:mlx5_0",)
    (fault,) = resolved.faults
    assert fault.place.node == "box1"
    safety.check(fault, BOX)
    for port in ("rtsw2:ctsw1", "host2:mlx5_0"):
        with pytest.raises(UsageError, match=r"capture.ports\[0\]: rtsw2 forwards in an ASIC"):
            decided_on(BOX, port, tmp_path)


def test_rack_experiments_exist_and_the_demo_is_none():
    assert len(OF_RACKS) >= 2
    assert experiment_module.load(FOLDER / "demo.toml").lab_kind == "soft"


@pytest.fixture
def of_the_demo(pytester, monkeypatch):
    """Run pytest in a folder that has the demo experiment, with the example rack as its lab."""
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)  # pytester's home is empty, and asking Ansible takes a while
    (pytester.path / "experiments").mkdir()
    (pytester.path / "experiments/demo.toml").write_text((FOLDER / "demo.toml").read_text())
    pytester.makeini("[pytest]\nfaultbed_experiments = experiments\n")
    return lambda *argv: pytester.runpytest_inprocess("-rs", f"--lab={RACK.path}", *argv)


def test_experiment_for_the_other_kind_of_lab_is_skipped_and_no_pass(of_the_demo, pytester):
    done = of_the_demo("--junitxml=junit.xml", "experiments")
    done.assert_outcomes(skipped=1)
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    done.stdout.fnmatch_lines(["*this is not a pass*", "*it is for a soft lab, but rack-h100 is a rack lab*"])
    page = markdown("x", JobResults(cases=read_junit([pytester.path / "junit.xml"])))
    assert page.startswith("## ❌")
    assert "it is for a soft lab" in page


def test_session_with_a_passed_test_and_a_skip_is_a_pass(of_the_demo, pytester):
    pytester.makepyfile(test_own="def test_own(): ...\n")
    done = of_the_demo("experiments", "test_own.py")
    done.assert_outcomes(passed=1, skipped=1)
    assert done.ret == 0


PAIR = """
name = "pair"

[lab]
kind = "rack"

[workload]
flow = "write"
src = "host2:mlx5_0"
dst = "host1:mlx5_0"
size = "64KiB"
duration = "30s"

[[faults]]
id = "dark"
kind = "link.oneway"
target = "host1:mlx5_0"
at = "10s"
for = "3s"

[[expect]]
metric = "qp_errors"
max = 8
"""


def test_run_on_two_hosts_of_a_rack_ignores_other_hosts(tmp_path):
    """Another user's losses on host3 do not prove this run's faults, and a reboot of host4 does not end the run."""
    path = tmp_path / "pair.toml"
    path.write_text(PAIR)
    resolved = run.resolve(experiment_module.load(path), path.read_bytes(), RACK)
    assert resolved.hosts == ("host1", "host2")
    (fault,) = resolved.faults
    keys = {key for witness in fault.mechanism.must_move for key in witness.any_of} | set(fault.mechanism.must_not_move)
    assert keys
    assert not [key for key in keys if key.startswith(("host3/", "host4/"))]
    assert not {"host3", "host4"} & set(fault.reads)
    path.write_text(f"{PAIR}\n[probe]\n")
    assert len(run.resolve(experiment_module.load(path), path.read_bytes(), RACK).hosts) == 4
