"""The role rdma_stack: its apt commands, and that all of it is undone, over a stand-in for apt and dpkg.

The stand-in prints as apt-get(8) and dpkg-query(1) do. Not yet run on hardware.
"""

from __future__ import annotations

import base64
import functools
import json
import os

import pytest
from served_tools import serve_script

TOOL = """\
# apt-get and dpkg-query over a file of what is installed; `repo` is what can be had, with dependencies.
import json, pathlib, sys
house = pathlib.Path({house!r})
tool, args = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
file = house / "installed.json"
there, repo = json.loads(file.read_text()), json.loads((house / "repo.json").read_text())
if tool == "dpkg-query":
    for name in args[3:]:
        if name in there:
            print(name, "installed")
        elif name == "ethtool":
            print(name, "config-files")
    sys.exit(any(name not in there for name in args[3:]))
with (house / "commands").open("a") as commands:
    print(*args, file=commands)
if args[-1] == "update":
    sys.exit(0)
plan, queue = {{}}, [word for word in args[args.index("install") + 1 :] if not word.startswith("-")]
while queue:
    word = queue.pop()
    name, _, version = word.partition("=")
    if name.endswith("-"):
        if name[:-1] in there:
            plan[name[:-1]] = None
        continue
    if not version and name not in repo:
        sys.exit(f"E: Unable to locate package {{name}}")
    version = version or repo[name]["version"]
    if there.get(name) != version and name not in plan:
        plan[name] = version
        queue += [] if "=" in word else repo[name]["needs"]
        broken = [] if "=" in word else repo[name].get("breaks", [])
        plan |= {{other: None for other in broken if other in there}}
for name, version in plan.items():
    old = f" [{{there[name]}}]" if name in there else ""
    if "-s" in args:
        print(f"Remv {{name}}{{old}}" if version is None else f"Inst {{name}}{{old}} ({{version}} Debian:13 [amd64])")
    elif version is None:
        del there[name]
    else:
        there[name] = version
file.write_text(json.dumps(there))
"""
REPO = {
    "perftest": {"version": "24.07", "needs": ["libibverbs1", "libpci3"]},
    "libpci3": {"version": "3.13", "needs": []},
    "rdma-core": {"version": "56.1", "needs": ["libibverbs1"]},
    "libibverbs1": {"version": "56.1", "needs": []},
}
DOCA = {
    "doca-ofed": {"version": "3.1.0", "needs": ["libibverbs1", "mlnx-tools"]},
    "libibverbs1": {"version": "2507mlnx58", "needs": []},
    "mlnx-tools": {"version": "24", "needs": [], "breaks": ["inbox-tools"]},
}
THERE = {"bash": "5.2", "libibverbs1": "56.1", "inbox-tools": "1.0"}
KEY = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n...\n-----END PGP PUBLIC KEY BLOCK-----\n"


