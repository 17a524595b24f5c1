"""The command line: every mistake is one sentence with the right exit code, and never a traceback."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from house import HOUSE

from faultbed.harness import console
from faultbed.harness.cli.command_group import Commands
from faultbed.harness.cli.ending import end_with
from faultbed.harness.cli.experiments import faults as inject_command
from faultbed.harness.cli.lab import labs
from faultbed.harness.cli.main import SECTIONS, cli
from faultbed.testbed.errors import FaultbedError, Interrupted
from faultbed.testbed.tenancy.dirty import Outcome


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--lab", "nowhere", "status"], 4, ['no inventory "nowhere"', "soft-mini"]),
        (["--lab", "missing.yml", "status"], 4, ["missing.yml"]),
        (["inject", "link.flop", "rtsw1:ctsw1", "--for", "1s"], 4, ["link.flop", "did you mean link.flap"]),
        (["inject", "link.flap", "rtsw9:ctsw1", "--for", "1s"], 4, ["rtsw9:ctsw1", "did you mean"]),
        (["inject", "link.flap", "rtsw1:ctsw1", "--for", "1 parsec"], 4, ["1 parsec", "8s"]),
        (["inject", "gpu.throttle", "host1:gpu0", "--for", "1s"], 4, ["percent"]),
        (["inject", "gpu.throttle", "host1:gpu0", "--for", "1s", "--set", "percent"], 4, ["NAME=VALUE"]),
        (["inject", "link.flap", "rtsw1:ctsw1", "--for", "1s"], 3, ["soft is not up", "up` starts it"]),
        (["traffic", "flow", "--size", "lots"], 4, ['--size: "lots" is not a size', "16MiB"]),
        (["traffic", "flow", "--qp", "timeuot=3"], 4, ["timeuot", "did you mean timeout?"]),
        (["traffic", "collective", "--qp", "retry_cnt=7"], 4, ["retry_cnt must be 0 to 6"]),
        (["traffic", "job", "--qp", "mtu"], 4, ["--qp mtu", "timeout=18"]),
        # Errors that are reported on any lab, even if it is down.
        (["traffic", "flow", "host1:rxe0", "host9:rxe0"], 4, ["host9:rxe0"]),
        (["traffic", "flow", "--check", "--verb", "write"], 4, ["bytes can be checked for"]),
        (
            ["traffic", "flow", "--transport", "ud", "--verb", "send", "--size", "64B", "--qp", "flow_label=3"],
            4,
            ["label"],
        ),
        (["traffic", "flow", "--late-receives", "20ms"], 4, ["late receives need"]),
        (["traffic", "collective", "all-reduce", "--size", "0B"], 4, ['--size: "0B"', "more than 0B"]),
        (["traffic", "collective", "--rank", "host1:rxe0", "--rank", "host9:rxe0"], 4, ["host9:rxe0"]),
        (["traffic", "job", "--grid", "dp=4", "--phase", "tp:all-reduce:64KiB"], 4, ["tp"]),
        (["traffic", "ranking", "--rank", "host9:rxe0"], 4, ["host9:rxe0"]),
        (["run", "nowhere.toml"], 4, ["nowhere.toml"]),
        (["report", "nowhere"], 4, ["no such run directory"]),
        (["reset"], 3, ["not up"]),
        (["heal"], 3, ["not up"]),
        (["--lab", "inventory/rack-h100.example.yml", "up"], 4, ["is a rack lab", "not ours to start"]),
        (["--lab", "inventory/rack-h100.example.yml", "down"], 4, ["is a rack lab"]),
        (["--lab", "inventory/rack-h100.example.yml", "reserve"], 3, ["jump1", "host key"]),
        # A campaign of no run used to end with 0.
        (["campaign", "--only", "packet.dorp"], 4, ["packet.dorp", "did you mean packet.drop?"]),
        (["campaign", "--only", "host.clock-step", "--plan"], 4, ["host.clock-step", "the campaign of soft has no"]),
        (["frobnicate"], 4, ["frobnicate"]),
    ],
)
def test_cli_usage_error_is_one_clear_sentence(faultbed, argv, code, words):
    done = faultbed(*argv)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_cli_foreign_inventory_error_names_what_is_missing(faultbed, tmp_path):
    foreign = tmp_path / "foreign.yml"
    foreign.write_text("all: {hosts: {web1: {ansible_host: 192.0.2.1}}}\n")
    done = faultbed("--lab", str(foreign), "status")
    assert done.returncode == 4
    assert "foreign.yml" in done.stderr
    assert "faultbed_" in done.stderr


def test_status_of_a_lab_that_is_down(faultbed):
    done = faultbed("status", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["state"] == "down"


def test_down_twice_is_no_error(faultbed):
    assert faultbed("down").returncode == 0
    assert "was not up" in faultbed("down").stderr


def test_cli_inject_plan_shows_every_revert_and_touches_nothing(faultbed):
    done = faultbed("inject", "link.flap", "rtsw1:ctsw1", "--for", "1s", "--plan")
    assert done.returncode == 0
    assert "ip -n rtsw1 link set dev ctsw1 down" in done.stdout
    assert "ip -n rtsw1 link set dev ctsw1 up" in done.stdout


def test_cli_plan_is_equal_for_equal_seeds_only(faultbed):
    plans = [
        faultbed("run", "tests/experiments/demo.toml", "--plan", "--json", "--seed", seed).stdout for seed in "778"
    ]
    assert plans[0] == plans[1] != plans[2]
    assert json.loads(plans[0])["seed"] == 7


@pytest.mark.parametrize(
    ("words", "netns", "there"),
    [
        ((), None, []),
        (("rdma", "link"), None, ["rdma link"]),
        ((), "rtsw1", ["ip netns exec rtsw1 bash -l"]),
        (("vtysh", "-c", "show bgp summary"), "rtsw1", ["ip netns exec rtsw1 vtysh -c 'show bgp summary'"]),
        (("sh", "-c", "ip link; ip route"), "rtsw1", ["ip netns exec rtsw1 sh -c 'ip link; ip route'"]),
    ],
)
def test_ssh_command_arguments_arrive_as_typed(words, netns, there):
    """ssh joins its arguments into one line, which the remote shell splits again: they must be quoted."""
    assert labs.ssh_arguments(words, netns) == there


def test_cli_faults_table_is_available_as_json(faultbed):
    kinds = {kind["name"]: kind for kind in json.loads(faultbed("faults", "--json").stdout)}
    assert {"link.flap", "packet.drop", "gpu.throttle"} <= set(kinds)
    assert kinds["packet.drop"]["fidelity"]["soft"] == "real"


def test_help_of_every_command():
    """Every command and subcommand explains itself, in more than a line."""

    def commands(group, path=()):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            yield (*path, name)
            if isinstance(command, click.Group):
                yield from commands(command, (*path, name))

    paths = [(), *commands(cli)]
    assert len(paths) > 12
    for path in paths:
        done = CliRunner().invoke(cli, [*path, "--help"])
        assert done.exit_code == 0
        assert len(done.stdout) > 100, path
        assert r"\b" not in done.stdout, path  # click's mark for a paragraph that keeps its lines must not be printed


def test_cli_inject_json_says_that_another_command_will_compare_the_lab():
    """With a fault of another shell on, the lab is not compared yet; an empty `lab_diff` alone looked like CLEAN."""
    sentence = "the lab will be compared when `inject link.down` (process 7) end, which still run"
    printed = []
    inject_command._show_receipt(
        SimpleNamespace(json=printed.append), SimpleNamespace(to_json=dict), (),
        Outcome(state="CLEAN", reasons=(), sentence=sentence), as_json=True,
    )  # fmt: skip
    assert printed == [{"unproven": [], "lab": sentence, "lab_diff": []}]


def test_cli_profile_prints_the_faults_of_an_experiment(faultbed):
    """The output is TOML, identical for the same seed, and contains its digest."""
    first = faultbed("profile", "llama3-54d", "--seed", "7").stdout
    assert first == faultbed("profile", "llama3-54d", "--seed", "7").stdout
    faults = tomllib.loads(first)["faults"]
    assert faults
    assert {"kind", "target", "at", "for"} <= faults[0].keys()
    output = json.loads(faultbed("profile", "llama3-54d", "--seed", "7", "--json").stdout)
    assert output["sha256"] in first
    assert len(output["faults"]) == len(faults)


def test_cli_ctrl_c_during_imports_is_one_sentence(monkeypatch, capsys):
    """On a busy machine the imports take seconds, in which a user may press Ctrl-C."""

    def interrupted(_name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as end:
        console.main()
    assert end.value.code == 3
    assert capsys.readouterr().err == "faultbed: interrupted before anything was started\n"


def test_cli_missing_package_is_one_sentence(monkeypatch, capsys):
    def missing(_name):
        raise ModuleNotFoundError("No module named 'rich'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SystemExit) as end:
        console.main()
    assert end.value.code == 3
    assert "No module named 'rich'; run `make setup` to install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words", "lines"),
    [
        (OSError(28, "No space left on device", "/full/x"), "/full/x: No space left on device", 1),
        (OSError("odd"), "odd", 1),
        (ZeroDivisionError("by zero"), "internal error: ZeroDivisionError: by zero", None),
    ],
)
def test_cli_unexpected_exception_is_an_error_and_not_a_fail(monkeypatch, capsys, error, words, lines):
    """Python exits with 1 after an exception, but here 1 means FAIL: a bound was checked and violated."""

    @click.command()
    def broken():
        raise error

    monkeypatch.setattr("sys.argv", ["faultbed"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        end_with(broken, "faultbed")
    output = capsys.readouterr().err
    assert end.value.code == 3
    assert words in output
    assert len(output.splitlines()) == lines if lines else "Traceback" in output


def ended(monkeypatch, command):
    """Run a command as `faultbed` does, and return its exit code; the handlers of this process stay."""
    monkeypatch.setattr("sys.argv", ["faultbed"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as end:
            end_with(command, "faultbed")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return end.value.code


def test_cli_ctrl_c_while_an_interrupted_command_closes_the_lab_keeps_its_message_and_exit_code(monkeypatch, capsys):
    """The lab is DIRTY: the second Ctrl-C came while connections were closed, and the command ended with 3."""

    @contextlib.contextmanager
    def lab():
        try:
            yield
        finally:
            raise KeyboardInterrupt

    @click.command()
    def run():
        with lab():
            raise Interrupted("the lab is DIRTY: link.down on a:b is not cleared", exit_code=5)

    assert ended(monkeypatch, run) == 5
    assert "interrupted: the lab is DIRTY" in capsys.readouterr().err


@pytest.mark.parametrize("is_ignored", [True, False])
def test_cli_under_nohup_goes_on_when_its_terminal_closes(monkeypatch, is_ignored):
    """`nohup faultbed sweep ... &` ended at the logout: its handler replaced the one that ignores SIGHUP."""

    @click.command()
    def run():
        signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        assert ended(monkeypatch, run) == (0 if is_ignored else 3)
    finally:
        signal.signal(signal.SIGHUP, before)


ENDS = """
import socket, sys
import click
from faultbed.harness.cli.context import Session
from faultbed.harness.cli.ending import end_with

