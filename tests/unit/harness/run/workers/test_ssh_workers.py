"""Workers over SSH, by a real server on 127.0.0.1 with its own keys."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from ssh_server import SSHD, ssh_server

from faultbed.harness.run.workers import open_pool as opening
from faultbed.harness.run.workers import ssh_workers
from faultbed.harness.run.workers.open_pool import open_pool
from faultbed.harness.run.workers.worker_places import parse_place
from faultbed.testbed.errors import Unreachable, UsageError

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs root and sshd; `make nightly` installs it"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("ssh")
    with ssh_server(home) as address:
        yield home, address


@pytest.fixture
def host(server, monkeypatch, tmp_path):
    home, address = server
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "state"))
    return SimpleNamespace(address=address, lines=[], runs=tmp_path / "runs")


def opened(host, hosts=None):
    return open_pool(
        parse_place(f"ssh:{hosts or host.address}"), inventory=None, runs=host.runs,
        progress=host.lines.append,
    )  # fmt: skip


def test_runs_are_made_over_ssh_and_a_killed_worker_is_replaced(host, tmp_path):
    began = tmp_path / "began"

    def once_killed(number):
        if not began.exists():
            began.touch()
            os.kill(os.getpid(), 9)
        return number, os.getpid(), os.environ["FAULTBED_HOME"]

    with opened(host) as pool:
        results = dict(pool.map(once_killed, [1, 2]))
    assert [results[number][0] for number in (1, 2)] == [1, 2]
    assert results[1][2] == str(tmp_path / "state" / "workers" / "127.0.0.1-0")
    assert any("its run is repeated" in line for line in host.lines)
    for _, pid, _ in results.values():
        assert not Path(f"/proc/{pid}").exists()


def test_host_with_other_sources_refuses_before_it_starts_a_lab(host, monkeypatch):
    monkeypatch.setattr(opening.code, "digest", lambda: "0" * 16)
    with pytest.raises(UsageError, match="has other sources than the command"), opened(host) as pool:
        list(pool.map(abs, [1]))


def test_host_without_faultbed_is_refused(host, monkeypatch):
    monkeypatch.setattr(ssh_workers, "PROCESS", ("/nonexistent/python", "-m", "x"))
    with pytest.raises(UsageError, match="faultbed does not run there as /nonexistent/python"), opened(host):
        pass


def test_host_that_cannot_reach_a_scheduler_on_loopback_is_refused(host, monkeypatch):
    monkeypatch.setattr(ssh_workers.SshConnection, "is_loopback", lambda _: False)
    with pytest.raises(UsageError, match="add --interface NAME"), opened(host):
        pass


def test_host_whose_key_is_not_pinned_is_refused(host):
    with pytest.raises(Unreachable, match=r"has no ssh-ed25519 host key of 127\.0\.0\.2"), opened(host, "127.0.0.2:1"):
        pass


@pytest.mark.parametrize("text", ["a b", "root@", "host:99999", "host,,other", "host:0", "-"])
def test_text_that_is_no_list_of_hosts_is_refused(text):
    if text == "-":
        assert ssh_workers.hosts_of("root@n1:2222,n2") == (
            ssh_workers.hosts_of("root@n1:2222")[0], ssh_workers.hosts_of("n2")[0],
        )  # fmt: skip
        return
    with pytest.raises(UsageError, match="no list of hosts"):
        ssh_workers.hosts_of(text)
