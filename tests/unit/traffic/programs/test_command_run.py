"""Programs run as a workload: real engines and real processes of this machine, without RDMA."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from local_traffic import LocalLab
from waiting import until

from faultbed.testbed.errors import LabError
from faultbed.traffic.node.programs.program_cgroup import cgroup_mount
from faultbed.traffic.programs import command_run
from faultbed.traffic.programs.command_spec import CommandSpec, Role, words_of

pytestmark = pytest.mark.skipif(not os.access(cgroup_mount(), os.W_OK), reason="cgroups cannot be made here")

HANG = "import time\nprint('step 1 5', flush=True)\ntime.sleep(600)"
WRITE_PID = "open(os.environ['PID_FILE'], 'w').write(str(os.getpid()))"
PROGRESS = "lines:step [0-9]+ (?P<bytes>[0-9]+)"
STEPS = "import time\nfor step in range({count}):\n print('step', step, 1000, flush=True)\n time.sleep(0.05)\n"


@pytest.fixture
def lab(tmp_path):
    made = LocalLab(tmp_path)
    yield made
    for host in ("host1", "host3"):
        made.kill(host)


def python(code):
    return (sys.executable, "-c", code)


def spec_of(*words, **options):
    return CommandSpec(
        roles=(Role(name="client", words=words, rnics=("host1:rxe0",)),), **{"progress": PROGRESS, **options}
    )


def cgroups_of(lab):
    pids = [process.pid for processes in lab.processes.values() for process in processes]
    return [path for pid in pids for path in Path(cgroup_mount()).glob(f"faultbed-{pid}-*")]


def run(lab, spec, timeout_s=30):
    with command_run.start(lab, spec) as running:
        return running, running.wait(timeout_s)


def test_program_ends_by_itself_with_samples_iterations_and_output(lab):
    running, result = run(lab, spec_of(*python(STEPS.format(count=10))))
    (end,) = result.ends
    assert (result.outcome, end.code, end.stopped, end.left, end.removed) == ("completed", 0, False, 0, True)
    assert end.describe() == "client on host1:rxe0 ended by itself with 0"
    assert [step.index for step in result.iterations[0]] == list(range(9))
    assert sum(sample.size_bytes for sample in result.samples_of(0)) == 9000
    assert [line.text for line in result.output["client0"]] == [f"step {step} 1000" for step in range(10)]
    assert end.start_ns < running.started_ns < end.end_ns
    assert cgroups_of(lab) == []


def test_program_that_exits_early_with_an_error_is_reported_with_its_code_and_stderr(lab):
    code = "import sys\nprint('step 1 5', flush=True)\nprint('no route', file=sys.stderr)\nsys.exit(3)"
    _, result = run(lab, spec_of(*python(code)))
    assert result.ends[0].describe() == "client on host1:rxe0 ended by itself with 3"
    assert ("err", "no route") in [(line.stream, line.text) for line in result.output["client0"]]


def test_program_that_prints_nothing_has_no_samples_and_its_start_is_the_start_of_the_process(lab):
    running, result = run(lab, spec_of(*python("import time; time.sleep(0.3)")))
    assert (result.samples, result.iterations) == (((),), ((),))
    assert running.started_ns == running.began_ns
    assert result.ends[0].code == 0


def test_program_that_hangs_and_ignores_sigterm_is_killed_after_its_timeout(lab):
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANG}"
    _, result = run(lab, spec_of(*python(code), timeout_s=5))
    (end,) = result.ends
    assert (end.code, end.timed_out) == (-signal.SIGKILL, True)
    assert end.describe() == "client on host1:rxe0 did not end in time and was ended (by SIGKILL)"
    assert cgroups_of(lab) == []


DAEMON = (
    "import os, time\nprint('step 1 5', flush=True)\n"
    "if os.fork() == 0:\n os.setsid()\n"
    f" if os.fork() == 0:\n  {WRITE_PID}\n  time.sleep(600)\n os._exit(0)\n"
    "while not os.path.exists(os.environ['PID_FILE']): time.sleep(0.01)\n"
)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_program_that_forks_into_the_background_leaves_nothing_and_is_reported(lab, tmp_path):
    pid_file = tmp_path / "pid"
    _, result = run(lab, spec_of(*python(DAEMON), environment={"PID_FILE": str(pid_file)}))
    assert result.ends[0].left == 1
    assert result.ends[0].removed
    assert not is_alive(int(pid_file.read_text()))
    assert cgroups_of(lab) == []


def test_program_ends_when_its_engine_is_killed(lab, tmp_path):
    """The watchdog ends the cgroup: nothing on the host depends on the engine or the controller."""
    pid_file = tmp_path / "pid"
    code = f"import os\n{WRITE_PID}\n{HANG}"
    running = command_run.start(lab, spec_of(*python(code), environment={"PID_FILE": str(pid_file)}))
    pid = int(pid_file.read_text())
    assert is_alive(pid)
    lab.kill("host1")
    assert until(lambda: not is_alive(pid))
    assert until(lambda: cgroups_of(lab) == [])
    assert running.wait(20).where == "host1: the traffic engine is gone"


def test_output_of_100_mb_is_cut_with_a_note_and_read_to_its_end(lab):
    code = (
        "import sys\nprint('step 1 5', flush=True)\nline = 'x' * 999\n"
        "for _ in range(100_000): print(line)\nprint('step 2 77', flush=True)"
    )
    _, result = run(lab, spec_of(*python(code)), timeout_s=120)
    kept = sum(len(line.text) + 1 for line in result.output["client0"])
    assert 900_000 < kept <= 1 << 20
    assert result.ends[0].cut_bytes > 98_000_000
    assert sum(sample.size_bytes for sample in result.samples_of(0)) == 77


def test_program_that_fails_is_started_again_with_its_attempt(lab):
    code = "import sys\nprint('step', sys.argv[1], 5, flush=True)\nsys.exit(int(sys.argv[1]) < 3)"
    _, result = run(lab, spec_of(*python(code), "{attempt}", restart="on-failure"))
    assert [(end.attempt, end.code) for end in result.ends] == [(1, 1), (2, 1), (3, 0)]
    assert [line.text for line in result.output["client0"]] == ["step 1 5", "step 2 5", "step 3 5"]


def test_restarts_end_after_the_planned_number(lab):
    _, result = run(lab, spec_of(*python("raise SystemExit(9)"), restart="on-failure", attempts=2))
    assert [end.code for end in result.ends] == [9, 9]


def test_server_is_started_first_and_ended_after_its_client(lab, tmp_path):
    server = (
        "import os, socket, time\nlistener = socket.create_server(('127.0.0.1', 0))\n"
        "open(os.environ['PORT'], 'w').write(str(listener.getsockname()[1]))\nlistener.accept()\ntime.sleep(600)"
    )
    client = (
        "import os, socket\nsocket.create_connection(('127.0.0.1', int(open(os.environ['PORT']).read())))\n"
        "print('step 1 5')"
    )
    roles = (
        Role(name="server", words=python(server), rnics=("host3:rxe0",), serves=True),
        Role(name="client", words=python(client), rnics=("host1:rxe0",)),
    )
    _, result = run(lab, CommandSpec(roles=roles, progress=PROGRESS, environment={"PORT": str(tmp_path / "port")}))
    assert [(end.role, end.code, end.stopped) for end in result.ends] == [
        ("client", 0, False),
        ("server", -signal.SIGTERM, True),
    ]


def test_program_is_ended_when_its_duration_after_the_first_progress_is_over(lab):
    running, result = run(lab, spec_of(*python(STEPS.format(count=1000)), duration_s=0.5))
    (end,) = result.ends
    assert (end.stopped, end.timed_out, end.code) == (True, False, -signal.SIGTERM)
    assert 0.5e9 <= end.end_ns - running.started_ns < 5e9


def test_placeholders_become_data_in_one_word(lab):
    words = words_of(
        "printf '%s\\n' {rnic} {addr} {gid} {rank}/{world} {hosts} 'a b;{client}'", ("client",), shell=False
    )
    _, result = run(lab, spec_of(*words))
    address = lab.topology.host_by_name["host1"].rnics[0].ip
    assert [line.text for line in result.output["client0"]] == ["rxe0", address, "0", "0/1", address, f"a b;{address}"]


def test_program_that_is_not_installed_is_an_error_that_names_host_and_program(lab):
    with pytest.raises(
        LabError, match=r"host1, client0: FileNotFoundError: ib_write_bwx is not installed on this host"
    ):
        command_run.start(lab, spec_of("ib_write_bwx"))
    assert cgroups_of(lab) == []


def test_files_are_in_the_working_directory_of_the_process(lab):
    _, result = run(lab, spec_of("./say.sh", files={"say.sh": b"#!/bin/sh\necho step 1 5\n"}))
    assert [line.text for line in result.output["client0"]] == ["step 1 5"]


def test_file_that_does_not_exist_is_an_error_of_the_start(lab):
    with pytest.raises(LabError, match=r"host1: client could not be started: .*\./gone: not found"):
        command_run.start(lab, spec_of("./gone"))


def test_run_that_is_abandoned_leaves_nothing(lab):
    with command_run.start(lab, spec_of(*python(STEPS.format(count=1000)))):
        assert len(cgroups_of(lab)) == 1
        time.sleep(0.1)
    assert until(lambda: cgroups_of(lab) == [])
