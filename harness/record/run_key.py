"""The key of a run: what must be equal for a finished run to count again. And publishing a run under its key.

    SHA-256 of the experiment, the plan (which has the seed and the inventory's digest), the digest of faultbed's
    sources, and the kind of machine

Labs in parallel, and jobs that are repeated after a worker has died, may make the same run twice. Each makes it in a
directory of its own; `publish` renames that to a name that follows from the key. The kernel lets one rename win
(rename(2): an existing directory that is not empty is never replaced), so a key has one run.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

from faultbed.harness.record.evidence.environment import Environment
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import UsageError
from faultbed.testbed.tenancy.durable import sync_folder

__all__ = ["key_of", "key_of_run", "machine_of", "may_publish", "publish", "published_name"]

_DIGITS = 16
"""Digits of the key in a directory's name: 64 bits. A reader computes the whole key from the files."""


def key_of(experiment: bytes, plan: bytes, *, code: str | None, machine: str) -> str:
    """Return the key of a run as 64 hexadecimal digits.

    Args:
        experiment: `experiment.toml`, as the run has it.
        plan: `plan.json`.
        code: the digest of faultbed's sources (`faultbed.harness.record.code`).
        machine: the kind of machine (`machine_of`).
    """
    sha256 = hashlib.sha256()
    for part in (experiment, plan, (code or "").encode(), machine.encode()):
        sha256.update(f"{len(part)}\n".encode())
        sha256.update(part)
    return sha256.hexdigest()


def machine_of(environment: Environment) -> str:
    """Return the kind of machine of a run in words: accelerator and number of CPUs."""
    return f"{environment.accelerator or 'no accelerator'} on {environment.cpu_count} CPUs"


def key_of_run(run: RunDir) -> str:
    """Return the key of a finished run, computed from its files, whatever its directory is called.

    Raises:
        UsageError: a file of it is missing or damaged.
    """
    environment = run.read_environment()
    plan = run.read_bytes("plan.json")
    return key_of(run.read_experiment(), plan, code=environment.code, machine=machine_of(environment))


def published_name(run: RunDir) -> str:
    """Return the name of a finished run's directory under its key.

    Raises:
        UsageError: a file of it is missing or damaged.
    """
    plan = run.read_plan()
    return f"{plan.experiment}-{plan.seed}-{key_of_run(run)[:_DIGITS]}"


def may_publish(run: RunDir) -> bool:
    """Return whether a run counts again: it is no ERROR, left the lab CLEAN, and its faults had full intensity.

    Raises:
        UsageError: a file of it is missing or damaged, or its files are of two runs.
    """
    verdict, plan = run.read_verdict(), run.read_plan()
    run.refuse_mixed(verdict, plan, run.read_run())
    return verdict.verdict is not Verdict.ERROR and verdict.lab_state == "CLEAN" and not plan.is_control


def publish(run: RunDir, folder: Path | None = None) -> RunDir:
    """Rename the directory of a finished run to its key, and return the run of that key.

    `folder` is where it is published, on the same file system; default: where it is.

    If the key has a run already, that one is returned and this one is removed. A run that does not count again keeps
    its name, and so does one whose key is taken by a directory that is damaged.

    Raises:
        UsageError: a file of the run is missing or damaged.
        OSError: the directory cannot be renamed or removed.
    """
    target = (folder or run.path.parent) / published_name(run)
    if not may_publish(run) or target == run.path:
        return run
    try:
        run.path.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        winner = RunDir(target)
        if not _has_key_of(winner, run):
            return run
        shutil.rmtree(run.path)
        return winner
    sync_folder(target.parent)
    return RunDir(target)


def _has_key_of(winner: RunDir, run: RunDir) -> bool:
    try:
        return may_publish(winner) and key_of_run(winner) == key_of_run(run)
    except (UsageError, OSError):
        return False
