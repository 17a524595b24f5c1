"""Collectives of the engine against Open MPI's on the same VMs, right after each other. Only the ratio means anything.

Open MPI is not part of the guest image. apt downloads its packages to this machine, from the mirror and suite of that
image, and the bench unpacks them on the nodes. mpirun reaches the other hosts over the front end with an SSH key of its
own; a reset of the lab removes packages and key. The ranks communicate over the back end.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import CommandFailed, LabError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import Engines, TrafficLab
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec

__all__ = ["COLLECTIVES", "SIZES", "TRANSPORTS", "MpiRow", "against_open_mpi", "fetch", "install"]

PACKAGES = (
    "libevent-core-2.1-7t64",
    "libevent-pthreads-2.1-7t64",
    "libfabric1",
    "libhwloc15",
    "libmunge2",
    "libnuma1",
    "libopenmpi40",
    "libpmix2t64",
    "libpsm2-2",
    "librdmacm1t64",
    "libucx0",
    "openmpi-bin",
    "openmpi-common",
    "python3-mpi4py",
)
COLLECTIVES = ("all-reduce", "all-to-all")
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
ITERATIONS = {size: 15 for size in SIZES if size <= 1 << 18}
"""Timed operations by size. Times of small sizes vary more; other sizes have `LARGE_ITERATIONS`."""
LARGE_ITERATIONS = 5
TRANSPORTS = {
    "tcp": ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "{netdev}"],
    "ucx": ["--mca", "pml", "ucx", "-x", "UCX_NET_DEVICES={rnic}:1", "-x", "UCX_TLS=rc_v,self"],
}
"""Options of mpirun by transport. `{netdev}` and `{rnic}` are those of the first host; all hosts use the same names."""

WARM_UP = 2
"""Number of warm-up operations, the same as in `mpi_program`."""

PATIENT = QpParams(timeout=18)
KEY = "/root/.ssh/faultbed_bench"
PROGRAM = "/tmp/faultbed_mpi_program.py"  # noqa: S108  # on the node; a reset removes it
MPI_TIMEOUT_S = 200.0
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
UNPACK = """
set -e
mkdir -p /tmp/debs; cd /tmp/debs; tar xf ../debs.tar
for package in *.deb; do dpkg-deb -x "$package" /; done
ldconfig; rm -r /tmp/debs /tmp/debs.tar
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRow:
    """Times of one collective at one size, and the ratio of their medians (above 1: the engine is faster)."""

    collective: str
    size_bytes: int
    transport: str
    algorithm: str
    ours_ns: tuple[int, ...]
    mpi_ns: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Open MPI's median time over the engine's."""
        return _median(self.mpi_ns) / _median(self.ours_ns)

    @property
    def times(self) -> str:
        """Medians in ms, with the quartiles, of Open MPI and of the engine."""
        return f"{_quartiles(self.mpi_ns)} / {_quartiles(self.ours_ns)} ms, n={len(self.ours_ns)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {**asdict(self), "ratio": self.ratio}


def _median(times_ns: Sequence[int]) -> float:
    return traffic_metrics.percentile(times_ns, 50)


def _quartiles(times_ns: Sequence[int]) -> str:
    low, middle, high = (traffic_metrics.percentile(times_ns, percent) / 1e6 for percent in (25, 50, 75))
    return f"{middle:.1f} ({low:.1f}..{high:.1f})"


def fetch(folder: Path, *, mirror: str, suite: str) -> tuple[Path, ...]:
    """Return the files of the packages in a folder; download those that are missing with apt.

    Raises:
        LabError: there is no apt, or the mirror does not have them.
    """
    present = tuple(sorted(folder.glob("*.deb")))
    if len(present) == len(PACKAGES):
        return present
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources, status = folder / "sources.list", folder / "status"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n")
    status.touch()
    options = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State": folder / "state",
        "Dir::State::status": status,
        "Dir::Cache": folder / "cache",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    try:
        for command in (["update"], ["download", *PACKAGES]):
            subprocess.run([*apt, *command], check=True, cwd=folder, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise LabError(f"Open MPI's packages ({suite}) could not be fetched: {message.strip()[-300:]}") from error
    return tuple(sorted(folder.glob("*.deb")))


def install(lab: TrafficLab, hosts: Sequence[str], debs: Sequence[Path]) -> None:
    """Unpack the packages on the hosts, and allow the first host to reach the others by SSH.

    Raises:
        LabError: a command failed; a reset removes what was installed.
    """
    bundle = io.BytesIO()
    with tarfile.open(fileobj=bundle, mode="w") as archive:
        for deb in debs:
            archive.add(deb, arcname=deb.name)
    first = lab.node(hosts[0])
    first.run(["sh", "-c", f"mkdir -p -m 700 /root/.ssh; [ -f {KEY} ] || ssh-keygen -q -t ed25519 -N '' -f {KEY}"])
    public = first.run(["cat", f"{KEY}.pub"]).stdout
    program = (Path(__file__).with_name("mpi_program.py")).read_bytes()
    # PRRTE finds no slots on hosts that are named by an address.
    names = "".join(f"{lab.topology.host_by_name[host].front_end_ip} {host}\n" for host in hosts)
    for host in hosts:
        node = lab.node(host)
        node.put(bundle.getvalue(), "/tmp/debs.tar")  # noqa: S108
        node.put(program, PROGRAM)
        node.run(["sh", "-c", UNPACK], timeout_s=120.0)
        node.run(["sh", "-c", "mkdir -p -m 700 /root/.ssh; cat >> /root/.ssh/authorized_keys"], stdin=public)
        node.run(["sh", "-c", "cat >> /etc/hosts"], stdin=names)


def against_open_mpi(
    lab: TrafficLab,
    hosts: Sequence[str],
    *,
    transport: str,
    sizes: Sequence[int] = SIZES,
    progress: Progress = lambda _: None,
) -> tuple[MpiRow, ...]:
    """Measure each collective at each size: first all with Open MPI over one transport, then all with the engine.

    Raises:
        LabError: Open MPI does not run over this transport here, or one of the two gave a wrong result.
    """
    mpi_times_ns = _open_mpi(lab, hosts, transport, sizes)
    rows = []
    with Engines.start(lab, hosts) as engines:
        for name in COLLECTIVES:
            for size in sizes:
                spec = CollectiveSpec(
                    collective=name,
                    size_bytes=size,
                    iterations=ITERATIONS.get(size, LARGE_ITERATIONS),
                    warmup=WARM_UP,
                    ranks=tuple(_first_rnic(lab.topology, host)[0] for host in hosts),
                    qp=PATIENT,
                )
                with collective.start(lab, spec, engines=engines) as running:
                    result = running.wait(300.0)
                if result.outcome != "completed" or result.wrong_elements:
                    raise LabError(f"bench: {name} of {size} bytes ended as {result.outcome} ({result.where})")
                row = MpiRow(
                    collective=name,
                    size_bytes=size,
                    transport=transport,
                    algorithm=result.algorithm,
                    ours_ns=traffic_metrics.operation_times_ns(result.iterations),
                    mpi_ns=tuple(mpi_times_ns[name, size]),
                )
                progress(f"{name} of {size} B: Open MPI / the engine {row.times}")
                rows.append(row)
    return tuple(rows)


def _first_rnic(topology: Topology, host: str) -> tuple[str, str, str]:
    """Return the full name, RDMA device and network device of a host's first RNIC."""
    rnic = topology.host_by_name[host].rnics[0]
    return f"{host}:{rnic.name}", rnic.name, rnic.netdev


