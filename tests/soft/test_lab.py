"""Lifecycle of the soft lab: host keys, reset, listeners, a second lab and teardown."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from faultbed.testbed import lab as lab_module
from faultbed.testbed import provision, shipped
from faultbed.testbed.backends.soft import lifecycle, vm
from faultbed.testbed.backends.soft.lab_state import read_snapshot, read_state, write
from faultbed.testbed.directories import lab_dir, socket_dir
from faultbed.testbed.errors import FaultbedError, Unreachable
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.tenancy import dirty

pytestmark = pytest.mark.soft


def sockets_listening(pid):
    """Return (address, port) of every TCP socket on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    collected = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                collected.append(fields[1])
    return collected


def test_vms_listen_on_loopback_only(lab):
    """Each VM has one listener, its SSH port on 127.0.0.1."""
    for machine in lifecycle.status(lab.inventory_model).vms:
        listening = sockets_listening(machine.pid)
        assert [address.partition(":")[0] for address in listening] == ["0100007F"], machine


def test_guest_cpus_have_no_instruction_that_tcg_emulates_badly(lab):
    """CMPXCHG16B sooner or later panics a guest under TCG, and PCLMULQDQ makes every ICRC slow."""
    if lab.accelerator != "tcg":
        pytest.skip("the processor is a real one")
    for host in lab.topology.hosts:
        assert not {"cx16", "pclmulqdq"} & set(lab.node(host.name).run(["cat", "/proc/cpuinfo"]).stdout.split())


def test_changed_host_key_is_rejected(lab):
    """A machine that presents another key than the pinned one is treated as unreachable."""
    folder = lab_dir(lab.name)
    snapshot = read_snapshot(folder)
    names = list(snapshot.host_keys)
    swapped = {**snapshot.host_keys, names[0]: snapshot.host_keys[names[1]]}
    write(folder / "snapshot.json", msgspec.structs.replace(snapshot, host_keys=swapped))
    try:
        with lab_module.open_lab(lab.inventory_model) as imposter, pytest.raises(Unreachable, match="another host key"):
            imposter.node(names[0]).run(["true"])
    finally:
        write(folder / "snapshot.json", snapshot)


# (node, change, its reversal, subject of the fingerprint that must differ in between)
TOUCHED = [
    ("host1", "ip link set dev be0 mtu 3000", "ip link set dev be0 mtu 4200", "link be0"),
    ("host1", "ip address add 10.99.0.1/32 dev lo", "ip address del 10.99.0.1/32 dev lo", "address lo 10.99.0.1/32"),
    ("host1", "ip route add blackhole 10.98.0.0/16", "ip route del blackhole 10.98.0.0/16", "blackhole 10.98.0.0/16"),
    ("host1", "ip rule add priority 77 lookup 7", "ip rule del priority 77", "rule 77"),
    ("host1", "ip netns add stray", "ip netns del stray", "netns stray"),
    ("host1", "mkdir -p /run/faultbed/faults/x.revert", "rmdir /run/faultbed/faults/x.revert", "revert x.revert"),
    ("host1", "systemd-run -q --unit=faultbed-x sleep 99", "systemctl stop faultbed-x", "unit faultbed-x.service"),
    ("host1", "rdma link delete rxe1", "rdma link add rxe1 type rxe netdev be1", "rdma rxe1/1"),
    (
        "rtsw1",
        "tc qdisc replace dev host1-rxe0 root netem delay 1ms",
        "tc qdisc replace dev host1-rxe0 root pfifo limit 10000",
        "qdisc host1-rxe0 root",
    ),
    (
        "rtsw1",
        "tc filter add dev host1-rxe0 egress protocol ip prio 9 u32 match u32 0 0 action pass",
        "tc filter del dev host1-rxe0 egress protocol ip prio 9",
        "filter host1-rxe0 egress 9",
    ),
    ("rtsw1", "nft add table netdev stray", "nft delete table netdev stray", "nft table netdev stray"),
    (
        "rtsw1",
        "sysctl -qw net.ipv4.fib_multipath_hash_policy=0",
        "sysctl -qw net.ipv4.fib_multipath_hash_policy=1",
        "sysctl net.ipv4.fib_multipath_hash_policy",
    ),
]


LEARN = """
import socket, struct, sys
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
own, far = map(socket.inet_aton, sys.argv[1:])
sent = struct.pack("!BBHHHBBH", 0x45, 0, 4164, 1, 0x4000, 63, 17, 0) + own + far
sent += struct.pack("!HHHH", 50000, 4791, 4144, 0)
said = struct.pack("!BBHHH", 3, 4, checksum(struct.pack("!BBHHH", 3, 4, 0, 0, 1500) + sent), 0, 1500) + sent
socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).sendto(said, (sys.argv[1], 0))
"""
"""A host tells itself "fragmentation needed, 1500 bytes" (RFC 1191) of a RoCEv2 packet from its address to another."""


