"""Workers as jobs of Slurm. dask-jobqueue writes the job script, so its settings (`jobqueue.slurm.*`) hold, too."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import dask
from dask_jobqueue.slurm import SLURMJob

from faultbed.harness.run.workers.worker_pool import LOOPBACK, Ended
from faultbed.harness.run.workers.worker_process import Channel
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.stopping import Deadline

__all__ = ["SlurmWorkers"]

_ANSWER_S = 60.0
_LOOK_S = 2.0
"""How often the state of a job is read: a scheduler of a large cluster has other work."""
_CPUS, _MEMORY = 4, "8GiB"
"""What a job reserves where Dask's configuration has nothing else: a soft lab with its worker."""
_ENDS = {"COMPLETED", "FAILED"}
_KILLS = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
_SIGNALLED = 128
_JOB = re.compile(r"JobState=(\w+).*?ExitCode=(\d+):(\d+)", re.DOTALL)


class SlurmWorkers:
    """Starts each worker as a job. See `Launcher`.

    The nodes have the same paths as this machine: of the Python that runs faultbed, of the inventory, and of `folder`.

    Args:
        partition: Slurm's partition.
        count: number of workers.
        inventory: the lab of each worker; None: tasks need none.
        folder: a folder that the nodes see, for the certificate, the workers' logs, and nothing else.
        code: digest of the sources that planned the runs.
        host: the address of this machine on which the scheduler listens.

    Raises:
        UsageError: Slurm is not installed, or refuses such a job.
    """

    def __init__(
        self, partition: str, count: int, *, inventory: Path | None, folder: Path, code: str, host: str
    ) -> None:
        self.count, self.host = count, host
        self._partition, self._inventory, self._folder, self._code = partition, inventory, folder, code
        if shutil.which("sbatch") is None:
            raise UsageError(
                f"--on slurm:{partition}: there is no sbatch on this machine; run the command on a login node of the "
                "cluster, or use --shard"
            )
        nodes = set(_slurm("sinfo", "-h", "-N", "-p", partition, "-o", "%o").stdout.split())
        if host == LOOPBACK and not nodes <= {LOOPBACK, "localhost"}:
            raise UsageError(
                f"--on slurm:{partition}: its nodes cannot reach a scheduler on {LOOPBACK}; add --interface NAME, the "
                "network interface of this machine that they reach"
            )
        trial = self._job(0, Channel(address=f"tls://{host}:1", certificate="", key=""))
        with trial.job_file() as script:
            done = _slurm("sbatch", "--test-only", str(script))
        if done.returncode:
            raise UsageError(f"--on slurm:{partition}: Slurm refuses such a job: {_last_line(done.stderr)}")

    def start(self, number: int, channel: Channel) -> SlurmJobWorker:
        """Submit a job.

        Raises:
            LabError: Slurm does not take it.
        """
        job = self._job(number, self._channel_in_files(channel))
        try:
            asyncio.run(job.start())
        except (RuntimeError, ValueError, OSError) as error:
            raise LabError(f"slurm:{self._partition}: no job for worker {number}: {_last_line(str(error))}") from error
        return SlurmJobWorker(number=job.job_id, log=self._folder / f"{job.job_name}-{job.job_id}.err")

    def _channel_in_files(self, channel: Channel) -> Channel:
        """Return a channel with the paths of its certificate and its key, which only this user can read."""
        paths = {}
        for name in ("certificate", "key"):
            path = self._folder / f"{name}.pem"
            path.touch(mode=0o600)
            path.write_text(getattr(channel, name))
            paths[name] = str(path)
        return Channel(address=channel.address, **paths)

    def _job(self, number: int, channel: Channel) -> SLURMJob:
        lab = ["--no-lab"] if self._inventory is None else []
        words = ["--lab", str(self._inventory)] if self._inventory is not None else []
        settings = dask.config.get("jobqueue.slurm", {})
        return SLURMJob(
            scheduler=channel.address, name=str(number), queue=self._partition, cores=1, processes=1,
            memory=settings.get("memory") or _MEMORY, job_cpu=settings.get("job-cpu") or _CPUS,
            job_name=settings.get("name") if settings.get("name") != "dask-worker" else "faultbed",
            security=channel.security(), log_directory=str(self._folder), python=shlex.quote(sys.executable),
            worker_command=shlex.join(["faultbed.harness.console", *words, "worker"]),
            worker_extra_args=[*lab, "--code", self._code, "--shared", shlex.quote(str(self._folder.parent))],
        )  # fmt: skip


@dataclass(kw_only=True)
class SlurmJobWorker:
    """A worker that is a job. See `StartedWorker`."""

    number: str
    log: Path
    _ended: Ended | None = None
    _looked_s: float = 0.0

    def ended(self) -> Ended | None:
        """Return how it ended; None: it waits or works."""
        if self._ended is None and time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            self._ended = _state(self.number, self.log)
        return self._ended

    def request_end(self) -> None:
        """Cancel the job: Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        with contextlib.suppress(LabError):
            _slurm("scancel", self.number)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the job. What it leaves on its node, Slurm ends with it."""
        deadline = Deadline(timeout_s)
        with contextlib.suppress(LabError):
            while _state(self.number, self.log) is None and not deadline.is_over:
                threading.Event().wait(deadline.step_s)


def _state(number: str, log: Path) -> Ended | None:
    """Return how a job ended; None: it waits or runs.

    Raises:
        LabError: Slurm does not answer.
    """
    done = _slurm("scontrol", "show", "job", "--oneliner", number)
    match = _JOB.search(done.stdout)
    if match is None:
        if "Invalid job id" in done.stderr:  # Slurm forgets a job some minutes after its end
            return Ended(killed=True, code=-1, why=f"job {number} is gone")
        return None
    state, code, signal = match[1], int(match[2]), int(match[3])
    # The shell of the job's script ends with 128 + N if signal N has killed the worker.
    if state in _KILLS or (state in _ENDS and (signal or code > _SIGNALLED)):
        return Ended(killed=True, code=-1, why=f"job {number}: {state}")
    return Ended(killed=False, code=code, why=_why(log, number)) if state in _ENDS else None


def _why(log: Path, number: str) -> str:
    try:
        return _last_line(log.read_text(errors="replace"))
    except OSError:
        return f"job {number} ended; {log} is not there"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it gives no reason"


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm.

    Raises:
        LabError: it does not end.
    """
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise LabError(f"{shlex.join(words)}: {error}; look whether slurmctld runs") from error
