"""`faultbed provision`: requests that it rejects, its arguments to Ansible, and its audit records."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.lab.provisioning import allow, machines_of, playbook_of
from faultbed.harness.cli.main import cli
from faultbed.inject.policy.safety import Forbidden
from faultbed.testbed import provision
from faultbed.testbed.backends import rack_backend
from faultbed.testbed.backends.lab_backend import Access
from faultbed.testbed.directories import cache_dir, lab_dir
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import audit_log, lab_lease
from faultbed.testbed.tenancy.reservation_store import local_store

RACK = load(inventories() / "rack-h100.example.yml")
SOFT = load(inventories() / "soft-mini.yml")
CACHE = str(cache_dir())
"""The cache that all tests share. Without it, each test would list the inventory with Ansible, which takes 0.5 s."""


def playbook(inventory, *, check=False, roles=(), teardown=False):
    return playbook_of(inventory, check=check, roles=roles, teardown=teardown)


def test_provision_playbook_and_limits_of_each_kind_of_lab():
    assert playbook(RACK) == playbook(RACK, check=True, roles=("rnic_host", "gpu_host")) == "rack"
    assert playbook(RACK, teardown=True) == "rack-teardown"
    assert playbook(SOFT, check=True) == "provision"
    for options in ({}, {"teardown": True}, {"check": True, "roles": ("base_host",)}):
        with pytest.raises(UsageError, match="`faultbed up` provisions it"):
            playbook(SOFT, **options)
    with pytest.raises(UsageError, match="did you mean rnic_host"):
        playbook(RACK, roles=("rnic_hots",))
    with pytest.raises(UsageError, match="leave out --tags"):
        playbook(RACK, roles=("rnic_host",), teardown=True)


def test_provision_rejects_machines_that_the_owner_does_not_allow_to_disrupt():
    assert len(machines_of(RACK, ())) == 10
    with pytest.raises(UsageError, match="did you mean host1"):
        machines_of(RACK, ["hots1"])
    allow(RACK, ["host1", "host2"])
    with pytest.raises(Forbidden, match="does not allow host3, rtsw1 to be disrupted"):
        allow(RACK, ["host1", "host3", "rtsw1"])
    allow(SOFT, machines_of(SOFT, ()))


@pytest.fixture
def rack(tmp_path, monkeypatch):
    """Return the inventory of a rack whose machines are all a closed port of this machine.

    Its reservation store is local, and its host keys need no pinning.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)
    monkeypatch.setattr(rack_backend.BACKEND, "access", lambda _: Access(addresses={}, accelerator=None))
    monkeypatch.setattr(lab_lease, "store_of", lambda inventory: local_store(tmp_path / "book", lab=inventory.name))
    shutil.copytree(inventories() / "group_vars", tmp_path / "group_vars")
    path = tmp_path / "rack.yml"
    path.write_text(re.sub(r"ansible_host: 192\.0\.2\.[0-9]+", "ansible_host: 127.0.0.1", RACK.path.read_text()))
    variables = tmp_path / "group_vars/rack_h100.yml"
    variables.write_text(variables.read_text() + "ansible_port: 1\nansible_ssh_common_args: -F none\n")
    return path


def provision_command(path, *argv):
    return CliRunner().invoke(cli, ["--lab", str(path), "provision", *argv], standalone_mode=False)


@pytest.mark.process
def test_provision_of_a_rack_audits_its_failure_and_releases_the_reservation(rack, tmp_path):
    done = provision_command(rack, "host1", "host2", "--tags", "base_host, split_host")
    assert "host1: " in str(done.exception)
    assert "refused" in str(done.exception)
    assert "rtsw1" not in str(done.exception)
    audit = list(audit_log.entries(lab_dir("rack-h100")))
    assert [entry["event"] for entry in audit] == ["provisioning", "provisioning failed"]
    assert audit[0]["kind"] == "rack base_host split_host"
    assert audit[0]["target"] == "host1 host2"
    assert audit[0]["revert"] == ["faultbed provision --teardown host1 host2"]
    (command,) = (lab_dir("rack-h100") / "artifacts").rglob("command")
    assert {"--tags", "base_host,split_host", "--limit", "host1,host2"} <= set(
        json.loads(command.read_text())["command"]
    )
    assert local_store(tmp_path / "book", lab="rack-h100").read().book == ()


@pytest.mark.process
def test_provision_check_is_not_audited(rack):
    done = provision_command(rack, "--check")
    assert "rack: host1: " in str(done.exception)  # the first batch; a failure there stops the others
    assert "--check" in json.loads(next(lab_dir("rack-h100").rglob("command")).read_text())["command"]
    assert list(audit_log.entries(lab_dir("rack-h100"))) == []


def test_provision_that_is_forbidden_touches_no_file_of_the_lab(rack):
    assert isinstance(provision_command(rack).exception, Forbidden)
    assert not lab_dir("rack-h100").exists()


def test_provision_shows_changed_tasks_and_notes(rack, monkeypatch):
    done = provision.ProvisionResult(
        changed={"host1": 2, "host2": 0, "rtsw1": 1}, ok=(), failed=(), unreachable=(),
        changes={"host1": ("sysctl a=1", "file [b]")}, notes={"rtsw1": ("only written",)}, results={}, seconds=1.0,
    )  # fmt: skip
    monkeypatch.setattr(provision, "play", lambda *_args, **_options: done)
    text = provision_command(rack, "--check").stdout
    assert "would be changed" in text
    assert "file [b]" in text
    assert re.search(r"rtsw1 +1 tasks", text)
    assert "2 machines would change" in text
    assert re.search(r"rtsw1 +only written", text)
    output = json.loads(provision_command(rack, "--check", "--json").stdout)
    assert output["changes"] == {"host1": ["sysctl a=1", "file [b]"]}
    assert output["notes"] == {"rtsw1": ["only written"]}
    assert (output["changed_tasks"], output["check"]) == ({"host1": 2, "rtsw1": 1}, True)