def test_no_switch_teaches_a_host_a_path_mtu(lab):
    """A learnt path MTU outlives its fault and blocks RDMA for ten minutes. The fingerprint would show it."""
    before = fingerprint.capture(lab)
    own, far = (lab.topology.hosts[index].rnics[0].ip for index in (0, -1))
    host, learn = lab.node("host1"), ["python3", "-c", LEARN, own, far]
    host.run(learn)
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []
    try:
        host.run(["sysctl", "-qw", "net.ipv4.ip_no_pmtu_disc=0"])
        host.run(learn)
        host.run(["ip", "route", "get", far, "from", own])  # the kernel lists only exceptions that are used
        lines = fingerprint.diff(before, fingerprint.capture(lab))
    finally:
        host.run(["sysctl", "-qw", "net.ipv4.ip_no_pmtu_disc=2"])
        host.run(["ip", "route", "flush", "cache"])
    assert lines == [
        f"host1: path mtu be0 {far}/32 is new (1500)",
        "host1: sysctl net.ipv4.ip_no_pmtu_disc was 2, is 0",
    ]
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []


def test_fingerprint_shows_everything_a_fault_can_touch(lab):
    """Each change is one line of the difference; after all changes are undone there is none."""
    before = fingerprint.capture(lab)
    for node in ("host1", "rtsw1"):
        lab.node(node).run(["sh", "-ec", "; ".join(do for where, do, _, _ in TOUCHED if where == node)])
    lines = fingerprint.diff(before, fingerprint.capture(lab))
    missing = [words for node, _, _, words in TOUCHED if not any(node in line and words in line for line in lines)]
    assert not missing, lines
    for node in ("host1", "rtsw1"):
        lab.node(node).run(["sh", "-ec", "; ".join(undo for where, _, undo, _ in TOUCHED if where == node)])
    assert fingerprint.settle(lab, before) == []


UNITS = """
systemd-run -q --unit=faultbed-fails false
systemd-run -q --unit=faultbed-exits --remain-after-exit true
systemd-run -q --unit=faultbed-wants -p Wants=faultbed-missing.service sleep 99
systemd-run -q --unit=faultbed-later --on-active=99 true
until systemctl is-failed -q faultbed-fails && systemctl is-active -q faultbed-exits; do sleep 0.1; done
systemctl list-units --all --plain --no-legend 'faultbed-*'
"""
"""Units that failed, exited, run, wait, or are wanted and do not exist; and all as systemctl lists them."""


def test_fingerprint_has_the_units_that_systemctl_lists(lab):
    """The watcher reads them from PID 1 without systemctl: the same names and states, failed and unloaded ones too."""
    before = fingerprint.capture(lab)
    listed = [line.split() for line in lab.node("host1").run(["sh", "-ec", UNITS]).stdout.splitlines()]
    now = fingerprint.capture(lab).nodes["host1"]
    assert {subject: text for subject, text in now.items() if subject.startswith("unit")} == {
        f"unit {name}": f"{active} {sub}" for name, _load, active, sub, *_ in listed
    }
    assert {"failed failed", "active exited", "inactive dead", "active waiting"} <= {*now.values()}
    ended = "systemctl stop faultbed-exits faultbed-wants faultbed-later.timer; systemctl reset-failed faultbed-fails"
    lab.node("host1").run(["sh", "-ec", ended])
    assert fingerprint.settle(lab, before) == []


def test_provision_second_run_changes_nothing(lab):
    """The playbooks are idempotent: a second run changes 0, and verify finds everything in order."""
    again = provision.provision(provision.site_of(lab))
    assert sum(again.changed.values()) == 0, again.changes
    assert not again.failed
    proof = provision.verify(provision.site_of(lab))
    pings = sum(int(result.get("pairs", 0)) for result in proof.results.values())
    rnics = [(host.name, rnic.name) for host in lab.topology.hosts for rnic in host.rnics]
    assert pings == sum(1 for rnic in rnics for two in rnics if rnic[0] != two[0])


def test_dead_vm_is_named_and_reset_restarts_it_and_undoes_unrecorded_changes(lab):
    """QEMU is killed, a kernel panics: status names the VM, work fails with the remedy, and reset repairs the lab.

    A file, an address and a route that no journal recorded, on a VM that runs, are gone as well; its clock is correct.
    """
    first, changed, last = (lab.topology.hosts[place].name for place in (0, 1, -1))
    before = fingerprint.capture(lab)
    node = lab.node(changed)
    node.run(["sh", "-c", "touch /etc/left-behind; ip address add 10.99.0.1/32 dev lo; ip link set dev be0 mtu 3000"])
    assert fingerprint.diff(before, fingerprint.capture(lab))
    with contextlib.suppress(FaultbedError):  # a killed QEMU ends its SSH server
        lab.node(first).run(["sh", "-c", "echo c > /proc/sysrq-trigger"], timeout_s=5)
    pid = next(vm.pid for vm in lifecycle.status(lab.inventory_model).vms if vm.name == last)
    os.kill(pid, signal.SIGKILL)
    lab.forget_connections()
    with pytest.raises(Unreachable, match=rf"{first} .*kernel panicked: sysrq triggered crash.*faultbed reset"):
        lab.node(first).run(["true"])
    with pytest.raises(Unreachable, match=rf"{last} .*faultbed reset"):
        lab.node(last).run(["true"])
    now = lifecycle.status(lab.inventory_model)
    assert now.state == "broken"
    assert [vm.name for vm in now.vms if not vm.alive] == [last]
    assert [vm.name for vm in now.vms if vm.panic] == [first]
    lifecycle.reset(lab.inventory_model, lambda _: None, lab=lab)
    assert lifecycle.status(lab.inventory_model, patience_s=30).state == "up"
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []
    assert node.run(["test", "-e", "/etc/left-behind"], check=False).rc == 1
    assert abs(float(node.run(["date", "+%s.%N"]).stdout) - time.time()) < 60


