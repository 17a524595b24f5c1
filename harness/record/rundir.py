"""The run directory: `runs/<utc>-<name>-<seed>/`, made once, every file written whole or not at all.

experiment.toml     the file as it was given
trace/              the trace, if the experiment replays one (faultbed.harness.experiment.replayed)
plan.json           what the seed decided
evidence/<pass>/<part>.json  what each part sealed at the end of a pass (faultbed.harness.ledger.sealed); those of
                    `faultbed.harness.record.evidence` are what every run has
ledger.json         every claim of the plan with its status; on disk, unknown, before the lab is touched
journal.jsonl       what was done to the lab
samples.parquet     goodput samples, long form (faultbed.harness.record.samples_file)
telemetry.parquet   counters of every node over time (faultbed.harness.record.telemetry_file)
changes.parquet     links, routes and next hops as they changed (the same)
environment.json    versions and settings of the controller, QEMU and the guests
noise-floor.json    how much fault-free runs on the lab differ, if the judge knew it (faultbed.harness.analysis.noise)
verdict.json        the verdict (faultbed.harness.verdict)
report.html         a page with all results
repro.sh            a script that repeats the run
flights.json        the flight recorder of each rank, if the job failed (faultbed.traffic.engine.flight_recorder)
flights-requested-N.json  the same, for each request during the run (faultbed.harness.run.flight_dump)
probes.parquet      probes beside the workload, if the experiment has [probe] (faultbed.harness.record.probes_file)
packets.json        captured packets, analysed, and capture*.pcapng beside it (faultbed.harness.packets)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

import faultbed
from faultbed.harness import verdict as verdict_file
from faultbed.harness.experiment import run_plan as plan_file
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.json_text import json_text
from faultbed.harness.ledger import ledger as ledger_file
from faultbed.harness.ledger.ledger import Ledger
from faultbed.harness.ledger.sealed import PHASES, Checked, Kind, Phase, Sealed
from faultbed.harness.packets import evidence
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.record import code
from faultbed.harness.record.evidence import run_evidence
from faultbed.harness.record.evidence.environment import Environment
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import WorkloadEvidence
from faultbed.harness.record.plausible import refuse_large_numbers
from faultbed.harness.record.run_files import RUN_FILES, decoded, read_file, started_of, whole
from faultbed.harness.verdict import ExcludedHost, VerdictFile
from faultbed.testbed import shipped
from faultbed.testbed.errors import RecordError, UsageError
from faultbed.testbed.observe.telemetry import Recorded
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.results import ProbeTrips

__all__ = [
    "RunDir",
    "create",
    "describe_environment",
    "find_run_folders",
    "open_run",
    "repro_script",
    "write_flights",
    "write_pooled",
]

_STARTED = "%Y%m%dT%H%M%SZ"
"""How a directory's name begins."""
_PACKAGES = ("numpy", "msgspec", "pyarrow", "paramiko", "ansible-core", "pyroute2", "scapy")

_decode_environment = msgspec.json.Decoder(Environment).decode

T = TypeVar("T")


