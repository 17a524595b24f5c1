"""`faultbed init`: the files are right, and nothing of the user's is replaced."""

from __future__ import annotations

import ast
import sys

import pytest
import yaml

from faultbed.harness.cli import ending
from faultbed.harness.cli.main import cli

NAMES = {"experiment.toml", "schema.json", "test_fabric.py", ".github/workflows/faultbed.yml"}


@pytest.fixture
def faultbed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FAULTBED_LAB", raising=False)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["faultbed", *argv])
        return ending._run(cli, "faultbed"), capsys.readouterr().err

    return run


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_init_writes_an_experiment_that_can_be_planned_and_names_the_next_command(faultbed, tmp_path):
    code, err = faultbed("init", "mine")
    assert code == 0
    assert files(tmp_path / "mine") == NAMES
    assert "next: `faultbed run mine/experiment.toml`" in err
    assert faultbed("run", "mine/experiment.toml", "--plan")[0] == 0


def test_init_writes_a_test_and_a_workflow_that_ends_its_lab(faultbed, tmp_path):
    assert faultbed("init")[0] == 0
    assert "def test_" in (tmp_path / "test_fabric.py").read_text()
    ast.parse((tmp_path / "test_fabric.py").read_text())
    workflow = yaml.safe_load((tmp_path / ".github/workflows/faultbed.yml").read_text())
    lines = [step.get("run", "") for step in workflow["jobs"]["lab"]["steps"]]
    assert any("faultbed run experiment.toml --down" in line for line in lines)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_init_replaces_no_file_and_writes_none_beside_it(faultbed, tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    code, err = faultbed("init")
    assert code == 4
    assert name in err
    assert files(tmp_path) == {name}
    assert (tmp_path / name).read_text() == "mine"


def test_init_follows_no_dangling_link(faultbed, tmp_path):
    (tmp_path / "experiment.toml").symlink_to(tmp_path / "elsewhere")
    assert faultbed("init")[0] == 4
    assert not (tmp_path / "elsewhere").exists()


def test_init_into_a_file_is_one_sentence(faultbed, tmp_path):
    (tmp_path / "file").write_text("")
    code, err = faultbed("init", "file")
    assert code == 4
    assert "file" in err
    assert len(err.strip().splitlines()) == 1
