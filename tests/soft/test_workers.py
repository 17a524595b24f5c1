"""A sweep on two labs whose workers are killed: each run is published once, and no VM is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from house import HOUSE
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.soft]
KILLS = int(os.environ.get("FAULTBED_KILLS", "20"))
_POINTS = 8
_EXPERIMENT = """
name = "killed"
seed = 1

[workload]
flow = "write"
src = "host[0]:rnic[0]"
dst = "host[1]:rnic[0]"
size = "4KiB"
duration = "3s"
"""


def processes(word):
    """Return the process ids of this machine whose command line has a word."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.encode() in one for one in words):
            yield int(path.parent.name)


def children(pid, word):
    return [one for one in processes(word) if parent(one) == pid]


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_killed_workers_leave_one_result_for_each_key_and_no_vm(tmp_path):
    experiment, out, home = tmp_path / "killed.toml", tmp_path / "out", tmp_path / "home"
    experiment.write_text(_EXPERIMENT)
    sizes = ",".join(f"{kib}KiB" for kib in range(4, 4 + _POINTS))
    words = ["--lab", "soft-mini", "sweep", str(experiment), "--over", f"workload.size={sizes}", "--out", str(out)]
    command = [sys.executable, "-m", "faultbed.harness.console", *words, "--on", "local:2", "--json"]
    environment = os.environ | {"FAULTBED_HOME": str(home)}
    moment = random.Random(1)
    killed, seen = 0, set()
    with subprocess.Popen(command, cwd=HOUSE, env=environment, stdout=subprocess.PIPE, text=True) as sweep:
        while sweep.poll() is None and killed < KILLS:
            time.sleep(moment.uniform(1.0, 25.0))  # before, in and after a run
            seen.update(processes(str(home)))
            workers = children(sweep.pid, "worker_process")
            if workers:
                os.kill(moment.choice(workers), signal.SIGKILL)
                killed += 1
        output = json.loads(sweep.stdout.read())
    assert killed > 0
    assert seen, "QEMU's processes name their folder; without any, the last check would hold for nothing"
    assert Counter(len(point["runs"]) for point in output["points"]) == {1: _POINTS}, output
    published = [path for path in (out / "runs").iterdir() if path.name.startswith("killed-1-")]
    assert len(published) == _POINTS
    until(lambda: not list(processes(str(home))), within_s=60)
    print(f"{killed} workers killed, {len(published)} results, verdict {output['verdict']}")
