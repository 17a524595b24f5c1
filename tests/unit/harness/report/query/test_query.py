"""SQL over run directories: what the tables hold, what is left out, and what a statement may not do."""

import csv
import io
import json
import os
import shutil
import sqlite3
import statistics

import pytest
from click.testing import CliRunner
from finished_run import finished
from synthetic_run import changed, synthetic_run

from faultbed.harness.cli.main import cli
from faultbed.harness.record import sweep_file
from faultbed.harness.record.copies import copies_among
from faultbed.harness.record.sweep_file import SweepFile, SweptParameter, SweptPoint, SweptRun, SweptValue
from faultbed.harness.report.query import read_only_sql
from faultbed.harness.report.query.read_only_sql import ask, columns_read
from faultbed.harness.report.query.run_tables import ALL_COLUMNS, TABLES, load
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import UsageError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("original"), synthetic_run()).path


LAB, WORKLOAD = "evidence/measured/lab.json", "evidence/measured/workload.json"


@pytest.fixture
def runs(tmp_path, original):
    """Two runs that differ in their measurements, in a folder."""
    shutil.copytree(original, tmp_path / "runs" / original.name)
    later = tmp_path / "runs" / "campaign" / "20261122T000000Z-demo-7"
    shutil.copytree(original, later)
    text = (original / WORKLOAD).read_bytes()
    (later / WORKLOAD).write_bytes(text.replace(b'"t0_ns":', b'"t0_ns": ', 1))
    return tmp_path / "runs"


def asked(runs, sql):
    reads = columns_read(TABLES, sql)
    return ask(load([runs], reads).connection, sql, reads).rows


def queried(*words):
    return CliRunner().invoke(cli, ["query", *map(str, words)], standalone_mode=False)


def test_tables_hold_what_the_verdicts_say(runs, original):
    verdict = json.loads((original / "verdict.json").read_text())
    assert asked(runs, "select count(*), count(distinct run) from runs") == [(2, 2)]
    assert asked(runs, "select count(*) from RUNS") == asked(runs, 'select count(*) from "Runs"') == [(2,)]
    assert asked(runs, "select name, verdict, observed from checks where run not like '%campaign%'") == [
        (one["name"], one["verdict"], one["observed"]) for one in verdict["checks"]
    ]
    assert asked(runs, "select id, kind, fired, proven from faults limit 3") == [
        (one["id"], one["kind"], one["fired"]["count"], 1) for one in verdict["faults"]
    ]
    assert asked(runs, "select run from runs where started >= '2026-11-22' order by 1") == [
        (str(runs / "campaign" / "20261122T000000Z-demo-7"),)
    ]


def test_damaged_mixed_copied_and_unfinished_runs_are_left_out_with_the_reason(runs, original):
    first = runs / original.name
    reasons = {"a-copy": "it is a copy of", "unfinished": "it still runs", "cut": "not whole", "torn": "verdict.json",
               "seed": "seed 7, but 8", "lab": "lab soft, but other", "kind": "fault", "bare": "it has no evidence",
               "fifo": "no regular file", "long": "of at most"}  # fmt: skip
    for name in reasons:
        shutil.copytree(first, runs / f"z-{name}")
    (runs / "z-unfinished" / "verdict.json").unlink()
    (runs / "z-bare" / WORKLOAD).unlink()
    edit(runs / "z-cut" / WORKLOAD, lambda text: text[:-100])
    edit(runs / "z-torn" / "verdict.json", lambda text: text[:-100])
    edit(runs / "z-seed" / "plan.json", lambda text: text.replace(b'"seed": 7,', b'"seed": 8,'))
    edit(runs / "z-lab" / LAB, lambda text: text.replace(b'"name":"soft"', b'"name":"other"', 1))
    edit(runs / "z-kind" / "plan.json", lambda text: text.replace(b"packet.drop", b"packet.mark"))
    for name in ("fifo", "long"):
        (runs / f"z-{name}" / "verdict.json").unlink()
    os.mkfifo(runs / "z-fifo" / "verdict.json")
    with (runs / "z-long" / "verdict.json").open("wb") as file:
        file.truncate(65 << 20)
    tables = load([runs])
    assert tables.runs == 2
    assert set(tables.left_out) == {str(runs / f"z-{name}") for name in reasons}
    for name, reason in reasons.items():
        assert reason in tables.left_out[str(runs / f"z-{name}")]


def edit(path, change):
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)


def test_run_that_is_reached_twice_is_read_once_and_is_no_copy(runs, tmp_path):
    (tmp_path / "link").symlink_to(runs)
    tables = load([runs, runs / "campaign", tmp_path / "link"])
    assert (tables.runs, tables.left_out) == (2, {})