class RunDir:
    """Paths, writers and readers of one run directory.

    Readers raise UsageError with the file's name if the file is missing, and RecordError if its contents are not those
    that faultbed wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def journal(self) -> Path:
        """The journal, which `faultbed.inject.journal` writes."""
        return self.path / "journal.jsonl"

    @property
    def report(self) -> Path:
        """Path of `report.html`."""
        return self.path / "report.html"

    @property
    def started(self) -> datetime:
        """When the run began (UTC): by the directory's name, else by its journal, else when its verdict was written."""
        return started_of(self.path)

    def write_plan(self, plan: Plan) -> None:
        """Write `plan.json`."""
        self._write("plan.json", plan_file.encode(plan))

    def write_ledger(self, ledger: Ledger) -> None:
        """Write `ledger.json`: before the lab is touched, and again when the run is judged."""
        self._write("ledger.json", ledger_file.encode(ledger))

    def write_evidence(self, name: str, phase: Phase, evidence: msgspec.Struct) -> None:
        """Write what the part `name` sealed in a pass."""
        folder = self.path / "evidence" / phase
        folder.mkdir(parents=True, exist_ok=True)
        self._write(f"evidence/{phase}/{name}.json", msgspec.json.encode(evidence) + b"\n")

    def read_evidence(self, kinds: Mapping[str, Kind]) -> Sealed:
        """Read the evidence of all parts, by the types of `kinds`; of a file that does not exist nothing is known."""
        return Sealed(
            {
                (phase, kind): self._decoded(name, _evidence_reader(kind))
                for part, kind in kinds.items()
                for phase in PHASES
                if (self.path / (name := f"evidence/{phase}/{part}.json")).exists()
            }
        )

    def read_run(self) -> RunEvidence:
        """Read what the run recorded: the evidence of the parts that every run has."""
        sealed = self.read_evidence(run_evidence.OF_RUNS)
        try:
            return run_evidence.assembled(sealed)
        except KeyError as error:
            path = self.path / "evidence" / "measured" / f"{error.args[0]}.json"
            raise UsageError(f"{path}: no such file; only the directory of a finished run has it") from error

    def write_samples(self, work: WorkloadEvidence) -> None:
        """Write `samples.parquet`."""
        # pyarrow takes a third of a second to import, and most commands write no samples.
        from faultbed.harness.record import samples_file  # noqa: PLC0415

        with whole(self.path / "samples.parquet") as temporary:
            samples_file.write(work, temporary)

    def write_telemetry(self, recorded: Recorded, *, t0_ns: int) -> None:
        """Write `telemetry.parquet` and `changes.parquet`."""
        from faultbed.harness.record import telemetry_file  # noqa: PLC0415 (as above)

        with whole(self.path / "telemetry.parquet") as telemetry, whole(self.path / "changes.parquet") as changes:
            telemetry_file.write(recorded, t0_ns=t0_ns, telemetry=telemetry, changes=changes)

    def read_telemetry(self) -> Recorded | None:
        """Read `telemetry.parquet` and `changes.parquet`; None: this run has none."""
        telemetry, changes = self.path / "telemetry.parquet", self.path / "changes.parquet"
        if not telemetry.exists() or not changes.exists():
            return None
        from faultbed.harness.record import telemetry_file  # noqa: PLC0415 (as above)

        return telemetry_file.read(telemetry=telemetry, changes=changes)

    def write_verdict(self, verdict: VerdictFile) -> None:
        """Write `verdict.json`."""
        self._write("verdict.json", verdict_file.encode(verdict))

    def write_environment(self, environment: Environment) -> None:
        """Write `environment.json`."""
        self._write("environment.json", json_text(environment, order="sorted"))

    def write_noise_floor(self, content: bytes) -> None:
        """Write `noise-floor.json`: a floor that is measured again later must not change what the verdict rests on."""
        self._write("noise-floor.json", content)

    def read_noise_floor(self, decode: Callable[[bytes], T]) -> T | None:
        """Read `noise-floor.json` by `decode`; None: the judge of this run knew none."""
        return self._decoded("noise-floor.json", decode) if (self.path / "noise-floor.json").exists() else None

    def write_packets(self, packets: Evidence) -> None:
        """Write `packets.json`."""
        self._write("packets.json", evidence.write(packets))

    def write_flights(self, flights: Sequence[Flight]) -> None:
        """Write `flights.json`."""
        write_flights(self.path / "flights.json", flights)

    def read_flights(self) -> tuple[Flight, ...]:
        """Read `flights.json`; nothing: no job of this run failed."""
        if not (self.path / "flights.json").exists():
            return ()
        return self._decoded("flights.json", msgspec.json.Decoder(tuple[Flight, ...]).decode)

    def write_probes(self, probes: ProbeTrips, *, t0_ns: int) -> None:
        """Write `probes.parquet`."""
        from faultbed.harness.record import probes_file  # noqa: PLC0415 (as above)

        with whole(self.path / "probes.parquet") as temporary:
            probes_file.write(probes, temporary, t0_ns=t0_ns)

    def read_probes(self) -> ProbeTrips:
        """Read `probes.parquet`; a run without that file has no trips."""
        if not (self.path / "probes.parquet").exists():
            return ProbeTrips()
        from faultbed.harness.record import probes_file  # noqa: PLC0415 (as above)

        return probes_file.read(self.path / "probes.parquet")

    def read_packets(self) -> Evidence | None:
        """Read `packets.json`; None: this run captured nothing."""
        return self._decoded("packets.json", evidence.read) if (self.path / "packets.json").exists() else None

    def read_experiment(self) -> bytes:
        """Return the experiment file as it was given."""
        return self._read("experiment.toml")

    def read_plan(self) -> Plan:
        """Read `plan.json`."""
        return self._decoded("plan.json", plan_file.decode)

    def read_plan_by(self, decode: Callable[[bytes], T]) -> T:
        """Read `plan.json` by `decode`, for a caller that needs a part of it from thousands of runs."""
        return self._decoded("plan.json", decode)

    def read_ledger(self) -> Ledger:
        """Read `ledger.json`. That of a run that was killed has only unknown claims."""
        return self._decoded("ledger.json", ledger_file.decode)

    def read_verdict(self) -> VerdictFile:
        """Read `verdict.json`."""
        return self._decoded("verdict.json", verdict_file.decode)

    def refuse_mixed(self, verdict: VerdictFile, plan: Plan, run: RunEvidence) -> None:
        """Refuse files of several runs in one directory.

        Raises:
            RecordError: the verdict is of another experiment, seed, lab, or other faults than the plan or the evidence.
        """
        pairs = (
            ("experiment", verdict.experiment, "plan.json", plan.experiment),
            ("seed", verdict.seed, "plan.json", plan.seed),
            ("lab", verdict.lab, "evidence/measured/lab.json", run.lab.name),
            (
                "faults",
                [fault.id for fault in verdict.faults],
                "evidence/measured/faults.json",
                [fault.plan.id for fault in run.injected.faults],
            ),
        )
        for field, judged, name, recorded in pairs:
            if judged != recorded:
                two = f"{field} {judged}, but {recorded} in {name}: they are of two runs"
                raise RecordError(f"{self.path / 'verdict.json'}: {two}; copy the run directory again")

    def read_environment(self) -> Environment:
        """Read `environment.json`."""
        return self._decoded("environment.json", _decode_environment)

    def read_bytes(self, name: str) -> bytes:
        """Return the contents of a file as they are."""
        return self._read(name)

    def _decoded(self, name: str, decode: Callable[[bytes], T]) -> T:
        return decoded(f"{self.path}/{name}", self._read(name), decode)

    def _read(self, name: str) -> bytes:
        return read_file(f"{self.path}/{name}")

    def _write(self, name: str, content: bytes, *, mode: int = 0o644) -> None:
        with whole(self.path / name) as temporary:
            temporary.write_bytes(content)
            temporary.chmod(mode)