@click.command()
@click.argument("what")
def command(what):
    if what == "usage":
        raise click.UsageError("no such lab")
    if what == "socket":
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.send(b"x")
    Session(None).json(["x" * 40] * (10_000 if what == "long" else 1))
    return 2

end_with(command, "faultbed")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "closed", "code", "words"),
    [
        ("usage", "stderr", 4, ""),
        ("short", "stdout", 2, ""),
        ("long", "stdout", 2, ""),
        ("socket", "stderr", 3, ""),
        ("socket", "nothing", 3, "closed by its other end"),
    ],
)
def test_cli_exit_code_is_kept_when_the_reader_of_its_output_has_ended(what, closed, code, words):
    """`faultbed run ... | grep -q PASS` ended with 1, which means FAIL, whatever the verdict was."""
    reader, writer = os.pipe()
    os.close(reader)
    outputs = {name: writer if name == closed else subprocess.PIPE for name in ("stdout", "stderr")}
    done = subprocess.run([sys.executable, "-c", ENDS, what], check=False, text=True, timeout=120, cwd=HOUSE, **outputs)
    os.close(writer)
    assert done.returncode == code
    assert words in (done.stderr or "")


@pytest.mark.parametrize("group", [(), ("traffic",), ("inventory",)], ids=["faultbed", "traffic", "inventory"])
def test_cli_list_of_commands_has_whole_sentences(group):
    """click cuts sentences within a word on a narrow terminal."""
    output = CliRunner().invoke(cli, [*group, "--help"], terminal_width=60).output
    listed = output[re.search(r"\n(Commands|Lab):\n", output).end() :].partition("\n  Exit codes")[0]
    assert "..." not in listed.replace('"..."', "")


