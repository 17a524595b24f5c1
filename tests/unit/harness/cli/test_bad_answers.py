"""What a user types or points to by mistake: one sentence with place, value and remedy, and the right exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from house import DEMO, HOUSE

from faultbed.harness.cli import ending
from faultbed.harness.cli.main import cli
from faultbed.testbed import shipped

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with every kind of file that is mistaken for another; it is the current one."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FAULTBED_LAB", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    soft = (HOUSE / "inventory" / "soft.yml").read_bytes()
    files = {
        "demo.toml": DEMO.read_bytes(),
        "bom.toml": BOM + DEMO.read_bytes(),
        "bom.yml": BOM + soft,
        "utf16.toml": DEMO.read_text(encoding="utf-8").encode("utf-16"),
        "latin1.toml": b'name = "d\xe9mo"\n',
        "empty.toml": b"",
        "name.toml": b'name = "x"\n',
        "cut.toml": DEMO.read_bytes()[:300],
        "list.yml": b"- host1\n",
        "empty.yml": b"",
        "cut.yml": soft[:200],
        "text.pcap": b"no packets\n",
        "empty.pcap": b"",
        "runs/20260101T000000Z-cut-1/verdict.json": b'{"schema":',
        "runs/20260101T000001Z-list-1/verdict.json": b"[]",
        "runs/20260101T000002Z-empty-1/verdict.json": b"",
        "runs/20260101T000003Z-none-1/plan.json": b"{}",
        "dir.toml/x": b"",
        "dir.yml/x": b"",
        "dir.pcap/x": b"",
        "readonly": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def answer(folder, monkeypatch, capsys):
    """Return a command's exit code and stderr; `folder` is the current directory."""

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["faultbed", *argv])
        code = ending._run(cli, "faultbed")
        return code, capsys.readouterr().err

    return run


INJECT = ("inject", "packet.drop", "host3:rxe0", "--for", "5s")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        # Commands, options and values that do not exist.
        (["rnu", "demo.toml"], 4, ["rnu", "did you mean run?"]),
        (["faluts"], 4, ["faluts", "did you mean faults?"]),
        (["traffic", "colective"], 4, ["traffic colective", "did you mean collective?"]),
        (["xyxyxy"], 4, ["xyxyxy: no such command", "faultbed --help"]),
        (["run", "--sed", "3", "demo.toml"], 4, ["--sed", "did you mean --seed?"]),
        (["run", "--zzz", "demo.toml"], 4, ["--zzz: no such option", "faultbed run --help"]),
        (["run"], 4, ["EXPERIMENT is missing", "faultbed run --help"]),
        (["run", "demo.toml", "--seed", "abc"], 4, ["--seed", "'abc' is no integer"]),
        (["run", "demo.toml", "--seed", "-1"], 4, ["--seed", "-1"]),
        (["run", "demo.toml", "--repeat", "0"], 4, ["--repeat", "0"]),
        (["run", "demo.toml", "extra.toml"], 4, ["--merge takes the DIRs"]),
        (["doctor", "extra"], 4, ["extra"]),
        (["traffic", "collective", "all-reduc"], 4, ["all-reduc", "did you mean all-reduce?"]),
        (["traffic", "collective", "zzz"], 4, ["zzz", "choose one of all-reduce"]),
        (["offenders", "--hand-over", "slrum"], 4, ["--hand-over", "slrum", "did you mean slurm?"]),
        (["inject"], 4, ["KIND is missing"]),
        (["inject", "packet.drop", "host3:rxe0"], 4, ["--for is missing"]),
        # Fault parameters: place, value, and how to write it.
        ([*INJECT, "--set", "share=200%"], 4, ["fault.share", "200%", "50%"]),
        ([*INJECT, "--set", "share=5ms"], 4, ["fault.share", "5ms", "0.5 or 50%"]),
        ([*INJECT, "--set", "share=-20%"], 4, ["fault.share", "-20%"]),
        ([*INJECT, "--set", "share=nan"], 4, ["fault.share", "nan"]),
        ([*INJECT, "--set", "shar=0.1"], 4, ["shar", "did you mean share?"]),
        (
            ["inject", "packet.delay", "host3:rxe0", "--for", "5s", "--set", "delay=5%"],
            4,
            ["fault.delay", "5%", "ms"],
        ),
        (["inject", "packet.drop", "host3:rxe0", "--for", "5"], 4, ["--for 5: 5 has no unit", 'write "5s"']),
        (["inject", "packet.drpo", "host3:rxe0", "--for", "5s"], 4, ["packet.drpo", "packet.drop"]),
        (["faults", "packet.drpo"], 4, ["packet.drpo", "packet.drop"]),
        # Files: missing, folders, other encodings, cut off, empty.
        (["run", "nothing.toml"], 4, ["nothing.toml"]),
        (["run", "dir.toml"], 4, ["dir.toml"]),
        (["run", "demo.tmol"], 4, ["demo.tmol"]),
        (["run", "utf16.toml", "--plan"], 4, ["utf16.toml", "line 1", "0xff", "UTF-8"]),
        (["run", "latin1.toml", "--plan"], 4, ["latin1.toml", "line 1", "0xe9", "UTF-8"]),
        (["run", "empty.toml", "--plan"], 4, ["empty.toml", "are missing"]),
        (["run", "name.toml", "--plan"], 4, ["name.toml", "`workload` is missing"]),
        (["run", "cut.toml", "--plan"], 4, ["cut.toml"]),
        (["run", "text.pcap", "--plan"], 4, ["text.pcap", "not TOML"]),
        (["--lab", "dir.yml", "status"], 4, ["dir.yml: is a folder", "inventory"]),
        (["--lab", "utf16.toml", "status"], 4, ["utf16.toml", "0xff"]),
        (["--lab", "list.yml", "status"], 4, ["list.yml", "all:"]),
        (["--lab", "empty.yml", "status"], 4, ["empty.yml"]),
        (["--lab", "cut.yml", "status"], 4, ["cut.yml"]),
        (["--lab", "demo.toml", "status"], 4, ["demo.toml"]),
        (["--lab", "soft-minni", "status"], 4, ["soft-minni", "did you mean soft-mini?"]),
        (["--lab", "nothing.yml", "status"], 4, ["nothing.yml: no such inventory"]),
        (["packets", "dir.pcap"], 4, ["dir.pcap"]),
        (["packets", "text.pcap"], 4, ["text.pcap", "pcap"]),
        (["packets", "empty.pcap"], 4, ["empty.pcap"]),
        (["packets", "nothing.pcap"], 4, ["nothing.pcap"]),
        (["report", "nothing"], 4, ["nothing", "no such run directory"]),
        (["report", "dir.toml"], 4, ["dir.toml/verdict.json", "finished run"]),
        (["report", "demo.toml"], 4, ["demo.toml"]),
        (["report", "runs/20260101T000000Z-cut-1"], 3, ["verdict.json", "copy the run directory again"]),
        (["report", "runs/20260101T000001Z-list-1"], 3, ["verdict.json", "`array`"]),
        (["report", "runs/20260101T000002Z-empty-1"], 3, ["verdict.json"]),
        (["report", "runs/20260101T000003Z-none-1"], 4, ["verdict.json", "finished run"]),
        (["attribute", "runs/20260101T000003Z-none-1"], 4, ["20260101T000003Z-none-1"]),
        (["history", "--runs", "nothing"], 4, ["nothing"]),
        (["offenders", "--runs", "demo.toml"], 4, ["demo.toml"]),
        # A lab that is down: by the name that the user would type.
        (["inject", "packet.drop", "host3:rxe0", "--for", "5s", "--set", "share=20%"], 3, ["`faultbed --lab soft up`"]),
        (["--lab", "soft-mini", "traffic", "collective", "all-reduce"], 3, ["`faultbed --lab soft-mini up`"]),
        (["ssh", "host1"], 3, ["`faultbed --lab soft up`"]),
    ],
)
def test_bad_answer_is_one_sentence_with_place_value_and_remedy(answer, argv, code, words):
    got, err = answer(*argv)
    for word in words:
        assert word in err
    assert got == code
    assert "Traceback" not in err
    assert "Errno" not in err
    assert "site-packages" not in err
    assert str(shipped.inventories()) not in err
    assert len(re.findall(r"^faultbed: ", err, flags=re.MULTILINE)) == 1
    assert len(err.strip().splitlines()) == 1