def _evidence_reader(kind: Kind) -> Callable[[bytes], msgspec.Struct]:
    def read(content: bytes) -> msgspec.Struct:
        refuse_large_numbers(content)
        evidence = msgspec.json.decode(content, type=kind)
        if isinstance(evidence, Checked):
            evidence.refuse_contradictions()
        return evidence

    return read


def write_flights(path: Path, flights: Sequence[Flight]) -> None:
    """Write the contents of flight recorders to any path, in the format of `flights.json`.

    Raises:
        OSError: the file cannot be written.
    """
    content = [dataclasses.asdict(flight) for flight in flights]
    with whole(path) as temporary:
        temporary.write_bytes(json_text(content, indent=1))


def write_pooled(first: RunDir, content: bytes) -> Path:
    """Write `pooled.json` into a folder beside the run directories that were pooled, named after the first one.

    Raises:
        UsageError: it cannot be written.
    """
    folder = first.path.with_name(f"{first.path.name}-pooled")
    try:
        folder.mkdir(exist_ok=True)
        with whole(folder / "pooled.json") as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; choose another place with --out") from error
    return folder / "pooled.json"


def create(
    root: Path,
    *,
    experiment: bytes,
    name: str,
    seed: int,
    lab: str,
    started: datetime,
    without: Sequence[str] = (),
    control: bool = False,
) -> RunDir:
    """Create the directory of a new run under `root`, with `experiment.toml` and `repro.sh` in it.

    `started` is an aware UTC time, `without` are hosts that take no part. A second run within the same second gets a
    number.

    Raises:
        UsageError: the directory cannot be made.
    """
    stem = f"{started:{_STARTED}}-{name}-{seed}"
    for number in range(1, 100):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}; choose another place with --out") from error
        run = RunDir(path)
        run._write("experiment.toml", experiment)  # noqa: SLF001 - the class's own module
        run._write("repro.sh", repro_script(seed=seed, lab=lab, without=without, control=control), mode=0o755)  # noqa: SLF001
        return run
    raise UsageError(f"{root / stem}: 99 runs in one second; choose another place with --out")


