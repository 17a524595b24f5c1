"""A Slurm cluster of this machine for one test: controller, two nodes and munge, each a process with its own folder.

Debian's packages slurmctld, slurmd, slurm-client and munge. No system service takes part: everything listens on
127.0.0.1 or a socket in the folder, and is ended by its process id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_READY_S = 180
_CONF = """
ClusterName=faultbed-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=60
SchedulerParameters=bf_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cpus} RealMemory={memory_mib}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs={cpus} RealMemory={memory_mib}
PartitionName=lab Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Start a cluster with the partition `lab` in a folder, and yield its slurm.conf (for SLURM_CONF)."""
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    conf = folder / "slurm.conf"
    controller, first, second = _free_ports(3)
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), folder=folder, controller=controller, first=first, second=second,
            cpus=os.cpu_count(), memory_mib=16000,
        )
    )  # fmt: skip
    environment = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    places = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *places.values()],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-N", name, "-f", str(conf)] for name in ("n1", "n2")),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            if command[0] == "munged":
                _wait((folder / "munge.sock").exists, "munged has no socket")
        _wait(lambda: _states(environment) == {"idle"}, "the nodes are not idle")
        yield conf
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _states(environment: dict[str, str]) -> set[str]:
    done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True, check=False)
    return set(done.stdout.split())


def _wait(is_there, why: str) -> None:
    end_s = time.monotonic() + _READY_S
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError(why)
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
