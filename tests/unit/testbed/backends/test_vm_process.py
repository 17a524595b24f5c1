"""Identification of a soft lab's QEMU processes, and the folder of its sockets, with real processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from faultbed.testbed import directories, provision, shipped
from faultbed.testbed.backends.soft import fleet, lab_state, lifecycle, vm, vm_process
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.lab_state import LabState, Snapshot, VmState, read_state, sockets_of, write
from faultbed.testbed.backends.soft.vm import Vm
from faultbed.testbed.backends.soft.wiring import Machine, machines
from faultbed.testbed.backends.soft_backend import BACKEND
from faultbed.testbed.directories import private_dir, socket_dir
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.node import holders
from faultbed.testbed.observe.fingerprint import stored_reverts

MINI = shipped.inventories() / "soft-mini.yml"


@pytest.fixture
def mini(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    return inventory_module.load(MINI)


@pytest.fixture
def folder(mini):
    return private_dir(directories.lab_dir(mini.name))


@pytest.fixture
def machine(mini, folder):
    """The VM host1 of the lab."""
    result = next(vm for vm in lifecycle.vms(mini) if vm.machine.name == "host1")
    private_dir(result.folder)
    return result


@pytest.fixture
def run():
    """Start processes that wait for the end of their standard input, and end them afterwards."""
    started = []

    def start(argv):
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"runs\n"
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def qemu(tmp_path, run):
    """Start a process with a VM's own arguments whose executable has QEMU's name (a copy of the shell)."""
    binary = tmp_path / vm_process.QEMU
    shutil.copy(os.path.realpath("/bin/sh"), binary)

    def start(machine):
        built = Image(digest="0" * 12, folder=tmp_path)
        options = vm.command_line(machine, built, "tcg", snapshot=None)[1:]
        return run([str(binary), "-c", "echo runs; read end", "sh", *options])

    return start


def decoy(run, machine, *, executable=sys.executable):
    """Start another program that has all of QEMU's arguments on its command line."""
    options = vm.command_line(machine, Image(digest="0" * 12, folder=machine.folder), "tcg", snapshot=None)
    return run([executable, "-c", "print('runs', flush=True); input()", *options, f"UNIX-CONNECT:{machine.qmp}"])


def recorded(child):
    return VmState(
        pid=child.pid, ssh_port=1, start_ticks=vm_process.start_ticks(child.pid), boot_id=vm_process.boot_id()
    )


def record(folder, child, *, name="host1"):
    state = LabState(
        inventory=str(MINI.resolve()),
        key="k",
        accelerator="tcg",
        image="0" * 12,
        vms={name: recorded(child)},
        ready=True,
        sockets=str(socket_dir(folder)),
    )
    write(folder / "state.json", state)


@pytest.mark.parametrize(
    ("variable", "value"), [("XDG_RUNTIME_DIR", "/run/user/4711"), ("TMPDIR", "/var/tmp"), ("XDG_RUNTIME_DIR", None)]
)
def test_socket_dir_other_environment_is_the_same(folder, monkeypatch, variable, value):
    """XDG_RUNTIME_DIR exists in a login shell, but not for cron, CI and sudo, and logging out removes its folder."""
    before = socket_dir(folder)
    monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable, raising=False)
    assert socket_dir(folder) == before


def test_socket_dir_long_state_path_moves_to_a_short_folder(tmp_path):
    """A unix socket's path ends at 107 bytes."""
    assert socket_dir(tmp_path) in (tmp_path / "sockets", directories.short_dir(tmp_path))
    long = tmp_path / ("x" * 90)
    assert socket_dir(long) == directories.short_dir(long)
    assert len(os.fsencode(socket_dir(long))) + 41 <= directories.SOCKET_PATH_MAX


def test_running_lab_keeps_the_sockets_it_was_started_with(mini, folder, machine, run, tmp_path):
    child = decoy(run, machine)
    record(folder, child)
    state = read_state(folder)
    write(folder / "state.json", LabState(**{**_fields(state), "sockets": str(tmp_path)}))
    assert sockets_of(folder) == tmp_path
    assert {vm.sockets for vm in lifecycle.vms(mini)} == {tmp_path}