def find_run_folders(root: Path, on_error: Callable[[OSError], None]) -> list[Path]:
    """Return every run directory in a folder, at any depth, resolved and sorted by name.

    `campaign`, `fuzz` and `sweep` keep their runs in folders of their own. A folder is a run directory if it has at
    least one file of `RUN_FILES`, and is not searched further. A symbolic link to a run counts once, like the run.

    Args:
        root: a folder; one that does not exist has no runs.
        on_error: called for a folder that cannot be read: runs in it are not in the result.
    """
    runs: set[Path] = set()
    searched: set[Path] = set()
    for parent, names, files in os.walk(root, onerror=on_error, followlinks=True) if root.exists() else ():
        folder = Path(parent).resolve()
        if folder in searched or not RUN_FILES.isdisjoint(files):
            names.clear()
        if not RUN_FILES.isdisjoint(files):
            runs.add(folder)
        searched.add(folder)
    return sorted(runs, key=lambda folder: (folder.name, folder))


def open_run(path: Path) -> RunDir:
    """Return the directory of a finished run.

    Raises:
        UsageError: there is none.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such run directory; runs are kept under runs/")
    return RunDir(path)


_REPRO = """\
#!/bin/sh
# Runs this experiment again with the same seed, wherever this directory has been copied to.
# FAULTBED_LAB names another lab; arguments go to `faultbed run`.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
if ! command -v faultbed >/dev/null; then
    echo "repro.sh: no faultbed on PATH; activate the environment that it is installed in" >&2
    exit 4
fi
lab=@LAB@
exec faultbed --lab "${FAULTBED_LAB:-$lab}" run "$here/experiment.toml" --seed @SEED@@WITHOUT@ "$@"
"""


def repro_script(*, seed: int, lab: str, without: Sequence[str] = (), control: bool = False) -> bytes:
    """Return `repro.sh`: it repeats the run with the same seed, without the hosts of `without`.

    It uses the inventory `lab`, or the one that FAULTBED_LAB names.
    """
    missing = "".join(f" --without {shlex.quote(host)}" for host in without) + (" --control" if control else "")
    return _REPRO.replace("@LAB@", shlex.quote(lab)).replace("@SEED@@WITHOUT@", f"{seed}{missing}").encode()


def describe_environment(
    *,
    started_utc: str = "",
    qemu: str | None = None,
    accelerator: str | None = None,
    guest_kernel: str | None = None,
    versions: Mapping[str, str] | None = None,
    left_out: Sequence[ExcludedHost] = (),
    routing: str | None = None,
) -> Environment:
    """Return the versions and settings of this controller, without environment variables, host or user name."""
    return Environment(
        started_utc=started_utc,
        faultbed=faultbed.__version__,
        git=_commit(),
        code=code.digest(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        controller_kernel=platform.release(),
        cpu_count=os.cpu_count() or 0,
        qemu=qemu,
        accelerator=accelerator,
        guest_kernel=guest_kernel,
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        versions=dict(versions or {}),
        left_out=tuple(left_out),
        routing=routing,
    )


@functools.cache
def _commit() -> str | None:
    """Return the commit of the running faultbed's code, read once per process, as its digest is."""
    return _git_describe(shipped.import_root().resolve())


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_describe(root: Path) -> str | None:
    """Return the commit of this code, marked when it was changed; None outside a checkout of faultbed.

    If faultbed is installed inside another project's checkout (its `.venv`, a vendored copy), that project's commit
    says nothing about faultbed. A commit therefore counts only if `root` is the root of a repository that tracks this
    file.
    """
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root or not _git(root, "ls-files", "harness/record/rundir.py"):
            return None
        return _git(root, "describe", "--always", "--dirty", "--tags") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    # A Git hook sets GIT_DIR and similar variables, which name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True, env=environment
    )
    return done.stdout.strip()