def test_cli_help_groups_every_command_in_one_column():
    output = CliRunner().invoke(cli, ["--help"], terminal_width=100).output
    assert "Other commands" not in output
    starts = {
        line.rindex("  ") + 2 for line in output.partition("\nLab:\n")[2].splitlines() if re.match(r"  [a-z]", line)
    }
    assert len(starts) == 1


def test_cli_command_without_a_heading_is_listed():
    group = Commands(sections={"Lab": {labs.__name__: "up"}}, commands={"mine": click.Command("mine")})
    output = CliRunner().invoke(group, ["--help"]).output
    assert re.search(r"Lab:\n  up    Bring the soft lab up.*Other commands:\n  mine\n", output, re.DOTALL)


def test_cli_sections_match_the_commands_of_their_modules():
    for modules in SECTIONS.values():
        for module, names in modules.items():
            assert set(names.split()) <= {command.name for command in importlib.import_module(module).COMMANDS}
    assert len(cli.list_commands(click.Context(cli))) == sum(
        len(names.split()) for modules in SECTIONS.values() for names in modules.values()
    )


@pytest.mark.process
def test_cli_command_loads_no_module_of_another_command():
    """Importing the whole command line takes a second of CPU."""
    code = "import sys, faultbed.harness.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [
        name
        for name in loaded
        if name.startswith(("faultbed.harness.cli.lab.", "faultbed.harness.cli.experiments.", "scipy"))
    ]
    assert "numpy" not in loaded


