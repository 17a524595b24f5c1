"""Shards share the runs of a command, and a run is published once under its key."""

import shutil
import threading

import pytest
from click.testing import CliRunner
from synthetic_sweep import DEMO, OVER, SHARE, points, swept, written

from faultbed.harness.cli.main import cli
from faultbed.harness.record import sweep_file
from faultbed.harness.record.run_key import key_of, key_of_run, publish
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.sweeps.finished_runs import find_finished_runs
from faultbed.harness.run.sweeps.shards import Shard, parse_shard, shard_of
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import UsageError


def one_run(value="0.1"):
    _, (point,) = points(f"{SHARE}={value}")
    return point, point.runs[0]


@pytest.mark.parametrize("text", ["5/4", "0/4", "1/0", "-1/4", "1", "1/", "/4", "1/4/2", "a/b", "1.0/4", "", "²/4"])
def test_shard_that_is_none_is_refused_before_anything_starts(executed, text):
    done = swept(executed, "--shard", text)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == f"--shard {text}: no shard; give K/N with K from 1 to N, such as 2/4"
    assert not executed.shares


def test_shards_are_equal_parts_that_do_not_depend_on_the_order():
    runs = [one_run(f"0.{number}")[1] for number in range(1, 9)]
    parts = [shard_of(Shard(number=number, count=3), runs, lambda run: run) for number in (1, 2, 3)]
    assert sorted(map(len, parts)) == [2, 3, 3]
    assert sorted(run.source for part in parts for run in part) == sorted(run.source for run in runs)
    backwards = shard_of(parse_shard("2/3"), runs[::-1], lambda run: run)
    assert backwards == parts[1][::-1]
    with pytest.raises(UsageError, match="8 runs are too few"):
        shard_of(Shard(number=1, count=9), runs, lambda run: run)


def test_key_depends_on_each_part_and_not_on_how_they_are_divided():
    parts = {"experiment": b"a", "plan": b"b", "code": "c", "machine": "d"}
    keys = {key_of(**parts), key_of(**parts | {"experiment": b"ab", "plan": b""})}
    keys |= {key_of(**parts | {name: value + value}) for name, value in parts.items()}
    assert len(keys) == 6


def test_publishing_renames_a_run_to_its_key_once(tmp_path):
    point, decided = one_run()
    first, second = (written(decided, tmp_path).run_dir for _ in range(2))
    published = publish(first)
    assert published.path.name == f"demo-7-{key_of_run(published)[:16]}"
    assert publish(published).path == published.path
    assert publish(second).path == published.path
    assert [path.name for path in tmp_path.iterdir()] == [published.path.name]
    assert [run.path for run in find_finished_runs(tmp_path, [point])[1]] == [published.path]