def test_query_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        load([tmp_path / "none"])
    with pytest.raises(UsageError, match="no run to query"):
        load([tmp_path])


def swept(original, **changes):
    run = SweptRun(seed=7, run_dir=f"runs/{original.name}", verdict=Verdict.PASS, lab_state="CLEAN", took_s=1.0)
    value = SweptValue(metric="mmr", unit="ratio", value=1.5, low=1.25, high=1.75)
    done = SweptPoint(
        number=1, parameters={"workload.size": "1MiB"}, verdict=Verdict.PASS,
        runs=(changed(run, **changes),), values=(value,),
    )  # fmt: skip
    return SweepFile(
        faultbed="0", experiment="demo", lab="soft", seed=7, repeat=1, metrics=("mmr",), verdict=Verdict.INCONCLUSIVE,
        over=(SweptParameter(path="workload.size", values=("1MiB", "2MiB")),), lab_state="CLEAN",
        points=(done, SweptPoint(number=2, parameters={"workload.size": "2MiB"})),
    )  # fmt: skip


def test_points_of_a_sweep_join_their_runs_and_one_without_runs_has_no_value(tmp_path, original):
    shutil.copytree(original, tmp_path / "sweep" / "runs" / original.name)
    sweep_file.write(swept(original), tmp_path / "sweep")
    sql = (
        "select point, parameters->>'$.\"workload.size\"', points.verdict, value, high, run is null from points "
        "left join runs using (sweep, point) order by point"
    )
    assert asked(tmp_path, sql) == [(1, "1MiB", "PASS", 1.5, 1.75, 0), (2, "2MiB", None, None, None, 1)]


@pytest.mark.parametrize("changes", [{"run_dir": "runs/gone"}, {"verdict": Verdict.FAIL}, {"seed": 8}])
def test_sweep_that_disagrees_with_its_runs_is_left_out(tmp_path, original, changes):
    shutil.copytree(original, tmp_path / "sweep" / "runs" / original.name)
    sweep_file.write(swept(original, **changes), tmp_path / "sweep")
    tables = load([tmp_path])
    assert list(tables.left_out) == [str(tmp_path / "sweep")]
    assert ask(tables.connection, "select (select count(*) from points), sweep from runs").rows == [(0, None)]


@pytest.fixture
def numbers():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("create table t (x)")
    return connection


@pytest.mark.parametrize(
    "sql",
    [
        "insert into t values (1)", "delete from t", "update t set x = 1", "replace into t values (1)", "drop table t",
        "create table y (x)", "create temp table y (x)", "create view v as select 1", "alter table t rename to u",
        "attach ':memory:' as other", "detach main", "vacuum", "vacuum into 'copy.sqlite'", "pragma user_version = 3",
        "pragma table_info(t)", "select * from pragma_table_info('t')", "begin", "savepoint s", "reindex", "analyze",
        "with c as (select 1) insert into t select * from c", "select load_extension('x')",
        "create virtual table v using fts5 (x)", "explain insert into t values (1)",
    ],
)  # fmt: skip
def test_statement_that_is_no_question_is_refused_by_sqlite(numbers, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="query: "):
        ask(numbers, sql)
    numbers.set_authorizer(None)
    assert numbers.execute("select name from sqlite_schema").fetchall() == [("t",)]
    assert numbers.execute("select count(*) from t").fetchone() == (0,)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sql", "reads"),
    [
        ("select count(*) from runs", {"runs": {""}}),
        ("select count(*) from RUNS", {"runs": {""}}),
        ("select 1 where exists (select 1 from 'runs')", {"runs": {""}}),
        ("select C.Name from Checks C", {"checks": {"name"}}),
        ("select observed from checks where name = 'x'", {"checks": {"observed", "name"}}),
        ("select c.* from (select run r from runs) join checks c on r = c.run", {"runs": {"run"}, "checks": "all"}),
        ("select kind from faults natural join runs", dict.fromkeys(TABLES, "all")),
        ("select a.name from checks a join checks b Using (observed)", dict.fromkeys(TABLES, "all")),
        ("with v as (select verdict from runs) select * from v", {"runs": {"verdict"}}),
        ("select wibble from runs", dict.fromkeys(TABLES, "all")),
        ("explain select run from runs", dict.fromkeys(TABLES, "all")),
        ("-- nothing", dict.fromkeys(TABLES, "all")),
    ],
)
def test_columns_read_are_those_that_sqlite_reads(sql, reads):
    expected = {table: set(ALL_COLUMNS[table]) if columns == "all" else columns for table, columns in reads.items()}
    assert columns_read(TABLES, sql) == expected


