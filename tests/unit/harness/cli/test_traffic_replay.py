"""`faultbed traffic replay --json` lists the records of a trace that were not replayed."""

from __future__ import annotations

import json

from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic import replays
from faultbed.traffic.workloads.replay_result import ReplayResult

SIZES = {"in_msg_size": 64, "out_msg_size": 64, "dtype": "float32"}
RECORDS = [
    {"comms": "init", "pg_id": 0, "global_ranks": [0, 1], "world_size": 2},
    {"comms": "all_reduce", "pg_id": 0, **SIZES},
    {"comms": "gather", "pg_id": 0, **SIZES},
]


def test_replay_json_lists_records_that_were_not_replayed(tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(RECORDS))

    def fake_replay(_session, _inventory, spec, trace):
        return ReplayResult(
            spec=spec, source=trace.source, outcome="completed", where=None, ranks=spec.ranks, operations=(),
            wrong_elements=0, time_ns=1, qp_errors=(), rebuilds=(),
        )  # fmt: skip

    monkeypatch.setattr(replays, "_replay", fake_replay)
    result = CliRunner().invoke(cli, ["traffic", "replay", str(tmp_path), "--skip-unsupported", "--json"])
    assert result.exit_code == 0, result.output
    (first, second) = json.loads(result.stdout)["not_replayed"]
    assert (first["file"], first["record"], first["blocks"]) == (str(tmp_path / "0.json"), 2, True)
    assert second["file"] == str(tmp_path / "1.json")