def _fields(state):
    return {name: getattr(state, name) for name in state.__struct_fields__}


def test_end_recorded_qemu_from_another_environment_ends_it(mini, folder, machine, qemu, monkeypatch):
    """From cron, a live VM used to count as dead: it was not ended, and the next start collided with it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/4711")
    child = qemu(machine)
    record(folder, child)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    now = next(vm for vm in lifecycle.status(mini).vms if vm.name == "host1")
    assert (now.pid, now.alive) == (child.pid, True)
    assert lifecycle.down(mini)
    assert vm_process.start_ticks(child.pid) == 0, "the process is still there"
    assert not (folder / "state.json").exists()


def test_slow_vm_is_queried_again_before_its_lab_counts_as_broken(mini, folder, machine, qemu, monkeypatch):
    record(folder, qemu(machine))
    needs_s = lifecycle.PATIENCE_S + 1
    monkeypatch.setattr(lifecycle.fleet, "has_ssh_banner", lambda _port, *, timeout_s: timeout_s > needs_s)
    lines = []
    now = lifecycle.patient_status(mini, lines.append)
    assert [vm.ssh for vm in now.vms if vm.name == "host1"] == [True]
    assert lines == ["host1: slow to answer; waiting up to 15 s"]


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_qemu_without_a_record_is_identified_by_its_disk_and_ended(mini, folder, machine, qemu, run, lost):
    """The decoy process also names every socket and disk, but is no QEMU and must survive."""
    innocent = decoy(run, machine)
    child = qemu(machine)
    if lost == "damaged":
        (folder / "state.json").write_text("{")
    else:
        now = lifecycle.status(mini)
        assert now.state == "broken"
        assert next(vm for vm in now.vms if vm.name == "host1").pid == child.pid
    assert lifecycle.down(mini)
    assert vm_process.start_ticks(child.pid) == 0, "the process is still there"
    assert innocent.poll() is None
    assert lifecycle.status(mini).state == "down"


@pytest.mark.parametrize("is_recorded", [True, False])
def test_vm_removed_from_the_inventory_is_ended(mini, folder, machine, qemu, is_recorded):
    """Otherwise the VM of a host that was removed from a running lab's inventory would run on unnoticed."""
    earlier = Vm(
        machine=Machine(name="host9", memory_mib=512, vcpus=1, nics=()),
        folder=machine.folder.with_name("host9"),
        sockets=machine.sockets,
    )
    private_dir(earlier.folder)
    child = qemu(earlier)
    if is_recorded:
        record(folder, child, name="host9")
    assert lifecycle.down(mini)
    assert vm_process.start_ticks(child.pid) == 0, "the process is still there"


def test_purge_damaged_files_removes_the_lab(mini, folder):
    """`purge` is the remedy that the error about damaged files names."""
    for name in ("state.json", "snapshot.json"):
        (folder / name).write_text("{")
    assert lifecycle.purge(mini)
    assert not folder.exists()


