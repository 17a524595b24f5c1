"""The soft lab's pure parts: its VMs, their wiring and their QEMU arguments."""

import io
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from house import HOUSE
from waiting import until

from faultbed.testbed import shipped
from faultbed.testbed.backends.soft import accel, capacity, image, lab_state, lifecycle, snapshot_key, ssh_access, vm
from faultbed.testbed.backends.soft.ignored_signals import ignored_signals
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.vm import Vm
from faultbed.testbed.backends.soft.wiring import machines
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module


@pytest.fixture(scope="module")
def soft():
    return inventory_module.load(shipped.inventories() / "soft.yml")


@pytest.fixture
def one(soft, tmp_path):
    return Vm(machine=machines(soft)[1], folder=tmp_path / "disk", sockets=tmp_path / "sockets")


IMAGE = Image(digest="0" * 12, folder=__import__("pathlib").Path("/nowhere"))


def test_softlab_lists_the_carrier_first(soft):
    """The carrier must read its ends of the wires before any host sends."""
    assert [machine.name for machine in machines(soft)] == ["fabric", "host1", "host2", "host3", "host4"]


def test_softlab_every_wire_has_one_host_end_and_one_carrier_end(soft):
    """12 wires: a front end and two RNICs for each of four hosts."""
    ends: dict[str, set[str]] = {}
    for machine in machines(soft):
        for nic in machine.nics:
            if nic.wire:
                assert nic.end not in ends.setdefault(nic.wire, set())
                ends[nic.wire].add(nic.end)
    assert len(ends) == 12
    assert set(map(frozenset, ends.values())) == {frozenset({"host", "carrier"})}


def test_snapshot_of_a_lab_with_another_hash_seed_or_namespace_does_not_fit(soft, monkeypatch):
    """`up` left a lab running whose switches hashed with the seed of before, although the inventory had a new one."""
    monkeypatch.setattr(vm, "qemu_version", lambda: "7")
    changes = ({}, {"ecmp_hash_seed": 7}, {"ecmp_hash_seed": 8}, {"netns": {**soft.netns, "rtsw1": "other"}})
    assert len({snapshot_key.key(replace(soft, **change), IMAGE, "tcg") for change in changes}) == len(changes)


def test_softlab_macs_are_unique(soft):
    macs = [nic.mac for machine in machines(soft) for nic in machine.nics]
    assert len(macs) == len(set(macs))


def test_vm_listens_on_loopback_only(one):
    """The only forwarding is on 127.0.0.1 at a port that QEMU chooses, and the guest has no outside access."""
    argv = vm.command_line(one, IMAGE, "tcg", snapshot=None)
    users = [arg for arg in argv if arg.startswith("user,")]
    assert users == ["user,id=mgmt0,restrict=on,hostfwd=tcp:127.0.0.1:0-:22"]
    assert not [arg for arg in argv if arg.startswith(("tcp:", "vnc", "telnet:"))]


def test_vm_resumed_from_a_snapshot_starts_paused(one):
    argv = vm.command_line(one, IMAGE, "kvm", snapshot="base")
    assert argv[-3:] == ["-loadvm", "base", "-S"]
    assert "kvm" in argv


def test_vm_wire_ends_name_each_other(soft, tmp_path):
    fabric, host1 = (Vm(machine=machine, folder=tmp_path, sockets=tmp_path) for machine in machines(soft)[:2])
    at_host = next(a for a in vm.command_line(host1, IMAGE, "tcg", snapshot=None) if a.startswith("dgram,id=be0"))
    at_fabric = next(
        a for a in vm.command_line(fabric, IMAGE, "tcg", snapshot=None) if a.startswith("dgram,id=host1-rxe0")
    )
    local = at_host.split("local.path=")[1].split(",")[0]
    assert f"remote.type=unix,remote.path={local}" in at_fabric


