"""The planned power cycle against real BMC software: OpenIPMI's ipmi_sim, and sushy-tools' Redfish emulator over TLS.

What is a stand-in: the host that they switch, a file with its boot here and a fake system there.

`make rack-rehearsal` installs the BMCs.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from faultbed.testbed import shipped
from faultbed.testbed.backends.rack import power_cycle, power_cycled
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.inventory.schema import BmcVars, SafetyVars

CYCLES = int(os.environ.get("REHEARSAL_CYCLES", "2"))
SUSHY = shutil.which("sushy-emulator", path=f".venv-rehearsal/bin{os.pathsep}{os.environ['PATH']}")
RACK = lab_inventory.load(shipped.inventories() / "rack-h100.example.yml")
LAN = """\
name "rehearsal"
set_working_mc 0x20
  startlan 1
    addr 127.0.0.1 623
    priv_limit admin
    allowed_auths_admin none md2 md5 straight
    guid a123456789abcdefa123456789abcdef
  endlan
  chassis_control "{home}/chassis"
  user 2 true "faultbed" "secret" admin 10 none md2 md5 straight
"""
CHASSIS = """\
#!/bin/sh
# What ipmi_sim calls to read and to switch the host's power (ipmi_lan(5), chassis_control).
echo "$@" >>{home}/log
case $1 in
get) echo "power:$(cat {home}/power)";;
set) if [ "$2" = power ]; then
    # The host: with its power, a boot begins that has an id and a time.
    [ "$3" = 0 ] || {{ cat /proc/sys/kernel/random/uuid; date +%s.%N; }} >{home}/boot
    echo $3 >{home}/power
fi;;
esac
"""
EMULATION = "mc_setbmc 0x20\nmc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr\nmc_enable 0x20\n"


def planned_with(**bmc):
    """Return the power cycle that faultbed plans for host1 with this BMC."""
    safety = SafetyVars(power_cycle="after-heal", may_disrupt=["host?"])
    lab = dataclasses.replace(RACK, safety=safety, bmcs={"host1": BmcVars(**bmc)})
    return power_cycle.plan(lab, "host1", dirty=True)


def commands(**bmc):
    return "\n".join(planned_with(**bmc).commands)


def typed(lines, **environment):
    """Run commands as a person would type them into one shell."""
    return subprocess.run(
        ["bash", "-e"],
        input=lines,
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )


def waits_for(condition, deadline_s=30.0):
    deadline = time.monotonic() + deadline_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


@pytest.fixture
def ipmi(tmp_path):
    """Run ipmi_sim; return the folder with the host's power."""
    (tmp_path / "lan.conf").write_text(LAN.format(home=tmp_path))
    (tmp_path / "sim.emu").write_text(EMULATION)
    (tmp_path / "power").write_text("1")
    (tmp_path / "chassis").write_text(CHASSIS.format(home=tmp_path))
    (tmp_path / "chassis").chmod(0o755)
    argv = ["ipmi_sim", "-c", tmp_path / "lan.conf", "-f", tmp_path / "sim.emu", "-s", tmp_path, "-n"]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, **silent) as process:
        time.sleep(0.5)
        yield tmp_path
        process.terminate()


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ipmi_sim"), reason="needs root and OpenIPMI's ipmi_sim")
def test_ipmi_power_cycles_are_done_and_a_wrong_password_is_one_sentence(ipmi):
    lines = commands(address="127.0.0.1", protocol="ipmi")
    for number in range(CYCLES):
        (ipmi / "log").unlink(missing_ok=True)
        done = typed(lines, IPMI_PASSWORD="secret")
        assert done.returncode == 0, (number, done.stderr)
        assert done.stdout.splitlines()[:2] == ["Chassis Power is on", "Chassis Power Control: Cycle"]
        changes = [line for line in (ipmi / "log").read_text().splitlines() if line.startswith("set")]
        assert waits_for(lambda: (ipmi / "power").read_text().strip() == "1"), changes
        assert changes[0] == "set power 0"
    denied = typed(lines, IPMI_PASSWORD="wrong")
    assert denied.returncode != 0
    assert [line for line in denied.stderr.splitlines() if "Cipher Suites" not in line] == [
        "Error: Unable to establish IPMI v2 / RMCP+ session"
    ]


def stand_in_host(home):
    """Return the boot of the host that ipmi_sim switches: an id and its age."""
    if (home / "power").read_text().strip() != "1":
        return None
    number, began = (home / "boot").read_text().split()
    return power_cycled.Boot(id=number, uptime_s=max(0.0, time.time() - float(began)))


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ipmi_sim"), reason="needs root and OpenIPMI's ipmi_sim")
def test_ipmi_power_cycle_is_over_when_the_host_has_booted(ipmi, monkeypatch):
    monkeypatch.setenv("IPMI_PASSWORD", "secret")
    (ipmi / "boot").write_text(f"first\n{time.time() - 86_400}\n")
    planned = planned_with(address="127.0.0.1", protocol="ipmi")
    took_s = power_cycled.carry_out(planned, lambda: stand_in_host(ipmi), return_s=60)
    assert stand_in_host(ipmi).id != "first"
    assert stand_in_host(ipmi).uptime_s <= took_s


@pytest.fixture
def redfish(tmp_path):
    """Run the Redfish emulator over TLS with a password; return its port, authority and a home with the netrc file."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    hashed = "import bcrypt; print('faultbed:' + bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode())"
    python = Path(SUSHY).parent / "python"
    (tmp_path / "htpasswd").write_text(subprocess.check_output([python, "-c", hashed], text=True))
    (tmp_path / "conf").write_text(f'SUSHY_EMULATOR_AUTH_FILE = "{tmp_path / "htpasswd"}"\n')
    port = str(20000 + os.getpid() % 20000)
    argv = [SUSHY, "--fake", "--config", tmp_path / "conf", "-i", "127.0.0.1", "-p", port]
    argv += ["--ssl-certificate", cert, "--ssl-key", key]
    netrc = tmp_path / ".config/faultbed/bmc.netrc"
    netrc.parent.mkdir(parents=True)
    with (tmp_path / "log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        netrc.write_text("machine 127.0.0.1 login faultbed password secret\n")
        probe = ["curl", "-s", "--cacert", cert, "-o", "/dev/null", f"https://127.0.0.1:{port}/redfish/v1/"]
        assert waits_for(lambda: subprocess.run(probe, check=False).returncode == 0)
        yield port, cert, tmp_path, netrc
        process.terminate()


@pytest.mark.process
@pytest.mark.skipif(SUSHY is None, reason="needs sushy-tools")
def test_redfish_power_cycles_are_done_and_a_wrong_password_is_one_sentence(redfish):
    port, cert, home, netrc = redfish
    lines = commands(address=f"127.0.0.1:{port}", cacert=str(cert))
    for number in range(CYCLES):
        done = typed(lines, HOME=str(home))
        assert done.returncode == 0, (number, done.stderr)
    log = (home / "log").read_text()
    assert log.count("/Actions/ComputerSystem.Reset") == CYCLES, log[-2000:]
    netrc.write_text("machine 127.0.0.1 login faultbed password wrong\n")
    denied = typed(lines, HOME=str(home))
    assert denied.returncode != 0
    assert denied.stderr == "curl: (22) The requested URL returned error: 401\n"