def test_purge_leaves_a_lab_alone_that_comes_up_while_old_files_are_removed(mini, folder, monkeypatch):
    """Gigabytes take a while to remove, and the lock was no longer held: the new VMs lost their record and disks."""
    (folder / "vms").mkdir()
    real = lifecycle.shutil.rmtree

    def slow(path, **options):
        if ".purged-" in str(path) or path == folder:
            with lab_state.locked(private_dir(folder)):
                (folder / "state.json").write_text("{}")
        real(path, **options)

    monkeypatch.setattr(lifecycle.shutil, "rmtree", slow)
    assert lifecycle.purge(mini)
    assert (folder / "state.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_lock_of_a_lab_that_was_purged_meanwhile_is_refused(tmp_path, monkeypatch):
    """The lock would be on a removed file, which no other command can open."""
    real = lab_state.fcntl.flock

    def purged(handle, how):
        (tmp_path / "lab").rename(tmp_path / "gone")
        real(handle, how)

    monkeypatch.setattr(lab_state.fcntl, "flock", purged)
    with pytest.raises(LabError, match=r"was removed .* run it again"), lab_state.locked(tmp_path / "lab"):
        pass


def test_reset_of_a_lab_that_another_command_has_just_ended_starts_nothing(mini, folder, monkeypatch):
    """The record was read before the lock: `down` in another shell ended the lab, and `reset` started it again."""
    state = LabState(inventory=str(MINI), key="k", accelerator="tcg", image="i", vms={}, ready=True)
    write(folder / "state.json", state)
    write(folder / "snapshot.json", Snapshot(key="k", host_keys={}, complete=True))
    monkeypatch.setattr(lifecycle.image, "cached", lambda: Image(digest="i", folder=folder))
    started, real = [], lifecycle.locked

    @contextlib.contextmanager
    def after_down(path):
        lifecycle._end_all(mini, folder)
        with real(path):
            yield

    monkeypatch.setattr(lifecycle, "locked", after_down)
    monkeypatch.setattr(lifecycle, "_resume", lambda *_, **__: started.append("VMs"))
    with pytest.raises(LabError, match="is not up"):
        lifecycle.reset(mini, lambda _: None)
    assert started == []


@pytest.mark.parametrize("name", ["my labs", "a,b", "o'brien", "100%", "{x}"])
def test_up_with_a_state_folder_that_qemu_or_ssh_would_split_is_refused(tmp_path, monkeypatch, name):
    """The lab booted, and Ansible could not log in: `No closing quotation`, `percent_dollar_expand: failed`."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / name))
    monkeypatch.setattr(lifecycle.image, "build", lambda _: pytest.fail("VMs would boot"))
    with pytest.raises(UsageError, match="set FAULTBED_HOME to a folder without it"):
        lifecycle.up(inventory_module.load(MINI), lambda _: None)


def test_find_qemu_that_mentions_the_disk_elsewhere_is_not_ours(machine, tmp_path, run):
    """Only the value of a -drive option counts: another QEMU may have the path in its name or its kernel options."""
    binary = tmp_path / vm_process.QEMU
    shutil.copy(os.path.realpath("/bin/sh"), binary)
    run([str(binary), "-c", "echo runs; read end", "sh", "-append", f"file={machine.disk}", f"unix:{machine.qmp}"])
    other = Vm(machine=machine.machine, folder=machine.folder.parent / "host10", sockets=machine.sockets)
    built = Image(digest="0" * 12, folder=tmp_path)
    options = vm.command_line(other, built, "tcg", snapshot=None)[1:]
    run([str(binary), "-c", "echo runs; read end", "sh", *options])
    assert fleet.unrecorded(machine) == []
    assert len(fleet.unrecorded(other)) == 1


def test_end_process_id_reused_by_another_program_signals_nothing(mini, folder, machine, run):
    """A process with the recorded id is only ours with the same start time, boot and program."""
    child = decoy(run, machine)
    known = recorded(child)
    for wrong in (
        known,  # same id, start time and boot, but not QEMU
        VmState(pid=known.pid, ssh_port=1),
        VmState(pid=2**22 + 1, ssh_port=1, start_ticks=5, boot_id=known.boot_id),
    ):
        assert not vm.is_alive(machine, wrong)
        assert not vm.end(machine, wrong)
    record(folder, child)
    assert not any(vm.alive for vm in lifecycle.status(mini).vms)
    lifecycle.down(mini)
    assert child.poll() is None


def test_copy_of_a_state_folder_ends_no_vm_of_the_original(mini, folder, machine, qemu, monkeypatch, tmp_path):
    """A backup of FAULTBED_HOME holds the process ids of the running lab: `down` there ended that lab's VMs."""
    machine.disk.touch()
    child = qemu(machine)
    record(folder, child)
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "backup"))
    assert not any(vm.alive for vm in lifecycle.status(mini).vms)
    lifecycle.down(mini)
    assert child.poll() is None
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    (tmp_path / "home").rename(tmp_path / "moved")
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "moved"))
    lifecycle.down(mini)
    assert vm_process.start_ticks(child.pid) == 0, "a folder that was moved is the lab's own"