def test_slow_vm_does_not_end_its_lab(lab):
    """A VM is stopped for longer than one status check takes: `up` waits for it and restarts nothing."""
    before = {vm.name: vm.pid for vm in lifecycle.status(lab.inventory_model).vms}
    pid = before[lab.topology.hosts[-1].name]
    goes_on = threading.Timer(lifecycle.PATIENCE_S + 2, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    goes_on.start()
    lines: list[str] = []
    try:
        assert lifecycle.up(lab.inventory_model, lines.append) == "already up"
    finally:
        goes_on.join()
    assert any("slow to answer" in line for line in lines)
    assert {vm.name: vm.pid for vm in lifecycle.status(lab.inventory_model).vms} == before


def renewed_for_another_version(inventory):
    """A snapshot with another version's node code is provisioned again exactly once, because its GPUs run that code."""
    path = lab_dir(inventory.name) / "snapshot.json"
    write(path, msgspec.structs.replace(read_snapshot(path.parent), node_code="0" * 16))
    lines: list[str] = []
    assert lifecycle.up(inventory, lines.append) == "resumed"
    assert any("another version of faultbed" in line for line in lines)
    with lab_module.open_lab(inventory) as again:
        assert sum(provision.provision(provision.site_of(again)).changed.values()) == 0
    assert lifecycle.up(inventory, lines.append) == "already up"


@pytest.mark.slow
def test_two_labs_run_side_by_side_and_end_without_leftovers(lab):
    """A second lab comes up, does not affect the first one, and leaves no process, socket or file behind."""
    if lab.name == "soft-mini":
        pytest.skip("the second lab of this test is soft-mini itself")
    other = inventory_module.load(shipped.inventories() / "soft-mini.yml")
    if lifecycle.status(other).state == "up":
        pytest.skip("soft-mini is up already: another session uses it")
    had_snapshot = lifecycle.status(other).snapshot
    before = fingerprint.capture(lab)
    lifecycle.up(other, lambda _: None)
    machines = {machine.machine.name: machine for machine in lifecycle.vms(other)}
    started = [read_state(lab_dir(other.name)).vms]
    try:
        with lab_module.open_lab(other) as second:
            assert second.node("host1").run(["hostname"]).stdout.strip() == "host1"
            assert fingerprint.diff(before, fingerprint.capture(lab)) == []
        lifecycle.down(other)
        renewed_for_another_version(other)
        started.append(read_state(lab_dir(other.name)).vms)
    finally:
        lifecycle.down(other) if had_snapshot else lifecycle.purge(other)
    assert not any(vm.is_alive(machines[name], known) for vms in started for name, known in vms.items())
    assert not socket_dir(lab_dir(other.name)).exists()
    kept = {path.name for path in lab_dir(other.name).rglob("*") if path.is_file()} if had_snapshot else set()
    assert kept <= {"lock", "snapshot.json", "id_ed25519", "disk.qcow2", "seed.tar", "console.log", "qemu.log"}
    assert fingerprint.diff(before, fingerprint.capture(lab)) == []


def test_dirty_lab_refuses_every_kind_of_work(lab):
    """Every command exits with 5 and one sentence until the lab is reset. `traffic job` used to go ahead."""
    dirty.mark(lab.state_dir, ["an address is new"], None)
    commands = (
        ["traffic", "flow"],
        ["traffic", "collective"],
        ["traffic", "job", "--grid", "tp=2,dp=2", "--phase", "dp:all-reduce:64KiB"],
        ["inject", "link.flap", "rtsw1:ctsw1", "--for", "1s"],
    )

    def run(words):
        return subprocess.run(
            [sys.executable, "-m", "faultbed", "--lab", str(lab.inventory), *words],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    try:
        with ThreadPoolExecutor(max_workers=len(commands)) as pool:
            for words, done in zip(commands, pool.map(run, commands), strict=True):
                assert (done.returncode, "is DIRTY and refuses work" in done.stderr) == (5, True), (words, done.stderr)
    finally:
        dirty.clean(lab.state_dir)
