"""`faultbed status` of a rack lab: answers, host keys, the DIRTY state and an unreachable reservation store."""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import threading
from dataclasses import replace

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.testbed.backends.rack import rack_status
from faultbed.testbed.directories import cache_dir, lab_dir
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.lab import open_lab
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import dirty, in_progress

RACK = inventories() / "rack-h100.example.yml"
CACHE = str(cache_dir())
"""That of all tests: Ansible takes half a second to list an inventory."""


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)


@contextlib.contextmanager
def greeting(words):
    """A server on a port of this machine that sends `words` to every client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    with caller:
                        caller.sendall(words)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def pin(home, port):
    """A key in known_hosts, as ssh-keygen would write it."""
    kind = b"ssh-ed25519"
    blob = len(kind).to_bytes(4, "big") + kind + (32).to_bytes(4, "big") + bytes(32)
    (home / ".ssh").mkdir(exist_ok=True)
    with (home / ".ssh/known_hosts").open("a") as file:
        file.write(f"[127.0.0.1]:{port} ssh-ed25519 {base64.b64encode(blob).decode()}\n")


def test_status_separates_reachable_and_unreachable_machines(tmp_path):
    inventory = load(RACK)
    with greeting(b"SSH-2.0-x\r\n") as good, greeting(b"HTTP/1.1 400") as web:
        ports = {"host1": good, "host2": web, "rtsw1": closed_port(), "jump1": good}
        pin(tmp_path, web)
        ways = {name: replace(way, address="127.0.0.1", port=ports.get(name, good))
                for name, way in [*inventory.management.items(), inventory.jump]}  # fmt: skip
        jump = ("jump1", ways.pop("jump1"))
        result = rack_status.status(replace(inventory, management=ways, jump=jump))
        by_name = {machine.name: machine for machine in result.machines}
        assert (result.state, len(result.machines)) == ("broken", 11)
        assert [by_name[x].role for x in ("host1", "rtsw1", "ctsw1", "jump1")] == ["host", "rtsw", "ctsw", "jump"]
        assert (by_name["host1"].ssh, by_name["host1"].pinned) == (True, False)
        assert "host key" in by_name["host1"].why
        assert (by_name["host2"].ssh, by_name["host2"].pinned) == (False, True)
        assert "not an SSH server" in by_name["host2"].why
        assert not by_name["rtsw1"].ssh
        assert "refused" in by_name["rtsw1"].why
        pin(tmp_path, good)
        all_well = {name: replace(way, port=good) for name, way in ways.items()}
        assert rack_status.status(replace(inventory, management=all_well, jump=jump)).state == "up"


def test_missing_host_keys_of_a_rack_are_named_at_once():
    inventory = load(RACK)
    with pytest.raises(Unreachable) as caught:
        open_lab(inventory)
    text = str(caught.value)
    assert all(f"{name} ({machine.address})" in text for name, machine in inventory.management.items()), text
    assert text.count("ssh-ed25519") == 1


@pytest.fixture
def rack(tmp_path):
    """The example rack with every machine at port 1 of this machine, which is closed."""
    shutil.copytree(inventories() / "group_vars", tmp_path / "group_vars")
    path = tmp_path / "rack.yml"
    path.write_text(re.sub(r"ansible_host: 192\.0\.2\.[0-9]+", "ansible_host: 127.0.0.1", RACK.read_text()))
    variables = tmp_path / "group_vars/rack_h100.yml"
    variables.write_text(variables.read_text() + "ansible_port: 1\n")
    return path


def test_status_of_an_unreachable_rack_reports_what_is_known(rack):
    folder = lab_dir("rack-h100")
    folder.mkdir(parents=True)
    dirty.mark(folder, ["rtsw1: [x] differs"], None)
    done = CliRunner().invoke(cli, ["--lab", str(rack), "status", "--json"], standalone_mode=False)
    assert done.return_value == 3
    output = json.loads(done.stdout)
    assert (output["name"], output["state"], output["dirty"]) == ("rack-h100", "broken", ["rtsw1: [x] differs"])
    assert {(machine["ssh"], machine["pinned"]) for machine in output["machines"]} == {(False, False)}
    assert output["reservations"] is None
    assert "jump1" in output["reservations_unread"]
    text = CliRunner().invoke(cli, ["--lab", str(rack), "status"]).stdout
    assert "2 racks, 4 hosts, 32 RNICs, 6 switches, 8 uplinks" in text
    assert "rtsw1: [x] differs" in text
    assert "reservations are not known" in text


def test_status_of_a_soft_lab_reports_dirty():
    folder = lab_dir("soft-mini")
    folder.mkdir(parents=True)
    dirty.mark(folder, [], None)
    done = CliRunner().invoke(cli, ["--lab", "soft-mini", "status", "--json"])
    assert json.loads(done.stdout)["dirty"] == ["its state is unknown"]


def test_status_and_doctor_name_a_command_that_was_killed():
    folder = lab_dir("soft-mini")
    before = Fingerprint(nodes={"host1": {"link be0": "UP"}})
    in_progress.write(folder, why="run demo", before=before, lease_s=10.0).abandon()
    output = f"`run demo` (process {os.getpid()}) was killed: the next command compares the lab first"
    shown = CliRunner().invoke(cli, ["--lab", "soft-mini", "status", "--json"])
    assert json.loads(shown.stdout)["unfinished"] == [output]
    assert output in CliRunner().invoke(cli, ["--lab", "soft-mini", "status"]).stdout
    findings = json.loads(CliRunner().invoke(cli, ["--lab", "soft-mini", "doctor", "--json"]).stdout)
    assert output in [each["found"] for each in findings if each["what"] == "unfinished"]
