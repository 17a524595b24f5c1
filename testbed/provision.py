"""Provision a lab, and prove it: our playbooks through ansible-runner.

Ansible gets two inventories, the lab's and the running lab's (where each machine answers), and an environment that
holds nothing of the person's but PATH, HOME and the locale, because ansible-runner writes its environment to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ansible_runner

from testbed import nodecode
from testbed.errors import LabError
from testbed.inventory import Inventory
from testbed.shipped import playbooks

__all__ = ["Event", "ProvisionResult", "provision", "verify"]

PROVISION_TIMEOUT_S = 600
VERIFY_TIMEOUT_S = 240
VERIFY_DEADLINE_S = 60
"""How long, within the verify play, BGP may take to converge and pings may take to be answered."""

_KEPT_RUNS = 5
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "TERM")
_EVENTS: dict[str, Literal["started", "ok", "changed", "skipped", "failed", "unreachable"]] = {
    "runner_on_start": "started",
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task on one node, begun or ended. `detail` is the node's message, or what was changed."""

    node: str
    task: str
    state: Literal["started", "ok", "changed", "skipped", "failed", "unreachable"]
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionResult:
    """How a playbook went. Nodes by name; `changes` says in words what was changed on each."""

    changed: Mapping[str, int]
    ok: tuple[str, ...]
    failed: tuple[str, ...]
    unreachable: tuple[str, ...]
    changes: Mapping[str, tuple[str, ...]]
    results: Mapping[str, Mapping[str, Any]]
    """The last result of each node, as its program gave it."""
    seconds: float


OnEvent = Callable[[Event], None]


def provision(
    inventory: Inventory, runtime_inventory: Path, artifacts: Path, on_event: OnEvent | None = None
) -> ProvisionResult:
    """Bring every machine of a lab to what its inventory says. A second run changes nothing.

    Args:
        inventory: the lab.
        runtime_inventory: the Ansible inventory that says where each machine answers.
        artifacts: a folder for ansible-runner's files; the last runs are kept. It holds no secrets.
        on_event: told of every task that starts or ends on a node; called in this thread.

    Raises:
        LabError: a task failed or a node did not answer; the message has node, task and the node's own words.
        KeyboardInterrupt: Ctrl-C, after Ansible has been ended.
    """
    return _run("provision.yml", inventory, runtime_inventory, artifacts, on_event, {}, PROVISION_TIMEOUT_S)


def verify(
    inventory: Inventory, runtime_inventory: Path, artifacts: Path, on_event: OnEvent | None = None
) -> ProvisionResult:
    """Prove a lab: links, MTUs, GIDs, BGP sessions, ECMP width, and an RDMA ping on every pair of RNICs.

    Arguments and errors are those of `provision`.
    """
    extra = {
        "faultbed_verify_run": secrets.token_hex(8),
        "faultbed_verify_deadline_s": VERIFY_DEADLINE_S,
    }
    return _run("verify.yml", inventory, runtime_inventory, artifacts, on_event, extra, VERIFY_TIMEOUT_S)


@dataclass(kw_only=True)
class _Seen:
    """What the events of a run have told so far."""

    on_event: OnEvent
    changes: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Event] = field(default_factory=list)

    def take(self, raw: Mapping[str, Any]) -> bool:
        """Handle one event of ansible-runner; it is kept on disk too."""
        state = _EVENTS.get(str(raw.get("event")))
        if state is None:
            return True
        data = raw["event_data"]
        result = data.get("res") or {}
        changes = [str(change) for change in result.get("changes") or ()]
        node = str(data["host"])
        if state == "ok":
            self.results[node] = result
            self.changes.setdefault(node, []).extend(changes)
            state = "changed" if result.get("changed") else "ok"
        event = Event(
            node=node,
            task=str(data.get("task", "")).strip(),
            state=state,
            detail=str(result.get("msg") or "; ".join(changes)).strip(),
            seconds=float(data.get("duration") or 0.0),
        )
        if state in {"failed", "unreachable"} and not data.get("ignore_errors"):
            self.problems.append(event)
        self.on_event(event)
        return True