def test_of_runs_that_are_published_at_the_same_time_one_is_left(tmp_path):
    _, decided = one_run()
    made = [written(decided, tmp_path).run_dir for _ in range(8)]
    together, results = threading.Barrier(len(made)), []

    def race(run):
        together.wait()
        results.append(publish(run).path)

    threads = [threading.Thread(target=race, args=(run,)) for run in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert list(tmp_path.iterdir()) == results[:1]


@pytest.mark.parametrize("changes", [{"error": "gone"}, {"lab_state": "DIRTY"}, {"is_control": True}], ids=str)
def test_run_that_does_not_count_again_is_not_published(tmp_path, changes):
    run = written(one_run()[1], tmp_path, **changes).run_dir
    assert publish(run) is run
    assert run.path.exists()


def test_key_that_a_damaged_directory_holds_is_not_taken_for_the_run(tmp_path):
    point, decided = one_run()
    published = publish(written(decided, tmp_path).run_dir)
    (published.path / "verdict.json").write_text("{")
    again = written(decided, tmp_path).run_dir
    assert publish(again) is again
    assert [run.path for run in find_finished_runs(tmp_path, [point])[1]] == [again.path]


def test_start_of_a_published_run_is_in_its_journal(tmp_path):
    run = written(one_run()[1], tmp_path).run_dir
    began = run.started
    run.journal.write_text(f'{{"seq": 0, "type": "note", "op": "x", "wall_ns": {int(began.timestamp()) * 10**9}}}\n')
    assert publish(run).started == began


def test_sharded_sweep_in_one_folder_is_complete_after_the_last_shard(executed):
    for number in (1, 2, 3):
        assert swept(executed, "--shard", f"{number}/3").return_value == 0
        result = sweep_file.read(executed.folder)
        assert result.verdict is (Verdict.PASS if number == 3 else Verdict.INCONCLUSIVE)
        assert sum(point.verdict is not None for point in result.points) == number
    assert sorted(executed.shares) == [0.1, 0.2, 0.4]
    assert swept(executed).return_value == 0
    assert len(executed.shares) == 3


@pytest.mark.parametrize(("act", "code"), [({"error": "gone"}, 3), ({"fired": False}, 2)], ids=str)
def test_sharded_sweep_ends_with_the_worst_of_its_own_runs(executed, act, code):
    executed.acts = {1: act}
    assert swept(executed, "--shard", "1/3").return_value == code
    assert swept(executed, "--shard", "2/3").return_value == 0


def merged(out, *folders):
    command = ["sweep", DEMO, "--over", OVER, "--out", str(out), "--merge", *map(str, folders)]
    return CliRunner().invoke(cli, command, standalone_mode=False)


def test_merge_joins_the_shards_of_several_folders_without_a_lab(executed, tmp_path):
    folders = [tmp_path / f"shard-{number}" for number in (1, 2, 3)]
    for number, folder in enumerate(folders, start=1):
        executed.folder = folder
        swept(executed, "--shard", f"{number}/3")
    half = merged(tmp_path / "half", *folders[:2])
    assert half.return_value == 2, "a point that has no run is undecided"
    done = merged(tmp_path / "all", *folders, folders[0])
    assert done.return_value == 0
    result = sweep_file.read(tmp_path / "all")
    assert [point.verdict for point in result.points] == [Verdict.PASS] * 3
    assert all((tmp_path / "all" / run.run_dir).is_dir() for point in result.points for run in point.runs)
    assert len(list((tmp_path / "all" / "runs").iterdir())) == 3
    assert len(executed.shares) == 3
    assert all(folder.exists() for folder in folders)


def test_merge_refuses_what_does_not_belong_together(executed, tmp_path):
    swept(executed, "--shard", "1/3")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    shutil.copytree(executed.folder, other)
    (environment,) = other.glob("runs/*/environment.json")
    environment.write_text(environment.read_text().replace("tcg", "kvm"))
    for folders, says in (
        (["none"], "no such folder"), (["empty"], "no finished run of this command"),
        ([executed.folder, other], "one kind of machine"),
    ):  # fmt: skip
        done = merged(tmp_path / "out", *(tmp_path / folder for folder in folders))
        assert isinstance(done.exception, UsageError)
        assert says in str(done.exception)
    assert not (tmp_path / "out").exists()
    assert "need each other" in str(merged(tmp_path / "out").exception)


def repeated(*words):
    return CliRunner().invoke(cli, ["run", DEMO, "--repeat", "3", *map(str, words)], standalone_mode=False)


def test_repeated_run_is_decided_by_the_shard_that_finds_all_runs(executed, tmp_path):
    outputs = [repeated("--out", tmp_path / "runs", "--shard", f"{number}/3") for number in (1, 2, 3)]
    assert [done.return_value for done in outputs] == [0, 0, 0]
    assert "1 of 3 runs are finished" in outputs[0].output.replace("\n", " ")
    assert "3 runs together" in outputs[2].output
    assert len(executed.shares) == 3
    assert len(list((tmp_path / "runs").glob("*-pooled/pooled.json"))) == 1
    repeated("--out", tmp_path / "runs", "--shard", "1/3")
    assert len(executed.shares) == 3


def test_repeated_runs_of_several_folders_are_merged_or_counted(executed, tmp_path):
    folders = [tmp_path / f"shard-{number}" for number in (1, 2, 3)]
    for number, folder in enumerate(folders, start=1):
        repeated("--out", folder, "--shard", f"{number}/3")
    half = repeated("--out", tmp_path / "half", "--merge", *folders[:2])
    assert "2 of 3 runs are finished" in str(half.exception)
    done = repeated("--out", tmp_path / "all", "--merge", *folders)
    assert (done.return_value, "3 runs together" in done.output) == (0, True)
    assert len([RunDir(path) for path in (tmp_path / "all").glob("*/verdict.json")]) == 3
    assert "share the runs of --repeat" in str(repeated("--shard", "1/3", "--plan").exception)