def _open_mpi(
    lab: TrafficLab, hosts: Sequence[str], transport: str, sizes: Sequence[int]
) -> dict[tuple[str, int], list[int]]:
    """Return Open MPI's times in ns by collective and size."""
    _, rnic, netdev = _first_rnic(lab.topology, hosts[0])
    counts = [(size, ITERATIONS.get(size, LARGE_ITERATIONS)) for size in sizes]
    request = json.dumps({"collectives": COLLECTIVES, "sizes": counts})
    ssh = f"-i {KEY} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    command = ["timeout", f"{MPI_TIMEOUT_S:.0f}", "mpirun.openmpi", "--allow-run-as-root", "-np", str(len(hosts))]
    command += ["--host", ",".join(f"{host}:1" for host in hosts), "--prtemca", "plm_ssh_args", ssh]
    # The management interfaces of all soft hosts have the same address, so daemons must not use it.
    front_end = lab.topology.host_by_name[hosts[0]].front_end_netdev
    for name in ("prte_if_include", "oob_tcp_if_include"):
        command += ["--prtemca", name, front_end]
    command += [part.format(rnic=rnic, netdev=netdev) for part in TRANSPORTS[transport]]
    command += ["python3", PROGRAM, request]
    try:
        output = lab.node(hosts[0]).run(command, timeout_s=MPI_TIMEOUT_S + 20).stdout
    except CommandFailed as error:
        raise LabError(f"Open MPI over {transport} does not run here: {error}") from error
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if wrong := [row for row in rows if not row["right"]]:
        raise LabError(f"Open MPI over {transport} gave a wrong result: {wrong[0]['collective']}")
    return {(row["collective"], row["size_bytes"]): row["times_ns"] for row in rows}