def test_seed_disk_has_the_identity_and_a_private_key(soft):
    pair = ssh_access.generate()
    disk = vm.seed_disk(machines(soft)[1], host_key=pair.private, authorized_key=pair.public)
    assert len(disk) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(disk)) as tar:
        assert tar.extractfile("etc/hostname").read() == b"host1\n"
        assert b" be0\n" in tar.extractfile("run/faultbed/nics").read()
        assert tar.getmember("etc/ssh/ssh_host_ed25519_key").mode == 0o600


def test_lab_private_files_are_owner_only(tmp_path):
    path = tmp_path / "id"
    path.write_text("old")
    path.chmod(0o644)
    ssh_access.write_private(path, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "secret"


def test_image_digest_changes_with_the_recipe(monkeypatch):
    before = image.digest()
    monkeypatch.setattr(image, "PACKAGES", (*image.PACKAGES, "fio"))
    assert image.digest() != before


def test_image_missing_tool_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("FAULTBED_CACHE", str(tmp_path))
    monkeypatch.setattr(image, "_which", lambda tool: None)
    with pytest.raises(LabError, match=r"mmdebstrap.*not found; install with `apt-get install"):
        image.build(lambda _: None)
    assert not list((tmp_path / "images").glob("*-*")), "no half-built image stays"


def test_image_lack_of_space_is_reported_before_building(monkeypatch, tmp_path):
    monkeypatch.setenv("FAULTBED_CACHE", str(tmp_path))
    monkeypatch.setattr(image, "_which", lambda tool: tool)
    monkeypatch.setattr(image, "NEEDED_MIB", 10**9)
    with pytest.raises(LabError, match="MiB free, 1000000000 are needed; free disk space, or set FAULTBED_CACHE"):
        image.build(lambda _: None)


def test_image_recipe_of_a_checkout_under_umask_077_is_readable_for_the_subordinate_root(monkeypatch, tmp_path):
    """`make demo` in a clone made with umask 077: the root of mmdebstrap is another user id and could not run it."""
    recipe, modes = tmp_path / "guest", []
    shutil.copytree(image._GUEST, recipe)
    for path in (recipe, *recipe.iterdir()):
        path.chmod(path.stat().st_mode & 0o700)

    def look(guest, _out, _log):
        modes.extend(path.stat().st_mode & 0o005 for path in (guest, *guest.iterdir()))
        raise LabError("seen")

    monkeypatch.setattr(image, "_GUEST", recipe)
    monkeypatch.setattr(image, "_mmdebstrap", look)
    with pytest.raises(LabError, match="seen"):
        image._build_into(tmp_path, lambda _: None)
    assert set(modes) == {0o005}


BUILDER = """#!/bin/sh
mkdir "$PLACE/tree"
sleep 600 &
echo $! >"$PLACE/child"
trap 'rm -r "$PLACE/tree"; exit 1' TERM
wait
"""


def test_image_build_that_is_interrupted_leaves_no_process_and_no_tree(monkeypatch, tmp_path):
    """Ctrl-C during the first `up` left mmdebstrap's processes running, and hundreds of MiB in /tmp."""
    (tmp_path / "mmdebstrap").write_text(BUILDER)
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(image, "BUILD_TIMEOUT_S", 3.0)
    with pytest.raises(LabError, match="took longer than 3 s"):
        image._mmdebstrap(tmp_path, tmp_path, tmp_path / "log")
    assert_build_left_nothing(tmp_path)


def assert_build_left_nothing(place):
    """The build and its child got one signal each; the child may need a moment longer to end."""
    assert not (place / "tree").exists()
    child = Path(f"/proc/{(place / 'child').read_text().strip()}/stat")

    def is_over():
        try:
            return child.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_over)


@pytest.mark.process
def test_image_build_of_an_interrupted_bootstrap_leaves_no_process_and_no_tree(tmp_path):
    """Bootstrap sends SIGTERM to the build, because a shell's background processes ignore Ctrl-C."""
    for tool in ("mmdebstrap", "mke2fs", "zstd", "xz"):
        (tmp_path / tool).write_text(BUILDER)
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PLACE": str(tmp_path), "PATH": path, "FAULTBED_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "faultbed.testbed.backends.soft.image"]
    with subprocess.Popen(argv, cwd=HOUSE, env=env, stderr=subprocess.DEVNULL) as build:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        build.terminate()
        assert build.wait(60) == 128 + signal.SIGTERM
    assert_build_left_nothing(tmp_path)
    assert [path.name for path in (tmp_path / "cache" / "images").iterdir()] == [".lock"]


