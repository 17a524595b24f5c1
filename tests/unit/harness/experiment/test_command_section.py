"""`[workload]` with `command`: what is wrong is reported with its path and a remedy, before any lab is touched."""

from __future__ import annotations

import pytest
from house import HOUSE

from faultbed.harness.experiment import experiment_file, run_plan
from faultbed.harness.experiment.program.command_section import COPY, command_spec, keep_files
from faultbed.harness.run import loop
from faultbed.harness.run.prepare import bind_to_lab
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories

SHIPPED = HOUSE / "tests/experiments/your-program.toml"
BASE = {
    "command": '"ib_write_bw -d {rnic} {server}"',
    "roles": '{ server = "host3:rxe0", client = "host1:rxe0" }',
    "progress": '"perftest"',
}


def text_of(**keys):
    lines = [f"{key} = {value}" for key, value in {**BASE, **keys}.items() if value]
    return "\n".join(('name = "x"', "[workload]", *lines))


def decode(source="x.toml", **keys):
    return experiment_file.decode(text_of(**keys).encode(), source=str(source))


def fitted(experiment):
    inventory = load(inventories() / "soft.yml")
    return bind_to_lab.fit(experiment, inventory.topology, "soft").workload


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"command": '"ib_write_bw {sever}"'}, "workload.command: no placeholder {sever}"),
        ({"command": '"a | b"'}, "workload.command: | needs a shell"),
        ({"command": "3"}, "workload.command: expected a command, got 3"),
        ({"command": "[]"}, "workload.command: expected a command, got a list"),
        ({"command": '{ server = "a" }'}, 'roles.client: there is no command for the role "client"'),
        ({"command": '{ server = "a", client = "b", storage = "c" }'}, "command.storage: there is no RNIC for"),
        ({"roles": "{}"}, "workload.roles: no role has an RNIC"),
        ({"roles": "{ server = [] }"}, "workload.roles.server: an empty list"),
        ({"roles": '{ rnic = "host1:rxe0" }'}, '"rnic" is a placeholder of its own'),
        ({"progress": '"perftests"'}, 'workload.progress: no reader "perftests"; choose one of'),
        ({"progress": '"lines:("'}, "workload.progress: not a regular expression"),
        ({"progress": ""}, "`progress` is missing"),
        ({"serves": '["sever"]'}, 'serves[0]: no role "sever"; choose one of server, client'),
        ({"serves": '["server", "client"]'}, "workload.serves: every role serves"),
        ({"restart": '"always"'}, 'no restart "always"'),
        ({"files": '["gone.py"]'}, "workload.files[0]: gone.py: No such file or directory"),
        ({"environment": '{ A = "{nope}" }'}, "environment.A: no placeholder {nope}"),
        ({"flow": '"write"'}, "say what runs"),
    ],
)  # fmt: skip
def test_wrong_section_is_refused_with_its_path(keys, says):
    with pytest.raises(ConfigError) as error:
        decode(**keys)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ('{ server = "host9:rxe0" }', "workload.roles.server"),
        ('{ server = "host1" }', '"host1" is a host, not an RNIC'),
        ('{ server = "host1:rxe0", client = "host1:rxe0" }', "host1:rxe0 is already an RNIC of server"),
        ('{ server = "host[9]:rnic[0]" }', "workload.roles.server"),
    ],
)
def test_roles_that_the_lab_does_not_have_are_refused(roles, says):
    with pytest.raises(ConfigError) as error:
        fitted(decode(roles=roles, command='"a"'))
    assert says in str(error.value)


def test_command_for_all_roles_loses_the_own_address_of_a_role():
    spec = command_spec(fitted(decode()), "x.toml")
    assert [(role.name, role.words) for role in spec.roles] == [
        ("server", ("ib_write_bw", "-d", "{rnic}")),
        ("client", ("ib_write_bw", "-d", "{rnic}", "{server}")),
    ]


def test_command_of_a_role_keeps_its_own_address():
    command = '{ server = "iperf -s -B {server}", client = ["iperf", "-c", "{server}"] }'
    spec = command_spec(fitted(decode(command=command)), "x.toml")
    assert spec.roles[0].words == ("iperf", "-s", "-B", "{server}")


def test_shipped_experiment_is_planned_the_same_every_time():
    experiment = experiment_file.load(SHIPPED)
    plans = {run_plan.encode(run_plan.plan(experiment, inventory_digest="00", version="0")) for _ in range(2)}
    assert len(plans) == 1
    assert fitted(experiment).roles == {"server": ("host3:rxe0",), "client": ("host1:rxe0",)}


def resolved_with(target):
    text = SHIPPED.read_text().replace("path[client>server]", target).encode()
    return loop.resolve(experiment_file.decode(text, source="x.toml"), text, load(inventories() / "soft.yml"))


@pytest.mark.parametrize("target", ["path[client>server]", "path[client>host[2]:rnic[0]]", "path[host1:rxe0>server]"])
def test_path_of_roles_is_planned_with_their_rnics(target):
    run = resolved_with(target)
    assert run.plan.faults[0].target == run.faults[0].target.text == "path[host1:rxe0>host3:rxe0]"
    assert [option.target.text for option in run.faults[0].candidates] == ["rtsw1:ctsw1", "rtsw1:ctsw2"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("path[clinet>server]", 'faults[0].target: "path[clinet>server]": no role "clinet"; did you mean client?'),
        ("path[client>client]", "the path ends where it begins"),
        ("path[client>]", 'no role ""'),
        ("path[client]", "is not a selector"),
    ],
)
def test_path_without_two_roles_is_refused_with_its_place(target, says):
    with pytest.raises(ConfigError) as error:
        resolved_with(target)
    assert says in str(error.value)


def test_fault_beyond_the_duration_is_refused():
    text = SHIPPED.read_text().replace('duration = "24s"', 'duration = "11s"')
    with pytest.raises(ConfigError, match="may last until 12 s, but the workload ends at 11 s"):
        fitted(experiment_file.decode(text.encode(), source="x.toml"))


def test_files_are_kept_with_the_run_and_their_change_is_noticed(tmp_path):
    (tmp_path / "train.py").write_text("print('step')")
    source = tmp_path / "x.toml"
    work = fitted(decode(source, files='["train.py"]'))
    assert command_spec(work, str(source)).files == {"train.py": b"print('step')"}
    keep_files(work, str(source), tmp_path)
    (tmp_path / "train.py").unlink()
    assert (tmp_path / COPY / "train.py").exists()
    assert command_spec(work, str(source)).files == {"train.py": b"print('step')"}, "the copy beside it is used"
    (tmp_path / "train.py").write_text("print('other')")
    with pytest.raises(UsageError, match=r"train\.py has changed since the run was planned"):
        command_spec(work, str(source))