def test_copy_of_a_state_folder_reaches_no_vm_of_the_original(mini, folder, machine, qemu, monkeypatch, tmp_path):
    """`inject`, `heal`, `traffic` and `ssh` in the copy reached the VMs of the original over its ports."""
    machine.disk.touch()
    child = qemu(machine)
    record(folder, child)
    state = read_state(folder)
    write(folder / "state.json", msgspec.structs.replace(state, vms=dict.fromkeys(mini.machines, recorded(child))))
    keys = dict.fromkeys(mini.machines, "ssh-ed25519 key")
    write(folder / "snapshot.json", Snapshot(key="k", host_keys=keys, complete=True))
    assert set(BACKEND.access(mini).addresses) == set(mini.machines)
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "backup"))
    for reach in (BACKEND.access, lambda lab: BACKEND.reset(lab, lambda _: None)):
        with pytest.raises(LabError, match=f"{directories.lab_dir(mini.name)}: this state folder is a copy"):
            reach(mini)
    (tmp_path / "home").rename(tmp_path / "moved")
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "moved"))
    assert set(BACKEND.access(mini).addresses) == set(mini.machines), "a folder that was moved is the lab's own"


def test_down_in_a_copy_ends_no_holder_of_the_original(mini, folder, machine, qemu, run, monkeypatch, tmp_path):
    """A copied claim names the holder that keeps a fault of the original, such as a frozen host."""
    machine.disk.touch()
    record(folder, qemu(machine))
    holder = run([sys.executable, "-c", "print('runs', flush=True); input()"])
    claim = private_dir(stored_reverts(folder)) / "a.claim"
    claim.write_text(json.dumps(holders.identity(holder.pid)))
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "backup"))
    lifecycle.down(mini)
    assert holder.poll() is None
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    lifecycle.down(mini)
    assert holder.wait(10) == -signal.SIGKILL


def test_relative_home_stays_where_it_is_when_the_working_directory_changes(monkeypatch, tmp_path):
    """In a test that changes the directory, the lab of the session was looked for in another folder."""
    monkeypatch.setenv("FAULTBED_HOME", "state")
    monkeypatch.chdir(tmp_path)
    assert directories.home_dir() == tmp_path / "state"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert directories.home_dir() == tmp_path / "state"


@pytest.mark.parametrize("change", ["start_ticks", "boot_id"])
def test_end_other_qemu_with_the_recorded_id_signals_nothing(machine, qemu, change):
    child = qemu(machine)
    known = recorded(child)
    wrong = {"start_ticks": known.start_ticks + 1} if change == "start_ticks" else {"boot_id": "0" * 36}
    assert not vm.end(machine, VmState(**{**_fields(known), **wrong}))
    assert child.poll() is None
    assert vm.is_alive(machine, known)


def test_record_of_an_older_version_is_identified_by_disk(machine, qemu):
    """Labs that run while faultbed is upgraded have no start time in their record."""
    child = qemu(machine)
    known = VmState(pid=child.pid, ssh_port=1)
    assert vm.is_alive(machine, known)
    assert vm.end(machine, known)
    assert vm_process.start_ticks(child.pid) == 0, "the process is still there"


def test_end_zombie_returns_at_once(machine, qemu):
    child = qemu(machine)
    known = recorded(child)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not vm.is_alive(machine, known)
    assert vm.end(machine, known)


def test_up_and_reset_in_another_users_lab_are_refused(mini, folder, monkeypatch):
    """Neither user, root included, could later replace the files of the other."""
    monkeypatch.setattr(lifecycle.os, "getuid", lambda: folder.stat().st_uid + 1)
    for work in (lifecycle.up, lifecycle.reset):
        with pytest.raises(UsageError, match=r"the lab belongs to user \d+, this is user \d+; run the command as"):
            work(mini, lambda _: None)


def test_end_qemu_of_another_user_is_reported(machine, qemu, monkeypatch):
    def refuse(*_):
        raise PermissionError

    child = qemu(machine)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(LabError, match=rf"QEMU of host1 \(process {child.pid}\) belongs to user \d+; run"):
        vm.end(machine, recorded(child))


