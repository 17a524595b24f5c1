"""Tables of traffic measurements: the same rows in CSV and Parquet; an impossible file name is refused at once."""

from types import SimpleNamespace

import pyarrow.csv
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.cli.options import rows_file
from faultbed.traffic.engine.run_results import Iteration, Sample

READ = {".csv": pyarrow.csv.read_csv, ".parquet": pyarrow.parquet.read_table}


def iteration(index, start_ns):
    return Iteration(
        index=index, start_ns=start_ns, end_ns=start_ns + 900, compute_ns=300, comm_ns=600, wait_ns=100,
        wrong_elements=0,
    )  # fmt: skip


@pytest.mark.parametrize("suffix", rows_file.FORMATS)
def test_rows_file_iterations_round_trip(tmp_path, suffix):
    result = SimpleNamespace(
        ranks=("host1:rxe0", "host2:rxe0"), iterations=((iteration(0, 5000), iteration(1, 7000)), (iteration(0, 5100),))
    )
    rows_file.write(rows_file.of_ranks(result), tmp_path / f"it{suffix}")
    rows = READ[suffix](tmp_path / f"it{suffix}").to_pylist()
    assert [(row["rank"], row["rnic"], row["iteration"], row["start_ns"]) for row in rows] == [
        (0, "host1:rxe0", 0, 0),
        (0, "host1:rxe0", 1, 2000),
        (1, "host2:rxe0", 0, 100),
    ]
    assert {(row["duration_ns"], row["comm_ns"], row["wait_ns"]) for row in rows} == {(900, 600, 100)}


@pytest.mark.parametrize("suffix", rows_file.FORMATS)
def test_rows_file_bins_of_flows_round_trip(tmp_path, suffix):
    bins = tuple(
        Sample(endpoint="host1:rxe0", start_ns=start_ns, duration_ns=100, size_bytes=4096) for start_ns in (900, 1000)
    )
    flow = SimpleNamespace(spec=SimpleNamespace(src="host1:rxe0", dst="host2:rxe0"), samples=bins)
    rows_file.write(rows_file.of_flows([flow, flow]), tmp_path / f"it{suffix}")
    rows = READ[suffix](tmp_path / f"it{suffix}").to_pylist()
    assert [(row["flow"], row["start_ns"], row["size_bytes"]) for row in rows] == [
        (0, 0, 4096), (0, 100, 4096), (1, 0, 4096), (1, 100, 4096),
    ]  # fmt: skip


def test_rows_file_of_no_rows_is_an_empty_table(tmp_path):
    rows_file.write([], tmp_path / "it.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "it.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("name", "words"), [("it.xlsx", "a name ends in .csv or .parquet"), ("no/it.csv", "there is no folder no")]
)
@pytest.mark.parametrize("command", ["flow", "collective", "inference", "ranking"])
def test_rows_file_that_cannot_be_written_is_rejected_before_the_run(command, name, words):
    done = CliRunner().invoke(cli, ["traffic", command, "--out", name], standalone_mode=False)
    assert words in str(done.exception)