def test_lab_lack_of_memory_is_reported_before_booting(monkeypatch, soft, tmp_path):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    monkeypatch.setattr(capacity, "available_mib", lambda: 100)
    with pytest.raises(LabError, match=r"soft needs \d+ MiB of memory, 100 MiB are available.*--lab soft-mini"):
        lifecycle.up(soft, lambda _: None)


def test_lab_lack_of_disk_space_is_reported_before_booting(monkeypatch, soft, tmp_path):
    """Otherwise the lack appears two minutes later, as an I/O error while the snapshot is taken."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 150 << 20))
    with pytest.raises(LabError, match=r"soft needs 1500 MiB of disk .* 150 MiB are free .*FAULTBED_HOME"):
        capacity.check_disk(soft, tmp_path)


def test_unknown_accelerator_is_rejected(monkeypatch):
    monkeypatch.setenv("FAULTBED_ACCEL", "hvf")
    with pytest.raises(UsageError, match='FAULTBED_ACCEL="hvf": set kvm or tcg'):
        accel.choose(IMAGE, lambda _: None)


def test_lab_lock_admits_one_command_at_a_time(tmp_path):
    """A second up, reset or down of the same lab is rejected with the first one's process id."""
    import os

    reported = rf"another faultbed \(process {os.getpid()}\)"
    with lab_state.locked(tmp_path), pytest.raises(LabError, match=reported), lab_state.locked(tmp_path):
        pass


def test_lab_lock_on_a_full_disk_admits_the_command_that_ends_the_lab(tmp_path):
    """The process id in the lock is for messages only: without it, `down --purge` could not free the disk."""
    before, entered = resource.getrlimit(resource.RLIMIT_FSIZE), []
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # nothing can be written, as on a full disk
    try:
        with lab_state.locked(tmp_path):
            entered.append("lab")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert entered == ["lab"]


def test_state_of_another_version_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "state.json").write_text('{"schema": 1, "surprise": true}')
    with pytest.raises(LabError, match="faultbed down --purge"):
        lab_state.read_state(tmp_path)


def test_reset_of_a_lab_that_is_down_is_refused_with_the_reason(monkeypatch, soft, tmp_path):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    with pytest.raises(LabError, match="soft is not up; start it with `faultbed up`"):
        lifecycle.reset(soft, lambda _: None)


def test_vm_inherits_no_open_file_of_its_parent(tmp_path):
    """Otherwise a VM would keep a lock, or a pipe that a CI job waits for, open as long as it runs."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)  # noqa: FBT003
    pid = vm._spawn(["sleep", "20"], tmp_path / "log")
    try:
        os.close(write_end)
        ready, _, _ = select.select([read_end], [], [], 5.0)
        assert ready, "the child holds the pipe open"
        assert os.read(read_end, 1) == b""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)


def test_vm_socket_that_is_bound_does_not_listen_yet(tmp_path):
    """QEMU's monitor refuses connections between bind and listen; on a starved machine, clients do connect then."""
    path = tmp_path / "monitor"
    with socket.socket(socket.AF_UNIX) as server:
        assert not vm._listens(path)
        server.bind(str(path))
        assert not vm._listens(path)
        server.listen(1)
        assert vm._listens(path)


@pytest.fixture
def heard():
    """Restore the default handling of SIGINT, because background jobs start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_second_ctrl_c_does_not_end_the_cleanup():
    """A second Ctrl-C used to leave half of the VMs running, and the lab was not recorded as broken."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        try:
            signal.raise_signal(signal.SIGINT)  # Python runs the handler before `kill` returns
        except BaseException:
            with ignored_signals():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                done.append("all of it")
            raise
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
