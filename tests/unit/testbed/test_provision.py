"""Provisioning through ansible-runner: events, failures, Ctrl-C and the environment."""

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import yaml

from faultbed.testbed.errors import HalfProvisioned, LabError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.provision import (
    _KEPT_RUNS,
    Event,
    Site,
    _environment,
    _failure,
    _is_passed_on,
    _Play,
    _Progress,
    _run_folder,
    provision,
)
from faultbed.testbed.shipped import inventories


@pytest.fixture
def closed_site(tmp_path):
    """Return the site of a lab whose machines are closed ports of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        inventory = load(inventories() / "soft-mini.yml")
        options = f"-o StrictHostKeyChecking=yes -o UserKnownHostsFile={tmp_path}/none -F none"
        hosts = {
            name: {"ansible_host": "127.0.0.1", "ansible_port": port, "ansible_ssh_common_args": options}
            for name in inventory.machines
        }
        (tmp_path / "runtime.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
        yield Site(
            inventory=inventory,
            runtime_inventory=tmp_path / "runtime.yml",
            artifacts=tmp_path / "artifacts",
            control=tmp_path / "c",
        )


@pytest.mark.process
def test_machine_that_does_not_answer_is_named_and_no_secret_is_written_down(closed_site, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    events = []
    with pytest.raises(LabError) as error:
        provision(closed_site, events.append)
    assert "host1: Configure interfaces, routes and RDMA devices" in str(error.value)
    assert "Connection refused" in str(error.value)
    assert {event.node for event in events if event.state == "unreachable"} == {"host1", "host2", "fabric"}
    written = [path for path in closed_site.artifacts.rglob("*") if path.is_file()]
    assert any(path.name == "command" for path in written)
    assert not any(b"hunter2" in path.read_bytes() for path in written)
    assert not closed_site.control.exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "usual", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, signal.SIG_DFL, SystemExit),
    ],
)
def test_provision_signal_ends_ansible_and_is_raised(closed_site, number, usual, error):
    """The test sets the usual handler: where it runs in the background of a script, SIGINT is ignored."""

    def send(event):
        if event.state == "started":
            os.kill(os.getpid(), number)

    before = signal.signal(number, usual)
    try:
        with pytest.raises(error):
            provision(closed_site, send)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    assert not closed_site.control.exists()
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(closed_site.artifacts).encode() in argv for argv in running)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_provision_signal_is_handled_as_the_command_line_handles_it(closed_site, number):
    """`faultbed up` that got SIGTERM while Ansible ran ended with 143 and without a sentence."""

    def send(event):
        if event.state == "started":
            os.kill(os.getpid(), number)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            provision(closed_site, send)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert not closed_site.control.exists()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_provision_goes_on_after_a_signal_that_the_process_ignores(closed_site, number):
    """A command in the background of a script ignores Ctrl-C, and one under nohup SIGHUP."""

    def send(event):
        if event.state == "started":
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(LabError, match="Connection refused"):
            provision(closed_site, send)
    finally:
        signal.signal(number, before)


@pytest.mark.process
@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_provision_works_in_a_locale_that_ansible_refuses(closed_site, monkeypatch, locale):
    """`Ansible requires the locale encoding to be UTF-8`: neither `up` nor the end of a host.reboot worked there."""
    monkeypatch.setenv("LC_ALL", locale)
    with pytest.raises(LabError, match="Connection refused"):
        provision(closed_site)


@pytest.mark.process
def test_provision_works_outside_the_main_thread(closed_site):
    errors = []

    def work():
        try:
            provision(closed_site)
        except LabError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert len(errors) == 1


def test_ansible_gets_only_the_environment_it_needs(closed_site, monkeypatch):
    monkeypatch.setenv("ANSIBLE_BECOME_PASSWORD", "x")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/x")
    environment = _environment(closed_site)
    assert _is_passed_on("HOME", environment)
    assert _is_passed_on("ANSIBLE_STDOUT_CALLBACK", environment)  # set by ansible-runner, not by the user
    assert not _is_passed_on("ANSIBLE_BECOME_PASSWORD", environment)
    assert not _is_passed_on("SSH_AUTH_SOCK", environment)
    assert environment["ANSIBLE_HOST_KEY_CHECKING"] == "True"


def raw(kind, **result):
    return {"event": kind, "event_data": {"host": "host1", "task": "T", "duration": 1.5, "res": result}}


def test_provision_events_become_progress_and_results():
    messages = []
    progress = _Progress(on_event=messages.append)
    for event in (
        {"event": "playbook_on_play_start", "event_data": {}},
        {"event": "runner_on_start", "event_data": {"host": "host1", "task": "T"}},
        raw("runner_on_ok", changed=True, changes=["a", "b"]),
        raw("runner_on_ok", changed=False, changes=[], pairs=3, notes=["c"]),
        raw("runner_on_ok", changed=False, notes=["d"]),
        raw("runner_on_failed", msg="no wire"),
    ):
        assert progress.take(event)
    assert [event.state for event in messages] == ["started", "changed", "ok", "ok", "failed"]
    assert messages[1] == Event(node="host1", task="T", state="changed", detail="a; b", seconds=1.5)
    assert progress.changes == {"host1": ["a", "b"]}
    assert progress.notes == {"host1": ["c", "d"]}, "those of all tasks, not of the last"
    assert [problem.detail for problem in progress.problems] == ["no wire"]


@pytest.mark.parametrize(
    ("events", "check", "half"),
    [
        (["runner_on_unreachable"], False, False),
        (["runner_on_ok", "runner_on_unreachable"], False, True),
        (["runner_on_failed"], False, True),
        (["runner_on_ok"], False, True),  # a timeout, in which no task failed
        (["runner_on_ok", "runner_on_failed"], True, False),
    ],
)
def test_provision_failure_after_contact_warns_of_changed_machines(tmp_path, events, check, half):
    progress = _Progress(on_event=lambda _: None)
    for event in events:
        progress.take(raw(event, msg="no wire"))
    error = _failure(_Play(name="rack", timeout_s=1, check=check), "timeout", progress, tmp_path)
    assert isinstance(error, HalfProvisioned) is half


def test_run_folder_of_a_playbook_removes_no_run_of_a_playbook_whose_name_begins_with_its_own(tmp_path):
    teardown = _run_folder(tmp_path, "rack-teardown")
    runs = [_run_folder(tmp_path, "rack") for _ in range(_KEPT_RUNS + 1)]
    assert teardown.exists()
    assert sum(run.exists() for run in runs) == _KEPT_RUNS
