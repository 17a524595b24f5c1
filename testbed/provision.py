"""Provision and verify a lab: runs faultbed's playbooks with ansible-runner.

Ansible gets the lab's inventory; for a soft lab also the inventory of the running lab, which has the addresses of the
VMs. Of the user's environment it gets only the variables in `_PASSED_ON`, because ansible-runner writes its environment
to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ansible_runner

from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import private_dir, short_dir
from faultbed.testbed.errors import HalfProvisioned, LabError
from faultbed.testbed.inventory import rates
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab
from faultbed.testbed.remote import node_archive
from faultbed.testbed.shipped import playbooks

__all__ = [
    "RACK_DEADLINE_S",
    "Event",
    "OnEvent",
    "ProvisionResult",
    "Site",
    "bring_up",
    "files_of_soft_labs",
    "play",
    "provision",
    "roles_of",
    "site_of",
    "verify",
]

VERIFY_DEADLINE_S = 60
"""Maximum time in the verify play for BGP to converge and pings to be answered."""

RACK_DEADLINE_S = 7200
"""Maximum time of a play on a rack: longer than all its tasks, of which apt's is the longest. At its end Ansible is
killed, whatever a machine is doing."""

_KEPT_RUNS = 5
_END_DEADLINE_S = 3.0
# A connection to a guest that hangs is closed after 90 s.
_SSH_ARGS = "-o ControlMaster=auto -o ControlPersist=120s -o ServerAliveInterval=15 -o ServerAliveCountMax=6"
_PASSED_ON = ("PATH", "HOME", "USER", "TMPDIR", "TZ", "TERM")
_EVENTS: dict[str, Literal["started", "ok", "changed", "skipped", "failed", "unreachable"]] = {
    "runner_on_start": "started",
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The start or end of one task on one node. `detail` is the node's message or its changes.

    `seconds` is how long the task took; 0 at its start.
    """

    node: str
    task: str
    state: Literal["started", "ok", "changed", "skipped", "failed", "unreachable"]
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionResult:
    """Result of a playbook, by name of the node. `changed` counts the tasks that changed it, `changes` says what."""

    changed: Mapping[str, int]
    ok: tuple[str, ...]
    failed: tuple[str, ...]
    unreachable: tuple[str, ...]
    changes: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, tuple[str, ...]]
    """Notes of each node's programs for the user: what was left out, what still has to be done by hand."""
    results: Mapping[str, Mapping[str, Any]]
    """The last result of each node's programs."""
    seconds: float


OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A running lab as Ansible needs it.

    `runtime_inventory` has the addresses of a soft lab's VMs; a rack's addresses are in its own inventory. `artifacts`
    is a folder for ansible-runner's files: it keeps the last runs and contains no secrets. `control` is a folder for
    SSH's sockets, whose path must be short (unix(7)).
    """

    inventory: Inventory
    runtime_inventory: Path | None
    artifacts: Path
    control: Path


def bring_up(lab: Lab, progress: Callable[[str], None]) -> None:
    """Provision and verify a lab, and report progress. It raises what `provision` raises."""
    site = site_of(lab)
    machines = len(site.inventory.machines)

    def report(event: Event) -> None:
        if event.state not in {"started", "skipped"}:
            progress(f"{event.node}: {event.task}: {event.state}")

    with _connections(site):
        done = _run(_PROVISION, site, report)
        progress(
            f"provisioned {machines} machines, {sum(map(len, done.changes.values()))} changes, {done.seconds:.0f} s"
        )
        proof = _run(_verify_play(), site, report)
    pairs = sum(int(result.get("pairs", 0)) for result in proof.results.values())
    sessions = sum(int(result.get("sessions", 0)) for result in proof.results.values())
    progress(f"verified: {sessions} BGP session ends, {pairs} RDMA pings, {proof.seconds:.0f} s")


def site_of(lab: Lab) -> Site:
    """Return the site of an open lab, and create the folders that it needs."""
    short = short_dir(lab.state_dir)
    for folder in (lab.state_dir, short.parent, short):  # a rack lab may not have them yet
        private_dir(folder)
    return Site(
        inventory=lab.inventory_model,
        runtime_inventory=backend_of(lab.kind).ansible_addresses(lab.state_dir),
        artifacts=lab.state_dir / "artifacts",
        control=short / "ssh",
    )


def roles_of(name: str) -> tuple[str, ...]:
    """Return the roles of a playbook, in its order. In `rack`, each role has its name as its tag."""
    text = (playbooks() / f"{name}.yml").read_text(encoding="utf-8")
    return tuple(re.findall(r"- role: (\w+)", text))


def provision(site: Site, on_event: OnEvent | None = None) -> ProvisionResult:
    """Configure every machine of a lab as its inventory says. A second run changes nothing.

    Args:
        site: the lab.
        on_event: called in this thread for every task that starts or ends on a node.

    Raises:
        LabError: a task failed or a node did not answer; the message has node, task and the node's message.
        KeyboardInterrupt: the user pressed Ctrl-C; Ansible has been stopped.
        SystemExit: SIGTERM or SIGHUP came, and the process has no handler for it. If it has one, that is called
            instead. Ansible has been stopped.
    """
    with _connections(site):
        return _run(_PROVISION, site, on_event)


def verify(site: Site, on_event: OnEvent | None = None) -> ProvisionResult:
    """Check the links, MTUs, GIDs, BGP sessions and ECMP width of a lab, and ping between every pair of RNICs by RDMA.

    Arguments and exceptions are those of `provision`.
    """
    with _connections(site):
        return _run(_verify_play(), site, on_event)


def play(
    site: Site,
    name: str,
    *,
    extra: Mapping[str, Any] | None = None,
    check: bool = False,
    tags: Sequence[str] = (),
    machines: Sequence[str] = (),
    on_event: OnEvent | None = None,
) -> ProvisionResult:
    """Run another playbook (`rack`, `rack-teardown`).

    Args:
        site: the lab.
        name: the playbook, without `.yml`.
        extra: variables that override all others.
        check: only report what would be changed.
        tags: only these roles; without any, all.
        machines: only these machines; without any, all.
        on_event: as in `provision`.

    It raises what `provision` raises.
    """
    with _connections(site):
        play = _Play(
            name=name,
            timeout_s=RACK_DEADLINE_S,
            extra=extra or {},
            check=check,
            tags=tuple(tags),
            machines=tuple(machines),
        )
        return _run(play, site, on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Play:
    name: str
    timeout_s: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False
    tags: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()

    @property
    def options(self) -> str | None:
        """More arguments for ansible-playbook: options, and names from the inventory, which need no quoting."""
        words = ["--check"] if self.check else []
        words += ["--tags", ",".join(self.tags)] if self.tags else []
        words += ["--limit", ",".join(self.machines)] if self.machines else []
        return " ".join(words) or None


_RACK_ONLY = frozenset(
    {
        "faultbed_configdb",
        "faultbed_dcb",
        "faultbed_fabric_bgp",
        "faultbed_saved",
        "faultbed_sonic",
        "faultbed_switch_health",
    }
)
"""Shared modules that only roles of rack labs use."""

_ROLE_CHECK = "ansible.builtin.validate_argument_spec"
"""Ansible's own check of a role's variables, which runs on the controller and reaches no machine."""

_PROVISION = _Play(name="provision", timeout_s=600)


def files_of_soft_labs(folder: Path) -> list[Path]:
    """Return the files that provision a soft lab, sorted: two plays, their roles, plugins and shared modules."""
    plays = [folder / "provision.yml", folder / "verify.yml"]
    roles = {name for play in plays for name in re.findall(r"- role: (\w+)", play.read_text(encoding="utf-8"))}
    files = [*plays, folder / "ansible.cfg"]
    for part in ("action_plugins", "filter_plugins", "module_utils", *(f"roles/{role}" for role in roles)):
        files += [path for path in (folder / part).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return sorted(path for path in files if path.stem not in _RACK_ONLY)


def _verify_play() -> _Play:
    """Return the verify play. Its `faultbed_verify_run` is new each time: a ping ignores datagrams of other runs."""
    extra = {"faultbed_verify_run": secrets.token_hex(8), "faultbed_verify_deadline_s": VERIFY_DEADLINE_S}
    return _Play(name="verify", timeout_s=240, extra=extra)


@dataclass(kw_only=True)
class _Progress:
    """The results that the events of a play have reported so far; `reached`: a task has run on a machine."""

    on_event: OnEvent
    changes: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Event] = field(default_factory=list)
    reached: bool = False

    def take(self, raw: Mapping[str, Any]) -> bool:
        """Handle one event of ansible-runner; return True, so that it is kept on disk too."""
        state = _EVENTS.get(str(raw.get("event")))
        if state is None:
            return True
        data = raw["event_data"]
        if data.get("task_action") == _ROLE_CHECK and state != "failed":
            return True
        result = data.get("res") or {}
        changes = [str(change) for change in result.get("changes") or ()]
        node = str(data["host"])
        if state == "ok":
            self.results[node] = result
            self.changes.setdefault(node, []).extend(changes)
            self.notes.setdefault(node, []).extend(str(note) for note in result.get("notes") or ())
            state = "changed" if result.get("changed") else "ok"
        event = Event(
            node=node,
            task=str(data.get("task", "")).strip(),
            state=state,
            detail=str(result.get("msg") or "; ".join(changes)).strip(),
            seconds=float(data.get("duration") or 0.0),
        )
        self.reached |= state in {"ok", "changed", "failed"}
        if state in {"failed", "unreachable"} and not data.get("ignore_errors"):
            self.problems.append(event)
        self.on_event(event)
        return True


def _run(play: _Play, site: Site, on_event: OnEvent | None) -> ProvisionResult:
    started = time.monotonic()
    folder = _run_folder(site.artifacts, play.name)
    progress = _Progress(on_event=on_event or (lambda _event: None))
    environment = _environment(site)
    with _interruptible() as interrupted:
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(playbooks()),
            playbook=str(playbooks() / f"{play.name}.yml"),
            inventory=[str(path.resolve()) for path in (site.inventory.path, site.runtime_inventory) if path],
            extravars={
                "faultbed_node_code": _node_code(folder),
                "faultbed_shapes": rates.plain_shapes(site.inventory.shapes),
                "faultbed_ecmp_hash_seeds": {
                    switch.name: site.inventory.hash_seed(switch.name) for switch in site.inventory.topology.switches
                },
                **play.extra,
            },
            envvars=environment,
            cmdline=play.options,
            settings={"pexpect_timeout": 1, "suppress_ansible_output": True},
            quiet=True,
            ident="run",
            timeout=play.timeout_s,
            event_handler=progress.take,
            cancel_callback=lambda: bool(interrupted),
        )
        # ansible-runner would pass on the whole environment and write it to a file.
        runner.config.env = {
            name: value for name, value in runner.config.env.items() if _is_passed_on(name, environment)
        }
        try:
            status, _ = runner.run()
        finally:
            _end_processes_of(folder)
    for number in interrupted:
        _handle(number)
    if status != "successful":
        raise _failure(play, status, progress, folder)
    stats = runner.stats or {}
    return ProvisionResult(
        changed={name: int(count) for name, count in stats.get("changed", {}).items()},
        ok=tuple(sorted(stats.get("ok", {}))),
        failed=tuple(sorted(stats.get("failures", {}))),
        unreachable=tuple(sorted(stats.get("dark", {}))),
        changes={name: tuple(changes) for name, changes in progress.changes.items() if changes},
        notes={name: tuple(notes) for name, notes in progress.notes.items() if notes},
        results=progress.results,
        seconds=time.monotonic() - started,
    )


def _run_folder(artifacts: Path, name: str) -> Path:
    """Create a folder for one run; only the last few folders of this playbook are kept."""
    artifacts.mkdir(mode=0o700, parents=True, exist_ok=True)
    older = sorted(artifacts.glob(f"{name}-[0-9]*"), key=lambda path: path.stat().st_mtime)
    for old in older[: 1 - _KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    folder = artifacts / f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700)
    return folder


def _node_code(folder: Path) -> dict[str, str]:
    """Write the node code to a file, which Ansible sends."""
    code = node_archive.archive()
    path = folder / "node-code.tar"
    path.write_bytes(code.content)
    return {
        "name": code.digest,
        "archive": str(path),
        "archive_sha256": hashlib.sha256(code.content).hexdigest(),
    }


def _environment(site: Site) -> dict[str, str]:
    """Return the settings of Ansible that depend on the lab or this machine; playbooks/ansible.cfg has all others."""
    return {
        # Ansible's programs are beside our Python, whether or not its environment is activated.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "ANSIBLE_CONFIG": str(playbooks() / "ansible.cfg"),
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_FORKS": str(len(site.inventory.machines)),
        "ANSIBLE_LOCAL_TEMP": str(site.artifacts / "tmp"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(site.control),
        "ANSIBLE_SSH_ARGS": _SSH_ARGS,
        "ANSIBLE_SSH_RETRIES": "2",
        "ANSIBLE_TIMEOUT": "60",
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",  # Ansible refuses every other encoding, such as that of cron and of LC_ALL=C
    }


def _is_passed_on(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether Ansible gets a variable: from `_environment`, ansible-runner or `_PASSED_ON`."""
    return name in environment or name in _PASSED_ON or name not in os.environ


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and SIGHUP while Ansible runs, so that ansible-runner can end all its processes first."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int) -> None:
    """Handle a signal that came while Ansible ran, as the process would have handled it at once.

    Raises:
        SystemExit: the process has no handler for it. The exit status is that of a process which the signal ended.
    """
    handler = signal.getsignal(number)
    if not callable(handler):
        raise SystemExit(128 + number)
    handler(number, None)


