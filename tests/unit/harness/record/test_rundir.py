"""The run directory is created once, written completely, read back unchanged, and can be repeated from anywhere."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from finished_run import finished, write_run
from synthetic_run import T0, synthetic_run

from faultbed.harness.cli.main import cli
from faultbed.harness.record import code, rundir
from faultbed.harness.record.samples_file import SAMPLES_SCHEMA
from faultbed.harness.report import run_page
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.observe.telemetry import Change, Recorded, Sample
from faultbed.traffic.engine.flight_recorder import Entry, Flight
from faultbed.traffic.probes.results import ProbeTrips
from faultbed.traffic.probes.rtt import Echo, Trip

RECORDED = Recorded(
    samples=(Sample(at_ns=T0, node="host1", values={"rxe0.rcvd_pkts": 1}),),
    changes=(Change(at_ns=T0, node="host1", subject="link rxe0", text=None),),
)
STARTED = datetime(2026, 11, 21, 9, 30, 5, tzinfo=UTC)


def make(root, lab="inventory/soft.yml"):
    return rundir.create(root, experiment=b'name = "x"\n', name="x", seed=7, lab=lab, started=STARTED)


def test_run_directory_name_has_time_experiment_and_seed(tmp_path):
    assert make(tmp_path).path.name == "20261121T093005Z-x-7"
    assert make(tmp_path).path.name == "20261121T093005Z-x-7-2"


def test_evidence_of_a_run_round_trips(tmp_path):
    run, measured = make(tmp_path), synthetic_run()

    write_run(run, measured)

    assert run.read_run() == measured
    assert not list(run.path.glob(".*"))


def test_samples_have_one_row_per_rank_and_bin(tmp_path):
    run, measured = make(tmp_path), synthetic_run()
    write_run(run, measured)

    table = pq.read_table(run.path / "samples.parquet")

    assert table.schema.names == SAMPLES_SCHEMA.names
    assert table.num_rows == sum(len(series.samples) for series in measured.workload.series)
    assert sum(table["bytes"].to_pylist()) == sum(s.bytes for one in measured.workload.series for s in one.samples)
    assert table.schema.metadata[b"t0_ns"] == str(T0).encode()
    assert table["since_start_ns"][0].as_py() == 0


def test_environment_names_versions_and_nothing_private(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_TEST_SECRET", "hunter2")
    run = make(tmp_path)

    run.write_environment(rundir.describe_environment(qemu="7.2.22", accelerator="tcg", guest_kernel="6.12"))

    text = (run.path / "environment.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["qemu"] == "7.2.22"
    assert run.read_environment().accelerator == "tcg"


def test_environment_of_a_run_without_a_code_digest_is_decoded(tmp_path):
    run = make(tmp_path)
    run.write_environment(rundir.describe_environment())
    older = json.loads((run.path / "environment.json").read_text())
    assert older.pop("code") == code.digest()
    (run.path / "environment.json").write_text(json.dumps(older))

    assert run.read_environment().code is None


def test_code_digest_covers_paths_and_contents(tmp_path):
    def house(name, files):
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(content)
        return code.digest_of((path, tmp_path / name / path) for path in files)

    files = {"harness/judge.py": "a = 1\n", "traffic/node/flows/late.py": "b = 1\n"}
    first = house("first", files)

    assert house("elsewhere", files) == first
    assert house("changed", files | {"harness/judge.py": "a = 2\n"}) != first
    assert house("more", files | {"inject/new.py": ""}) != first
    assert house("moved", {"harness/judge2.py": "a = 1\n", "traffic/node/flows/late.py": "b = 1\n"}) != first


def test_repro_runs_the_same_experiment_and_seed_from_anywhere(tmp_path):
    run = make(tmp_path / "a place with spaces", lab="inventory/my lab.yml")
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "faultbed").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (fake / "faultbed").chmod(0o755)

    done = subprocess.run(
        [run.path / "repro.sh", "--plan"],
        cwd="/",
        env={"PATH": f"{fake}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines() == [
        "--lab",
        "inventory/my lab.yml",
        "run",
        f"{run.path}/experiment.toml",
        "--seed",
        "7",
        "--plan",
    ]


def test_repro_reports_that_faultbed_is_not_on_path(tmp_path):
    done = subprocess.run(
        [make(tmp_path).path / "repro.sh"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 4
    assert "no faultbed on PATH" in done.stderr


def test_run_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UsageError, match="no such run directory"):
        rundir.open_run(tmp_path / "none")
    with pytest.raises(UsageError, match=r"verdict\.json"):
        rundir.open_run(tmp_path).read_verdict()


def test_flight_recorders_round_trip_by_rank(tmp_path):
    entry = Entry(at_ns=7, what="sent", iteration=3, step=1, peer=2, qpn=17, segment=4, psn=512)
    run = make(tmp_path)
    run.write_flights([Flight(rank=1, endpoint="host2:rxe0", standing="iteration 3, step 1", entries=(entry,))])
    (flight,) = json.loads((run.path / "flights.json").read_text())
    assert flight["standing"] == "iteration 3, step 1"
    assert flight["entries"][0]["psn"] == 512


@pytest.fixture(scope="module")
def whole_once(tmp_path_factory):
    run = finished(tmp_path_factory.mktemp("runs"), synthetic_run())
    run.write_telemetry(RECORDED, t0_ns=T0)
    run.write_probes(ProbeTrips(), t0_ns=T0)
    run.write_flights([])
    return run


@pytest.fixture
def whole(whole_once, tmp_path):
    return rundir.RunDir(shutil.copytree(whole_once.path, tmp_path / whole_once.path.name))


@pytest.mark.parametrize(
    "broken",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"schema": 2}', "half"],
    ids=["empty", "not text", "deep", "of another version", "half"],
)
@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("plan.json", "read_plan"),
        ("evidence/measured/workload.json", "read_run"),
        ("verdict.json", "read_verdict"),
        ("environment.json", "read_environment"),
        ("flights.json", "read_flights"),
        ("packets.json", "read_packets"),
        ("probes.parquet", "read_probes"),
        ("telemetry.parquet", "read_telemetry"),
        ("changes.parquet", "read_telemetry"),
    ],
)
def test_run_file_that_is_broken_is_named_in_one_sentence(whole, name, reader, broken):
    path = whole.path / name
    if broken == "half" and path.exists():
        broken = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(b"" if broken == "half" else broken)

    with pytest.raises(UsageError, match="copy the run directory again") as caught:
        getattr(whole, reader)()

    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"t_ns": [1]}, "since_start_ns"),
        ({"t_ns": ["x"], "since_start_ns": [1], "node": ["a"], "name": ["b"], "value": [1]}, "x"),
        ({"t_ns": [1], "since_start_ns": [1], "node": ["a"], "name": ["b"], "value": [None]}, "value.* null"),
    ],
)
def test_telemetry_table_with_wrong_columns_is_rejected(whole, columns, words):
    pq.write_table(pa.table(columns), whole.path / "telemetry.parquet")

    with pytest.raises(UsageError, match=rf"telemetry\.parquet: cannot be read: .*{words}"):
        whole.read_telemetry()


def test_probes_file_without_metadata_is_rejected(whole):
    path = whole.path / "probes.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)

    with pytest.raises(UsageError, match=r"probes\.parquet: cannot be read: its metadata"):
        whole.read_probes()


FILES = ("measured/lab", "measured/workload", "measured/faults", "measured/telemetry", "twin/workload")


def again(samples, *, later_ns=0):
    """Record the samples a second time, as a second writer of the file would."""
    samples += [[t_ns + later_ns, size] for t_ns, size in samples]


@contextlib.contextmanager
def edited(whole):
    """Yield all evidence of a run as one mapping, `twin` being the series of its twin, and write it back."""
    files = {name: whole.path / "evidence" / f"{name}.json" for name in FILES}
    contents = {name: json.loads(file.read_text()) for name, file in files.items()}
    own = [content for name, content in contents.items() if name != "twin/workload"]
    together = {key: value for content in own for key, value in content.items()}
    together["twin"] = contents["twin/workload"]["series"]
    yield together
    for content in own:
        content.update({key: together[key] for key in content})
    for name, file in files.items():
        file.write_text(json.dumps(contents[name]))


def add_serving(run, tpot_ns, attained):
    run["serving"] = {"ttft_ns": [9], "tpot_ns": tpot_ns, "slo_attainment": attained}


def add_readers(run, *several):
    run["readers"] = [{"host": "host4", "reads_ns": reads} for reads in several]


def test_probes_recorded_twice_are_refused(whole):
    echo = Echo(connection=3, sent_ns=T0 + 5, came=True, whole_ns=9, responder_ns=2)
    trip = Trip(there=("host1:rxe0", "host2:rxe0"), back=("host2:rxe0", "host1:rxe0"), echo=echo)
    whole.write_probes(ProbeTrips(trips=(trip,)), t0_ns=T0)
    assert len(whole.read_probes().trips) == 1
    whole.write_probes(ProbeTrips(trips=(trip, trip)), t0_ns=T0)

    with pytest.raises(UsageError, match=rf"probes\.parquet: .*connection 3 at {T0 + 5} ns appears twice"):
        whole.read_probes()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda run: run["topology"]["switches"][1].update(name="ctsw9"),
            "topology.links: .*ctsw2.* ends at an",
        ),
        (lambda run: run["topology"]["hosts"][1]["rnics"].pop(), "topology.links: .* ends at an unknown"),
        (lambda run: run["ranks"].pop(), "series: rank 3 is none of ranks"),
        (lambda run: run.update(end_ns=10**17), "end_ns: .* no run lasts so long"),
        (lambda run: run.update(t0_ns=-(10**18)), "end_ns: .* a month after t0_ns"),
        (lambda run: run.update(sample_ns=0), "sample_ns: 0 is no length of time"),
        (lambda run: run["series"].append(run["series"][0]), "series: rank 0 appears twice"),
        (lambda run: run["twin"].append(run["twin"][0]), "twin/workload.json: .*series: rank 0 appears twice"),
        (
            lambda run: run["series"][1]["iterations"].append(run["series"][1]["iterations"][4]),
            "series: iteration 4 of",
        ),
        (
            lambda run: run["twin"][1]["iterations"][4].update(start_ns=10**18),
            "twin/workload.json: .*series: iteration 4 of rank 1 ends more than a month after iteration 0 begins",
        ),
        (lambda run: run["series"].pop(), "series: rank 3 is missing"),
        (lambda run: run["faults"].append(run["faults"][0]), "faults: .* appears twice"),
        (lambda run: run["series"][1]["iterations"][4].update(wrong=-1), "series: rank 1 has less than 0 wrong"),
        (lambda run: again(run["series"][1]["samples"]), "series: rank 1: the sample at .* appears twice"),
        (lambda run: again(run["twin"][1]["samples"]), "twin/workload.json: .*rank 1: the sample at .* appears twice"),
        (
            lambda run: again(run["series"][1]["samples"], later_ns=1000),
            "series: rank 1: .* covers the time of another",
        ),
        (lambda run: run["series"][2]["samples"][3].__setitem__(1, -5), "series: rank 2: .* less than 0 bytes"),
        (lambda run: run.update(t0_ns=run["t0_ns"] + 10**13, end_ns=run["end_ns"] + 10**13), "they are of another run"),
        (
            lambda run: run["series"][1]["iterations"][4].update(start_ns=2**63),
            r"series\[1\]\.iterations\[4\]\.start_ns: 92",
        ),
        (lambda run: run["series"][1]["samples"][4].__setitem__(1, 2**63 - 1), r"series\[1\]\.samples\[4\]\[1\]: 92"),
        (lambda run: run.update(clock_error_ns=-(2**63)), "clock_error_ns: -92.* is beyond any time or count"),
        (lambda run: run["summary"].update(busbw_gbps=1e308), r"summary\.busbw_gbps: 1e\+308 is beyond"),
        (
            lambda run: run["counters_after"].update(host1={"rxe0.sent_pkts": 2**64}),
            r"counters_after\.host1\.rxe0\.sent_pkts: 18446744073709551616 is beyond",
        ),
        (
            lambda run: run["topology"]["hosts"][1]["rnics"][0].update(address="10.77.1.300/31"),
            r"topology\.hosts\[1\]\.rnics\[0\]\.address: '10.77.1.300/31' is no address",
        ),
        (lambda run: run["topology"]["switches"][2].update(loopback=""), r"switches\[2\]\.loopback: '' is no address"),
        (
            lambda run: run["topology"]["links"][0]["a"].update(address="x"),
            r"links\[0\]\.a\.address: 'x' is no address",
        ),
        (
            lambda run: add_readers(run, [[1, 2, 3], [2, 1, 3]]),
            "readers: a read of host4 is planned, begun and over",
        ),
        (lambda run: add_readers(run, [], []), "readers: host4 appears twice"),
        (lambda run: add_serving(run, [[5], []], 1.0), "serving.tpot_ns: of 2 requests, but serving.ttft_ns is of 1"),
        (lambda run: add_serving(run, [[5]], 1.5), "serving.slo_attainment: 1.5 is no share"),
        (lambda run: run["topology"]["hosts"][0].update(front_end_address="::1::"), "front_end_address: '::1::' is no"),
    ],
)
def test_evidence_that_contradicts_itself_is_refused(whole, edit, words):
    with edited(whole) as content:
        edit(content)

    with pytest.raises(UsageError, match=rf"evidence/.*{words}"):
        whole.read_run()


def test_counters_of_64_bits_are_read(whole):
    """A driver may give all ones for what it does not count."""
    with edited(whole) as content:
        content["counters_after"].setdefault("host1", {})["rxe0.other"] = 2**64 - 1
    assert whole.read_run().telemetry.counters_after["host1"]["rxe0.other"] == 2**64 - 1


@pytest.mark.parametrize("command", [["report"], ["noise", "--out", "floor.json"], ["attribute"]])
def test_command_on_damaged_evidence_is_one_sentence_and_an_error(whole, command):
    with edited(whole) as content:
        content["series"][1]["iterations"][4]["comm_ns"] = 2**63
    done = CliRunner().invoke(cli, [*command, str(whole.path)], standalone_mode=False)
    assert isinstance(done.exception, FaultbedError), done.exception
    assert done.exception.exit_code == ExitCode.ERROR
    assert "workload.json: not as this version writes it: series[1].iterations[4].comm_ns: 922" in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 8}, "seed 8, but 7 in plan.json"),
        ({"experiment": "other"}, "experiment other, but"),
        ({"lab": "rack9"}, "lab rack9, but soft in evidence/measured/lab.json"),
        ({"faults": ()}, r"faults \[\], but"),
    ],
)
def test_verdict_of_another_run_is_no_verdict_of_this_one(whole, changes, words):
    """The file was copied from another run directory."""
    verdict = whole.read_verdict()
    whole.refuse_mixed(verdict, whole.read_plan(), whole.read_run())
    whole.write_verdict(msgspec.structs.replace(verdict, **changes))
    with pytest.raises(UsageError, match=rf"verdict\.json: {words}.*two runs"):
        run_page.render(whole.path)


def git(folder, *words):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, "-C", str(folder), *words], check=True, capture_output=True)


def checkout(folder, place="."):
    """Make a repository with one commit, and a stand-in for this package in `place`."""
    git(folder, "init")
    module = folder / place / "harness" / "record" / "rundir.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    (folder / "README").write_text("")
    return module


def test_environment_of_a_modified_checkout_has_its_commit_and_a_dirty_mark(tmp_path, monkeypatch):
    module = checkout(tmp_path)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))  # as in a hook of another repository
    commit = rundir._git_describe(tmp_path)
    assert len(commit) >= 7
    module.write_text("changed")
    assert rundir._git_describe(tmp_path) == f"{commit}-dirty"


def test_environment_of_a_package_in_a_foreign_checkout_names_no_commit(tmp_path):
    """The package is in a virtual environment inside a project, whose commit used to be taken for faultbed's."""
    checkout(tmp_path, ".venv/lib/site-packages")
    git(tmp_path, "add", "README")
    git(tmp_path, "commit", "-m", "x")
    assert rundir._git_describe(tmp_path / ".venv/lib/site-packages") is None


def test_environment_of_a_package_that_is_not_under_version_control_names_no_commit(tmp_path):
    """`pip install --target .` in a project's root: its files lie in the repository's root and are not tracked."""
    checkout(tmp_path)
    git(tmp_path, "add", "README")
    git(tmp_path, "commit", "-m", "x")
    assert rundir._git_describe(tmp_path) is None