def _run(
    playbook: str,
    inventory: Inventory,
    runtime_inventory: Path,
    artifacts: Path,
    on_event: OnEvent | None,
    extra: Mapping[str, Any],
    timeout_s: int,
) -> ProvisionResult:
    started = time.monotonic()
    folder = _run_folder(artifacts, Path(playbook).stem)
    seen = _Seen(on_event=on_event or (lambda _event: None))
    environment = _environment(artifacts, forks=len(inventory.machines))
    with _interruptible() as interrupted:
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(playbooks()),
            playbook=str(playbooks() / playbook),
            inventory=[str(inventory.path.resolve()), str(runtime_inventory.resolve())],
            extravars={"faultbed_node_code": _node_code(folder), **extra},
            envvars=environment,
            settings={"pexpect_timeout": 1, "suppress_ansible_output": True},
            quiet=True,
            ident="run",
            timeout=timeout_s,
            event_handler=seen.take,
            cancel_callback=interrupted.is_set,
        )
        # ansible-runner starts from our whole environment and writes it to a file.
        runner.config.env = {
            name: value for name, value in runner.config.env.items() if _is_ours(name, environment)
        }
        status, _ = runner.run()
    if interrupted.is_set():
        raise KeyboardInterrupt
    seconds = time.monotonic() - started
    if status != "successful":
        raise _failure(playbook, status, seen.problems, folder, timeout_s)
    stats = runner.stats or {}
    return ProvisionResult(
        changed={name: int(count) for name, count in stats.get("changed", {}).items()},
        ok=tuple(sorted(stats.get("ok", {}))),
        failed=tuple(sorted(stats.get("failures", {}))),
        unreachable=tuple(sorted(stats.get("dark", {}))),
        changes={name: tuple(changes) for name, changes in seen.changes.items() if changes},
        results=seen.results,
        seconds=seconds,
    )


def _run_folder(artifacts: Path, name: str) -> Path:
    """A new folder for one run; of the older ones of this kind the last few stay."""
    artifacts.mkdir(mode=0o700, parents=True, exist_ok=True)
    older = sorted(artifacts.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
    for old in older[: 1 - _KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    folder = artifacts / f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700)
    return folder


def _node_code(folder: Path) -> dict[str, str]:
    """The node code as a file for Ansible to send."""
    code = nodecode.archive()
    path = folder / "node-code.tar"
    path.write_bytes(code.content)
    return {
        "name": code.digest,
        "archive": str(path),
        "archive_sha256": hashlib.sha256(code.content).hexdigest(),
    }


def _environment(artifacts: Path, *, forks: int) -> dict[str, str]:
    """Settings of Ansible that depend on the lab or the machine; the fixed ones are in playbooks/ansible.cfg."""
    return {
        # Ansible's programs are beside our Python, whether or not its environment is activated.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "ANSIBLE_CONFIG": str(playbooks() / "ansible.cfg"),
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_FORKS": str(max(5, forks)),
        "ANSIBLE_LOCAL_TEMP": str(artifacts / "tmp"),
        "ANSIBLE_SSH_RETRIES": "2",
        "ANSIBLE_TIMEOUT": "60",
        "ANSIBLE_NOCOLOR": "1",
    }


def _is_ours(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable is passed on: ours, the runner's own, or one of the few of the person's."""
    return name in environment or name in _PASSED_ON or name not in os.environ


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event while Ansible runs: ansible-runner then ends all its processes."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda _number, _frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _failure(playbook: str, status: str, problems: list[Event], folder: Path, timeout_s: int) -> LabError:
    where = f"Ansible's output is in {folder / 'artifacts' / 'run' / 'stdout'}"
    if problems:
        told = "; ".join(f"{event.node}: {event.task}: {event.detail or event.state}" for event in problems)
        return LabError(f"{playbook}: {told}. {where}")
    if status == "timeout":
        return LabError(f"{playbook} did not end within {timeout_s} s. {where}")
    return LabError(f"{playbook}: Ansible ended as {status}: {_last_lines(folder)}. {where}")


def _last_lines(folder: Path) -> str:
    path = folder / "artifacts" / "run" / "stdout"
    lines = (
        [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if path.exists()
        else []
    )
    return json.dumps(" | ".join(lines[-3:]))