def test_statement_that_reads_a_column_without_values_is_refused(runs):
    reads = columns_read(TABLES, "select verdict from runs")
    tables = load([runs], reads)
    for sql in (
        "select seed from runs",
        "select count(*) from checks",
        "select count(*) from CHECKS",
        "select * from runs",
    ):
        with pytest.raises(UsageError, match="query: "):
            ask(tables.connection, sql, reads)
    assert ask(tables.connection, "select count(*), count(verdict) from runs", reads).rows == [(2, 2)]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("select 1; select 2", "one statement"), ("", "returns nothing"), ("-- nothing", "returns nothing"),
        ("select wibble from t", "no such column: wibble; `faultbed query --help`"), ("selec 1", "syntax error"),
        ("select 1\0", "null character"), ("select '\udc80'", "surrogates"),
        ("select zeroblob(500000000)", "too big"), ("select median('a')", "'a' is no number"),
        ("select quantile(1, 2)", "2 is no share"), ("select quantile(1, null)", "None is no share"),
    ],
)  # fmt: skip
def test_wrong_statement_is_answered_with_one_sentence(numbers, sql, says):
    with pytest.raises(UsageError) as caught:
        ask(numbers, sql)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


ENDLESS = "with recursive c(x) as (select 1 union all select x + 1 from c) select {} from c"


def test_statement_without_end_is_ended(numbers, monkeypatch):
    monkeypatch.setattr(read_only_sql, "MAX_S", 0.05)
    with pytest.raises(UsageError, match=r"not done after 0\.05 s"):
        ask(numbers, ENDLESS.format("max(x)"))


def test_answer_that_is_too_long_is_refused_and_not_cut(numbers, monkeypatch):
    monkeypatch.setattr(read_only_sql, "MAX_ROWS", 10)
    assert len(ask(numbers, ENDLESS.format("x") + " limit 10").rows) == 10
    with pytest.raises(UsageError, match="more than 10 rows"):
        ask(numbers, ENDLESS.format("x"))


def test_statement_that_needs_too_much_memory_is_refused(numbers):
    with pytest.raises(UsageError, match="needs more than 256 MiB"):
        ask(numbers, ENDLESS.format("x, zeroblob(4000000)") + " order by 2, 1 desc")


def test_median_and_quantile_are_those_of_the_statistics_module(numbers):
    values = [5.0, 1.0, None, 9.5, 2.0]
    numbers.executemany("insert into t values (?)", [(value,) for value in values])
    known = [value for value in values if value is not None]
    (row,) = ask(
        numbers,
        "select median(x), quantile(x, 0.5), quantile(x, 0), quantile(x, 1), quantile(x, 0.25), median(null) from t",
    ).rows
    quarter = statistics.quantiles(known, n=4, method="inclusive")[0]
    assert row == (3.5, 3.5, 1.0, 9.5, quarter, None)


def test_query_prints_a_table_csv_and_json(runs, original):
    shutil.copytree(runs / original.name, runs / "z-copy")
    sql = "select kind, count(*) n, avg(verdict='PASS') ok from faults join runs using (run) group by kind order by 1"
    shown = queried(sql, runs)
    assert shown.stdout.splitlines()[0].split() == ["kind", "n", "ok"]
    assert "1 of 3 directories are left out:" in shown.stderr
    assert f"{runs / 'z-copy'}: it is a copy of {runs / original.name}" in shown.stderr
    rows = list(csv.DictReader(io.StringIO(queried(sql, runs, "--csv").stdout)))
    document = json.loads(queried(sql, runs, "--json").stdout)
    assert [{name: str(value) for name, value in row.items()} for row in document["rows"]] == rows
    assert rows[0] == {"kind": "gpu.throttle", "n": "2", "ok": "1.0"}
    assert (document["runs"], list(document["left_out"])) == (2, [str(runs / "z-copy")])
    assert "are named" in str(queried("select 1 a, 2 a", runs, "--json").exception)
    assert "two formats" in str(queried("select 1", runs, "--json", "--csv").exception)


def test_copies_are_files_with_the_same_bytes(tmp_path):
    contents = {"a": b"1" * 9000, "b": b"1" * 9000, "c": b"2" + b"1" * 8999, "d": b"1" * 8999 + b"2", "e": b"1" * 9000}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    copies = copies_among([tmp_path / name for name in contents])
    assert copies == {tmp_path / "b": tmp_path / "a", tmp_path / "e": tmp_path / "a"}