@contextmanager
def _connections(site: Site) -> Iterator[None]:
    """End Ansible's SSH master connections afterwards: a reset of a VM would leave them dead."""
    private_dir(site.control)
    try:
        yield
    finally:
        _end_processes_of(site.control)
        shutil.rmtree(site.control, ignore_errors=True)


def _end_processes_of(folder: Path) -> None:
    """End the processes of Ansible and SSH that have this folder of ours on their command line.

    Ansible's workers and SSH's masters lead sessions of their own, so that ending Ansible does not end them. Other
    programs with the folder on their command line, such as an editor, are the user's and get no signal.
    """
    ending = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                handle = os.pidfd_open(int(entry.name))
                # Read after the handle exists: from then on the pid cannot be reused by another process.
                if _uses(entry, folder):
                    ending.append(handle)  # first, because the signal fails if the process has just ended
                    signal.pidfd_send_signal(handle, signal.SIGTERM)
                else:
                    os.close(handle)
    deadline = time.monotonic() + _END_DEADLINE_S
    for handle in ending:
        if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _uses(entry: Path, folder: Path) -> bool:
    try:
        argv = (entry / "cmdline").read_bytes()
        programs = {(entry / "exe").readlink().name, *(Path(os.fsdecode(word)).name for word in argv.split(b"\0")[:2])}
    except OSError:
        return False
    return bytes(folder) in argv and not programs.isdisjoint(("ssh", "ansible-playbook"))


def _failure(play: _Play, status: str, progress: _Progress, folder: Path) -> LabError:
    kind = HalfProvisioned if progress.reached and not play.check else LabError
    output_hint = f"Ansible's output is in {folder / 'artifacts' / 'run' / 'stdout'}"
    if progress.problems:
        problems = "; ".join(
            f"{event.node}: {event.task}: {event.detail or event.state}" for event in progress.problems
        )
        return kind(f"{play.name}: {problems}. {output_hint}")
    if status == "timeout":
        return kind(f"{play.name} did not end within {play.timeout_s} s. {output_hint}")
    return kind(f"{play.name}: Ansible ended as {status}: {_last_lines(folder)}. {output_hint}")


def _last_lines(folder: Path) -> str:
    path = folder / "artifacts" / "run" / "stdout"
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    return json.dumps(" | ".join(lines[-3:]))