@pytest.mark.process
def test_cli_bisection_and_others_load_neither_run_nor_inject():
    """Importing a colour table and the parser of `--for` once made these commands import everything that a run
    needs."""
    users = (
        "traffic.bisecting",
        "traffic.probing",
        "lab.sharing",
        "experiments.sweeping",
        "experiments.profile_commands",
    )
    code = f"import sys, {', '.join(f'faultbed.harness.cli.{name}' for name in users)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "faultbed.harness.cli.traffic.bisecting" in loaded
    assert not {"faultbed.harness.cli.experiments.runs", "faultbed.harness.cli.experiments.faults"} & set(loaded)


@pytest.mark.process
def test_cli_inject_loads_neither_experiments_nor_workloads():
    """The type of the option `--seed` of `run` once made `inject` import every section of an experiment file."""
    code = "import sys, faultbed.harness.cli.experiments.faults; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "faultbed.inject.injector" in loaded
    prefixes = ("faultbed.harness.experiment.", "faultbed.traffic.workloads", "faultbed.traffic.schedules", "scipy")
    assert not [name for name in loaded if name.startswith(prefixes)]


def test_cli_command_names_its_missing_package():
    group = Commands(sections={"Lab": {"faultbed.harness.cli.no_such_module": "up"}})
    with pytest.raises(FaultbedError, match=r"no_such_module'; run `make setup` to install what is missing"):
        CliRunner().invoke(group, ["up"], catch_exceptions=False)


@pytest.mark.process
def test_closed_output_pipe_does_not_end_the_command():
    """With `faultbed run ... | head` rich would end the process in the middle of a fault with 1, which means FAIL."""
    code = (
        "import os; from pathlib import Path; from faultbed.harness.cli.context import Session\n"
        "out = Session(Path('soft')).out\n"
        "for _ in range(2000): out.print('x' * 200)\n"
        "os._exit(7)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
    assert process.returncode == 7
