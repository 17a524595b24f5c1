"""A confirmed power cycle: over when the host has booted, an error if the BMC or the host does not do it."""

from __future__ import annotations

import contextlib
import subprocess
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.lab import audits
from faultbed.harness.cli.main import cli
from faultbed.testbed.backends.rack import power_cycled
from faultbed.testbed.backends.rack.power_cycle import PowerCycle
from faultbed.testbed.backends.rack.power_cycled import Boot, boot_of, carry_out
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import CommandFailed, LabError, Unreachable, UsageError
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import audit_log

PLANNED = PowerCycle(host="host1", bmc="198.51.100.11", commands=("true",))


@pytest.fixture
def cycle(monkeypatch):
    """Return a function that carries out a power cycle, with the host's boot at each look; the clock is the looks'."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(power_cycled.time, "monotonic", lambda: clock.now)

    def carry(*boots, planned=PLANNED, return_s=60.0):
        left = list(boots)

        def look():
            return left.pop(0) if len(left) > 1 else left[0]

        def pause(seconds):
            clock.now += seconds

        return carry_out(planned, look, return_s=return_s, pause=pause)

    return carry


def boot(name, uptime_s):
    return Boot(id=name, uptime_s=uptime_s)


def test_power_cycle_is_over_when_the_host_has_booted(cycle):
    assert cycle(boot("a", 86_400), boot("a", 86_401), None, None, boot("b", 4.0)) == 15.0


def test_power_cycle_of_a_host_that_did_not_answer_before_needs_a_young_boot(cycle):
    assert cycle(None, None, boot("b", 6.0), boot("b", 9.0), boot("b", 9.5)) == 10.0
    with pytest.raises(LabError, match="answers and is up for 86400 s: it has not booted"):
        cycle(None, boot("a", 86_400))


def test_power_cycle_whose_host_keeps_its_boot_id_is_not_over(cycle):
    with pytest.raises(LabError, match="has not booted, 60 s after its power cycle"):
        cycle(boot("a", 1.0), boot("a", 2.0))


def test_power_cycle_whose_host_does_not_return_is_an_error(cycle):
    with pytest.raises(LabError, match=r"host1: does not answer, 60 s after its power cycle by 198\.51\.100\.11"):
        cycle(boot("a", 86_400), None)


def test_power_cycle_that_the_bmc_refuses_is_one_sentence_and_waits_for_nothing(cycle):
    refused = PowerCycle(
        host="host1", bmc="b", commands=("echo noise >&2", "echo 'curl: (22) 401' >&2; exit 22", "true")
    )
    with pytest.raises(LabError, match=r"the power cycle by b failed: curl: \(22\) 401; check the credentials"):
        cycle(boot("a", 86_400), boot("b", 0.0), planned=refused)


@pytest.mark.parametrize("answer", [Unreachable("x"), CommandFailed("x"), "", "id\n", "id\nsoon\n"])
def test_boot_of_a_machine_that_does_not_answer_is_none(answer):
    def run(argv, *, timeout_s):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    assert boot_of(SimpleNamespace(run=run)) is None


def test_boot_of_this_machine_is_read():
    def run(argv, *, timeout_s):
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=timeout_s)

    found = boot_of(SimpleNamespace(run=run))
    assert len(found.id) == 36
    assert found.uptime_s > 0


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a caller of `faultbed power-cycle host1` on a DIRTY rack that allows it, and the cycles that it made."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(audits.powercycle, "plan", lambda inventory, host, *, dirty: PLANNED)
    monkeypatch.setattr(audits, "hold", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(audits, "open_machine", lambda *_: None)

    def carry_out(planned, look, *, progress):
        made.append(planned.host)
        if planned.bmc == "broken":
            raise LabError("host1: the power cycle by broken failed")
        return 42.0

    monkeypatch.setattr(audits.power_cycled, "carry_out", carry_out)

    def call(*words):
        return CliRunner().invoke(cli, ["--lab", str(inventories() / "rack-h100.example.yml"), "power-cycle", *words])

    return call, made


def events():
    return [entry["event"] for entry in audit_log.entries(lab_dir("rack-h100"))]


def test_power_cycle_command_runs_nothing_without_the_hosts_name(command):
    call, made = command
    assert call("host1").exit_code == 0
    done = call("host1", "--confirm", "host2")
    assert isinstance(done.exception, UsageError)
    assert "repeat the name of the host" in str(done.exception)
    assert made == []
    assert events() == ["power-cycle planned", "power-cycle refused"]


def test_power_cycle_command_with_the_hosts_name_waits_for_it_and_is_audited(command):
    call, made = command
    done = call("host1", "--confirm", "host1")
    assert done.exit_code == 0, done.output
    assert "42 s after the cycle began" in done.output
    assert made == ["host1"]
    assert events() == ["power-cycling", "power-cycled"]


def test_power_cycle_command_that_fails_is_audited(command, monkeypatch):
    call, _ = command
    broken = PowerCycle(host="host1", bmc="broken", commands=("false",))
    monkeypatch.setattr(audits.powercycle, "plan", lambda inventory, host, *, dirty: broken)
    assert isinstance(call("host1", "--confirm", "host1").exception, LabError)
    assert events() == ["power-cycling", "power cycle failed"]
