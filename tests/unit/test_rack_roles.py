"""Roles of rack labs: what was found is put back whatever happened between, and a SONiC switch gets what it needs."""

import importlib.util
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.inventory_listing import listing
from testbed.shipped import inventories, playbooks


@pytest.fixture(scope="module")
def load():
    """Import one of our files as Ansible or a node would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(playbooks() / "module_utils"))
        patch.setattr(sys, "dont_write_bytecode", True)

        def one(path):
            spec = importlib.util.spec_from_file_location(f"under_test_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        yield one
    for name in ("faultbed_state", "faultbed_found"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def found(load):
    return load(playbooks() / "module_utils" / "faultbed_found.py").Found


@pytest.fixture(scope="module")
def changes(load):
    return load(playbooks() / "module_utils" / "faultbed_state.py").Changes


def host(folder):
    """A root directory with two sysctls and a file."""
    for path, text in (("proc/sys/net/a", "1\n"), ("proc/sys/vm/b", "4096 131072\n"), ("etc/there", "old\n")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def everything(folder):
    """Every file and folder of a host."""
    return {
        str(path.relative_to(folder)): path.read_text().split() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def role(tmp_path, found, changes):
    """A run of the role on a host below tmp_path."""
    root = host(tmp_path / "root")

    def run(*, check=False):
        made = changes(check=check)
        return found("base", made, folder=str(tmp_path / "found"), root=str(root)), made

    run.root = root
    return run


def test_a_second_run_changes_nothing_and_teardown_puts_all_back(role):
    before = everything(role.root)
    for expected in (4, 0):
        one, made = role()
        one.sysctl("net/a", 5)
        one.sysctl("vm/b", "1 2")
        one.file("/etc/there", "new\n")
        one.file("/etc/new/file", "new\n")
        assert len(made.made) == expected
    assert everything(role.root) != before
    one, made = role()
    assert one.put_back() == 4
    assert everything(role.root) == before
    assert not (role.root.parent / "found").exists(), "the record goes too, and its folder"
    assert role()[0].put_back() == 0


def test_a_folder_that_somebody_else_uses_meanwhile_stays(role):
    role()[0].file("/etc/new/file", "ours\n")
    (role.root / "etc/new/theirs").write_text("theirs\n")
    role()[0].put_back()
    assert sorted(path.name for path in (role.root / "etc/new").iterdir()) == ["theirs"]


def test_a_changed_wish_keeps_the_first_finding(role):
    for value in (5, 6, 7):
        role()[0].sysctl("net/a", value)
    role()[0].put_back()
    assert (role.root / "proc/sys/net/a").read_text().strip() == "1"


def test_a_check_changes_nothing_and_tells_all(role):
    before = everything(role.root)
    one, made = role(check=True)
    one.sysctl("net/a", 5)
    one.file("/etc/there", None)
    assert made.made == ["sysctl net.a=5", "/etc/there removed"]
    assert everything(role.root) == before
    assert role(check=True)[0].put_back() == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sysctl"), st.sampled_from(["net/a", "vm/b"]), st.integers(0, 9)),
        st.tuples(
            st.just("file"), st.sampled_from(["/etc/there", "/etc/x", "/etc/y/z"]), st.sampled_from(["p", "q", None])
        ),
    ),
    max_size=12,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_whatever_was_done_is_put_back(steps, tmp_path_factory, found, changes):
    folder = tmp_path_factory.mktemp("host")
    root = host(folder / "root")
    before = everything(root)
    for kind, path, value in steps:  # each step is a run of its own, as after a crash
        getattr(found("base", changes(check=False), folder=str(folder / "found"), root=str(root)), kind)(path, value)
    found("base", changes(check=False), folder=str(folder / "found"), root=str(root)).put_back()
    assert everything(root) == before


def test_files_of_the_base_host(load):
    files = load(playbooks() / "roles/base_host/files/base_host.py").files
    made = files({"memlock": "infinity"}, {"net/core/rmem_max": 1, "vm/nr_hugepages": 8})
    assert "net.core.rmem_max = 1\nvm.nr_hugepages = 8\n" in made["/etc/sysctl.d/90-faultbed.conf"]
    assert "* hard memlock unlimited" in made["/etc/security/limits.d/90-faultbed.conf"]
    assert "DefaultLimitMEMLOCK=infinity" in made["/etc/systemd/system.conf.d/90-faultbed.conf"]
    assert "DefaultLimitMEMLOCK=65536K" in files({"memlock": 65536}, {})["/etc/systemd/system.conf.d/90-faultbed.conf"]


@pytest.fixture(scope="module")
def tables(load):
    """The ConfigDB of rtsw1 of the rack example, with its variables edited."""
    render = load(playbooks() / "filter_plugins" / "faultbed_sonic.py").sonic_config_db
    hostvars = listing(inventories() / "rack-h100.example.yml")["_meta"]["hostvars"]["rtsw1"]

    def of(**qos):
        return render({**hostvars, "faultbed_qos": {**hostvars["faultbed_qos"], **qos}}, "rtsw1")

    return of


def test_a_sonic_switch_has_its_ports_and_addresses(tables):
    made = tables()
    assert made["PORT"]["Ethernet0"] == {"admin_status": "up", "mtu": "9216", "speed": "400000"}
    assert made["PORT"]["Ethernet128"]["speed"] == "800000"
    assert len(made["PORT"]) == 20
    assert "Ethernet0|10.77.1.0/31" in made["INTERFACE"]
    assert made["INTERFACE"]["Ethernet128"] == {"ipv6_use_link_local_only": "enable"}
    assert "Loopback0|10.78.0.1/32" in made["LOOPBACK_INTERFACE"]


def test_roce_and_cnp_travel_where_the_map_says_and_only_roce_pauses(tables):
    made = tables()
    classes = made["DSCP_TO_TC_MAP"]["FAULTBED"]
    assert (classes["26"], classes["48"], classes["0"], classes["63"]) == ("3", "6", "0", "0")
    assert len(classes) == 64
    assert {port["pfc_enable"] for port in made["PORT_QOS_MAP"].values()} == {"3"}
    assert set(made["QUEUE"]) == {f"{port}|3" for port in made["PORT"]}
    profile = made["WRED_PROFILE"]["FAULTBED_ROCE"]
    assert (profile["ecn"], profile["green_min_threshold"], profile["green_drop_probability"]) == (
        "ecn_all",
        "1024000",
        "20",
    )
    assert made["PFC_WD"]["Ethernet0"]["detection_time"] == "200"
    assert made["PFC_WD"]["GLOBAL"] == {"POLL_INTERVAL": "200"}


def test_a_profile_without_pfc_or_ecn_has_neither(tables):
    made = tables(pfc_priorities=[], ecn=None)
    assert "PFC_WD" not in made
    assert "WRED_PROFILE" not in made
    assert "pfc_enable" not in made["PORT_QOS_MAP"]["Ethernet0"]


def test_config_db_holds_strings_only(tables):
    def leaves(value):
        return [leaf for inner in value.values() for leaf in leaves(inner)] if isinstance(value, dict) else [value]

    assert {type(leaf) for leaf in leaves(tables())} == {str}
    json.dumps(tables())
