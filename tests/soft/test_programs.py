"""Programs of other authors on VMs: odd ones leave nothing behind, and a fault that does nothing proves nothing."""

import pytest

from faultbed.harness.experiment import experiment_file
from faultbed.harness.run import loop
from faultbed.harness.verdict import Verdict
from faultbed.testbed.observe import fingerprint

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 2")]

PERFTEST = """
name = "foreign"
seed = 1
[workload]
command = "ib_write_bw -d {rnic} -x {gid} --bind_source_ip {addr} -F -s 16384 -t 8 -D 1 --run_infinitely {server}"
roles = { server = "host[-1]:rnic[0]", client = "host[0]:rnic[0]" }
progress = "counters"
serves = ["server"]
duration = "16s"
timeout = "3m"
[[faults]]
id = "flap"
kind = "link.flap"
target = "path[client>server]"
at = "4s"
for = "1s"
[[faults]]
id = "share"
kind = "packet.drop"
target = "path[client>server]"
at = "7s"
for = "1s"
set = { share = 0.05 }
[[faults]]
id = "order"
kind = "packet.reorder"
target = "host[-1]:rnic[0]"
at = "10s"
for = "1s"
set = { share = 0.05 }
[[faults]]
id = "psn"
kind = "packet.drop"
target = "host[-1]:rnic[0]"
at = "13s"
for = "2s"
set = { qp = "any", psn = "+50" }
"""

STEPS = "import os, signal, sys, time\nprint('step 1 5', flush=True)\nprint('step 2 5', flush=True)\n"
ODD_PROGRAMS = {
    "hangs": (STEPS + "time.sleep(600)", "FAIL"),
    "ignores SIGTERM": (STEPS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", "FAIL"),
    "forks": (STEPS + "if os.fork() == 0:\n os.setsid()\n os.fork()\n time.sleep(600)\n", "INCONCLUSIVE"),
    "exits early": ("import sys\nprint('step 1 5', flush=True)\nsys.exit(7)", "FAIL"),
    "prints nothing": ("import time\ntime.sleep(1)", "INCONCLUSIVE"),
    "prints 100 MB": (STEPS + "line = 'x' * 999\nfor _ in range(100_000): print(line)", "PASS"),
    "fills its output without lines": (STEPS + "sys.stdout.write('y' * 20_000_000)", "PASS"),
}
ODD = """
name = "odd"
seed = 1
[workload]
command = "python3 odd.py"
files = ["odd.py"]
roles = { client = "host[0]:rnic[0]" }
progress = "lines:step [0-9]+ (?P<bytes>[0-9]+)"
timeout = "40s"
"""


def executed(lab, text, folder, **options):
    path = folder / "experiment.toml"
    path.write_text(text)
    resolved = loop.resolve(experiment_file.load(path), text.encode(), lab.inventory_model)
    return loop.execute(resolved, lab.inventory_model, out=folder, progress=lambda _: None, **options).verdict


def test_faults_that_do_nothing_to_foreign_queue_pairs_are_not_believed(lab, tmp_path):
    verdict = executed(lab, PERFTEST, tmp_path, control=True)
    checks = {check.name: check.verdict for check in verdict.checks}
    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert [fault.fired.count for fault in verdict.faults] == [0, 0, 0, 0]
    assert {name: checks[f"fired.{name}"] for name in ("flap", "share", "order", "psn")} == dict.fromkeys(
        ("flap", "share", "order", "psn"), Verdict.INCONCLUSIVE
    )
    assert verdict.lab_state == "CLEAN"


def test_faults_on_foreign_queue_pairs_are_proven(lab, tmp_path):
    verdict = executed(lab, PERFTEST, tmp_path)
    checks = {check.name: (check.verdict, check.detail) for check in verdict.checks}
    assert {name: checks[f"fired.{name}"][0] for name in ("flap", "share", "order", "psn")} == dict.fromkeys(
        ("flap", "share", "order", "psn"), Verdict.PASS
    ), checks
    assert verdict.lab_state == "CLEAN"


def test_programs_that_misbehave_leave_nothing_and_get_an_honest_verdict(lab, tmp_path, subtests):
    host = lab.topology.hosts[0].name
    before = fingerprint.capture(lab)
    for number, (name, (code, expected)) in enumerate(ODD_PROGRAMS.items()):
        with subtests.test(program=name):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "odd.py").write_text(code)
            verdict = executed(lab, ODD, folder)
            assert (verdict.verdict.name, verdict.lab_state) == (expected, "CLEAN"), verdict.checks
            left = lab.node(host).run(
                ["sh", "-c", "pgrep -f '[o]dd.py'; ls -d /sys/fs/cgroup/faultbed-*-*"], check=False
            )
            assert left.stdout == ""
    assert fingerprint.settle(lab, before) == []


def test_program_that_is_not_installed_is_an_error_that_names_the_host(lab, tmp_path):
    text = ODD.replace("python3 odd.py", "nvmeperf --all").replace('files = ["odd.py"]\n', "")
    with pytest.raises(Exception, match=r"host1.*nvmeperf is not installed on this host"):
        executed(lab, text, tmp_path)