def test_damaged_runs_do_not_hide_the_others(answer):
    code, err = answer("offenders", "--runs", "runs")
    assert code == 0
    for name in ("cut", "list", "empty"):
        assert re.search(rf"-{name}-1 is left out: .*verdict.json", err)


@pytest.mark.parametrize("argv", [["run", "bom.toml", "--plan"], ["--lab", "bom.yml", "inventory", "check"]])
def test_byte_order_mark_is_no_mistake(answer, argv):
    assert answer(*argv)[0] == 0


@pytest.mark.parametrize(
    ("kind", "setting", "name", "value"),
    [
        ("packet.drop", "share=20%", "share", 0.2),
        ("packet.drop", "share=0.2", "share", 0.2),
        ("packet.drop", "share=0.1%", "share", 0.001),
        ("packet.delay", "delay=5ms", "delay", 5.0),
        ("packet.delay", "delay=0.005s", "delay", 5.0),
        ("packet.delay", "delay=5000us", "delay", 5.0),
    ],
)
def test_parameter_takes_its_unit(folder, kind, setting, name, value, monkeypatch, capsys):
    """The plan has the number in the parameter's own unit, whichever one was written."""
    argv = ["faultbed", "inject", kind, "host3:rxe0", "--for", "5s", "--set", setting, "--plan", "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    assert ending._run(cli, "faultbed") == 0
    assert json.loads(capsys.readouterr().out)["params"][name] == value


def test_purge_names_what_it_deletes(answer, tmp_path):
    lab = tmp_path / "home" / "labs" / "soft"
    lab.mkdir(parents=True)
    (lab / "audit.jsonl").write_text("{}\n")
    code, err = answer("down", "--purge")
    assert code == 0
    assert "audit log" in err
    assert not lab.exists()


def _run(argv, *, shell_suffix="", **environment):
    line = " ".join([sys.executable, "-P", "-m", "faultbed", *argv]) + shell_suffix
    return subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(shipped.import_root()), **environment},
    )


@pytest.mark.process
@pytest.mark.parametrize("suffix", [" >&-", " 2>&-", " >&- 2>&-", " <&- >&- 2>&-"])
def test_closed_output_keeps_the_exit_code(folder, suffix):
    for argv, code in ((["faults"], 0), (["faluts"], 4)):
        done = _run(argv, shell_suffix=suffix)
        assert done.returncode == code
        assert b"Traceback" not in done.stderr


@pytest.mark.process
def test_output_that_cannot_be_written_is_an_error(folder):
    done = _run(["faults"], shell_suffix=" > /dev/full")
    assert done.returncode == 3
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("argv", [["faults"], ["summary", "--runs", "runs"], ["run", "demo.toml", "--plan"]])
def test_ascii_output_ends_no_command(folder, argv):
    done = _run(argv, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout
    assert b"Traceback" not in done.stderr
