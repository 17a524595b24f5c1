"""Power traces are written and read with their phases, and bad files are rejected with their name."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faultbed.harness.record import power_file
from faultbed.testbed.errors import RecordError

SAMPLES = [
    {"t_ns": 5, "instant_mw": 70_000, "average_mw": None, "energy_mj": 9, "sm_mhz": 345, "reasons": 1, "temp_c": 33},
    {
        "t_ns": 9,
        "instant_mw": None,
        "average_mw": 71_000,
        "energy_mj": None,
        "sm_mhz": None,
        "reasons": 0,
        "temp_c": 34,
    },
]
SPANS = [{"cycle": 0, "phase": "compute", "start_ns": 5, "end_ns": 9, "amount": 2}]


def test_power_file_keeps_samples_phases_and_origin(tmp_path):
    path = tmp_path / "power.parquet"
    power_file.write(SAMPLES, SPANS, path, about={"gpu": "NVIDIA H100 80GB HBM3"})
    assert power_file.read(path) == (SAMPLES, SPANS, {"gpu": "NVIDIA H100 80GB HBM3"})


def test_power_file_without_phases_or_columns_is_rejected(tmp_path):
    path = tmp_path / "power.parquet"
    table = pa.Table.from_pylist(SAMPLES, schema=power_file.POWER_SCHEMA)
    pq.write_table(table, path)
    with pytest.raises(RecordError, match=r"power.parquet: its metadata cannot be read"):
        power_file.read(path)
    pq.write_table(table.drop_columns("energy_mj"), path)
    with pytest.raises(RecordError, match=r"power.parquet: cannot be read"):
        power_file.read(path)