def test_end_of_ssh_masters_leaves_other_programs_alone(tmp_path, run):
    """Every program with the folder of SSH's control sockets in its arguments used to be ended, such as an editor."""
    control = private_dir(tmp_path / "ssh")
    innocent = run([sys.executable, "-c", "print('runs', flush=True); input()", str(control / "socket")])
    binary = tmp_path / "ssh-copy" / "ssh"
    binary.parent.mkdir()
    shutil.copy(os.path.realpath("/bin/sh"), binary)
    master = run([str(binary), "-c", "echo runs; read end", f"ssh: {control}/socket [mux]"])
    provision._end_processes_of(control)
    assert master.wait(10) == -signal.SIGTERM
    assert innocent.poll() is None


def test_end_of_ssh_master_that_has_just_ended_leaves_no_descriptor_open(tmp_path, monkeypatch):
    def has_ended(*_):
        raise ProcessLookupError

    monkeypatch.setattr(provision, "_uses", lambda entry, _folder: entry.name == str(os.getppid()))
    monkeypatch.setattr(provision.signal, "pidfd_send_signal", has_ended)
    monkeypatch.setattr(provision, "_END_DEADLINE_S", 0.0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    provision._end_processes_of(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_machine_socket_names_fit_the_limit():
    """The names of the shipped labs stay below what `socket_dir` reserves for a name."""
    for path in shipped.inventories().glob("soft*.yml"):
        inventory = inventory_module.load(path)
        for one in machines(inventory):
            names = [f"{one.name}.holder", *(f"{nic.wire}.{nic.end}" for nic in one.nics if nic.wire)]
            assert max(map(len, names)) <= 40, path


@pytest.fixture
def identity(monkeypatch):
    """Record which identity the process would take, instead of taking it: tests run as root and as other users."""
    done = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("setgroups", "initgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *given, name=name: done.append((name, *given)))
    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/of/root")
    return done


def owned_by(monkeypatch, home, uid):
    stat = os.stat_result((0o40700, 1, 1, 1, uid, 4712, 0, 0, 0, 0))
    monkeypatch.setattr(type(home), "stat", lambda *_, **__: stat)


def test_root_acts_as_the_owner_of_the_state(tmp_path, monkeypatch, identity):
    """`sudo faultbed down` failed, and `sudo faultbed up` would have left root's files in the user's lab."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    owned_by(monkeypatch, tmp_path, 1234567)
    monkeypatch.setattr(
        directories.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ada", pw_gid=77, pw_dir="/home/ada")
    )
    assert directories.act_as_owner() == "ada"
    assert identity == [("initgroups", "ada", 77), ("setresgid", 77, 77, 77), ("setresuid", *[1234567] * 3)]
    assert (os.environ["HOME"], os.environ["FAULTBED_HOME"]) == ("/home/ada", str(tmp_path))
    assert "XDG_CACHE_HOME" not in os.environ


def test_root_acts_as_an_owner_without_a_name(tmp_path, monkeypatch, identity):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    owned_by(monkeypatch, tmp_path, 1234567)
    assert directories.act_as_owner() == "1234567"
    assert identity == [("setgroups", []), ("setresgid", *[4712] * 3), ("setresuid", *[1234567] * 3)]


@pytest.mark.parametrize("case", ["own state", "no state yet", "not root"])
def test_identity_is_unchanged_if_already_right(tmp_path, monkeypatch, identity, case):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "none" if case == "no state yet" else tmp_path))
    if case != "no state yet":
        owned_by(monkeypatch, tmp_path, 0 if case == "own state" else 1234567)
    if case == "not root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert directories.act_as_owner() is None
    assert identity == []
    assert os.environ["HOME"] == "/of/root"


def test_cpu_time_is_the_kernels_count_over_all_threads_of_a_process():
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    assert vm_process.cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
    assert vm_process.cpu_s(2**22 + 1) == 0, "no process has an id beyond the kernel's limit"