@pytest.fixture
def host(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role on a host whose packages are in a file."""
    role, tools = program("rdma_stack"), tmp_path / "bin"
    tools.mkdir()
    for name in ("apt-get", "dpkg-query"):
        serve_script(tools / name, TOOL.format(house=str(tmp_path)))
    (tmp_path / "installed.json").write_text(json.dumps(THERE))
    (tmp_path / "repo.json").write_text(json.dumps(REPO))
    (tmp_path / "root/etc/apt/sources.list.d").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    keep = functools.partial(saved_state, folder=str(tmp_path / "found"), root=str(tmp_path / "root"))
    monkeypatch.setattr(role, "SavedState", keep)

    def configure(*, check=False, **desired):
        made = changes(check=check)
        configure.result = role._configure(
            {
                "flavour": "inbox",
                "packages": ["rdma-core", "perftest"],
                "mirror": "https://mirror.lab.example/doca/",
                "doca_packages": ["doca-ofed"],
                "replace": False,
                "files": {"key": base64.b64encode(KEY.encode()).decode()},
            }
            | desired,
            made,
        )
        return made.made

    def teardown():
        made = changes(check=False)
        keep("rdma_stack", made).restore()
        return made.made

    configure.role, configure.teardown = role, teardown
    configure.installed = lambda: json.loads((tmp_path / "installed.json").read_text())
    configure.commands = lambda: (
        (tmp_path / "commands").read_text().splitlines() if (tmp_path / "commands").exists() else []
    )
    configure.files = lambda: sorted(path.name for path in (tmp_path / "root").rglob("faultbed-*"))
    configure.repo = lambda repo: (tmp_path / "repo.json").write_text(json.dumps(repo))
    configure.root = tmp_path / "root"
    return configure


DKMS = "mlnx-ofed-kernel/25.10.OFED.25.10, {kernel}, x86_64: {state}\n"


@pytest.mark.parametrize(
    ("state", "secure", "words"),
    [
        ("installed", False, None),
        ("installed (original_module exists)", True, None),
        ("added", False, "not built for kernel .*: added"),
        (None, False, "DKMS has no module"),
    ],
)
def test_rdma_stack_source_drivers_must_be_built_for_the_running_kernel(host, tmp_path, state, secure, words):
    """DOCA 3.2 and later: without the headers all packages install well, and there is no driver."""
    kernel = os.uname().release
    repo = {
        "doca-ofed": {"version": "3.2.0", "needs": ["mlnx-ofed-kernel-dkms"]},
        "mlnx-ofed-kernel-dkms": {"version": "25.10", "needs": []},
        f"linux-headers-{kernel}": {"version": "1", "needs": []},
    }
    host.repo(repo)
    output = DKMS.format(kernel=kernel, state=state) if state else ""
    for name, text in (("dkms", output), ("mokutil", "SecureBoot enabled\n" if secure else "SecureBoot disabled\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncat {tmp_path / name}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if words:
        with pytest.raises(host.role.StateError, match=words):
            host(flavour="doca")
    else:
        host(flavour="doca")
        assert ["key is enrolled" in note for note in host.result["notes"]] == ([True] if secure else [])
    assert f"linux-headers-{kernel}" in host.installed()
    host.teardown()
    assert f"linux-headers-{kernel}" not in host.installed()


def test_rdma_stack_installs_missing_packages_once_and_removes_them_with_dependencies(host):
    host()
    assert set(host.installed()) == {*THERE, "rdma-core", "perftest", "libpci3"}
    assert host() == []
    host.teardown()
    assert host.installed() == THERE
    assert host.teardown() == []


def test_rdma_stack_check_mode_lists_the_later_changes_without_network(host):
    assert host(check=True) == host()
    assert host.commands()[0].endswith("update")


def test_rdma_stack_complete_host_is_left_alone(host):
    assert host(packages=["bash", "libibverbs1"]) == []
    assert host(flavour="none") == []
    assert host.commands() == []


def test_rdma_stack_package_with_config_only_is_not_installed(host):
    assert host.role.not_installed(["bash", "ethtool", "perftest"]) == ["ethtool", "perftest"]


def test_rdma_stack_package_replacement_is_named_and_rejected(host):
    host.repo(REPO | DOCA)
    with pytest.raises(host.role.StateError, match=r"upgrade or remove inbox-tools, libibverbs1: .*rdma_stack_replace"):
        host(flavour="doca")
    assert host.installed() == THERE


def test_rdma_stack_doca_comes_from_its_mirror_and_old_versions_return(host):
    host.repo(REPO | DOCA)
    host(flavour="doca", replace=True)
    assert host.installed() == {"bash": "5.2", "libibverbs1": "2507mlnx58", "doca-ofed": "3.1.0", "mlnx-tools": "24"}
    assert host.files() == ["faultbed-doca.asc", "faultbed-doca.sources"]
    text = (host.root / "etc/apt/sources.list.d/faultbed-doca.sources").read_text()
    assert "URIs: https://mirror.lab.example/doca/\nSuites: ./\nSigned-By: /etc/apt/keyrings/faultbed-doca.asc" in text
    assert host(flavour="doca", replace=True) == []
    host.teardown()
    assert host.installed() == THERE
    assert host.files() == []
    assert not (host.root / "etc/apt/keyrings").exists()


def test_rdma_stack_interrupted_installation_is_undone_completely(host, monkeypatch):
    """The undo is recorded before apt starts: here apt dies after one package, and the role runs again."""
    ended = host.role.StateError("apt-get was killed")

    def killed(argv):
        if argv[-1] != "update":
            file = host.root.parent / "installed.json"
            file.write_text(json.dumps(host.installed() | {"libpci3": "3.13"}))
            raise ended

    with monkeypatch.context() as patch:
        patch.setitem(host.role.SavedState.func.command.__globals__, "run", killed)
        with pytest.raises(host.role.StateError, match="was killed"):
            host()
    host()
    assert "perftest" in host.installed()
    host.teardown()
    assert host.installed() == THERE


@pytest.mark.parametrize(
    ("desired", "words"),
    [
        ({"flavour": "ofed"}, "set inbox, doca or none"),
        ({"flavour": "doca", "mirror": ""}, "needs rdma_stack_doca_mirror and rdma_stack_doca_key"),
        ({"flavour": "doca", "files": {}}, "needs rdma_stack_doca_mirror and rdma_stack_doca_key"),
        ({"flavour": "doca", "files": {"key": "QUFB"}}, "no armoured public key"),
        ({"packages": ["nowhere"]}, "Unable to locate package nowhere"),
    ],
)
def test_rdma_stack_impossible_request_is_rejected_without_a_change(host, desired, words):
    with pytest.raises(host.role.StateError, match=words):
        host(**desired)
    assert host.installed() == THERE
    assert host.files() == []


def test_rdma_stack_apt_simulation_is_decoded(program):
    """The output of apt-get -s on Debian 13."""
    output = (
        "Reading package lists...\nThe following NEW packages will be installed:\n  perftest\n"
        "Remv inbox-tools [1.0]\n"
        "Inst libibverbs1 [56.1-1] (2507mlnx58-1.2507097 mirror.lab.example [amd64]) []\n"
        "Inst perftest (24.07.0+0.44-1 Debian:13.1/stable [amd64])\n"
        "Conf libibverbs1 (2507mlnx58-1.2507097 mirror.lab.example [amd64])\n"
    )
    role = program("rdma_stack")
    plan = role.parse_simulation(output)
    assert plan == {"inbox-tools": "1.0", "libibverbs1": "56.1-1", "perftest": None}
    assert role.undo(plan)[-3:] == ["inbox-tools=1.0", "libibverbs1=56.1-1", "perftest-"]
