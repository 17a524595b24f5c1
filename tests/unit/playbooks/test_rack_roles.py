"""Roles of rack labs: the settings found are restored whatever happened in between, and SONiC switches are
configured."""

import functools
import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples
from served_tools import serve_script

from faultbed.testbed import provision
from faultbed.testbed.inventory.ansible_listing import listing
from faultbed.testbed.shipped import inventories, playbooks


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
def role(tmp_path, saved_state, changes):
    """A run of the role on a host below tmp_path."""
    root = host(tmp_path / "root")

    def run(*, check=False):
        made = changes(check=check)
        return saved_state("base", made, folder=str(tmp_path / "found"), root=str(root)), made

    run.root = root
    return run


def test_role_second_run_changes_nothing_and_teardown_restores_everything(role):
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
    assert one.restore() == 4
    assert everything(role.root) == before
    assert not (role.root.parent / "found").exists(), "the record goes too, and its folder"
    assert role()[0].restore() == 0


def test_base_host_sysctls_survive_a_reboot_and_are_restored(role):
    before = everything(role.root)
    for expected in (2, 0):
        one, made = role()
        one.sysctls({"net/a": 5}, "/etc/sysctl.d/90-x.conf")
        assert len(made.made) == expected
    assert "\nnet/a = 5\n" in (role.root / "etc/sysctl.d/90-x.conf").read_text()
    one.sysctls({}, "/etc/sysctl.d/none")
    one.restore()
    assert everything(role.root) == before


def test_role_teardown_keeps_a_folder_with_foreign_files(role):
    role()[0].file("/etc/new/file", "ours\n")
    (role.root / "etc/new/theirs").write_text("theirs\n")
    role()[0].restore()
    assert sorted(path.name for path in (role.root / "etc/new").iterdir()) == ["theirs"]


def test_role_changed_value_keeps_the_first_record(role):
    for value in (5, 6, 7):
        role()[0].sysctl("net/a", value)
    role()[0].restore()
    assert (role.root / "proc/sys/net/a").read_text().strip() == "1"


def test_role_check_mode_changes_nothing_and_lists_everything(role):
    before = everything(role.root)
    one, made = role(check=True)
    one.sysctl("net/a", 5)
    one.file("/etc/there", None)
    assert made.made == ["sysctl net.a=5", "/etc/there removed"]
    assert everything(role.root) == before
    assert role(check=True)[0].restore() == 0


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
@settings(max_examples=samples(60), deadline=None)
def test_role_teardown_restores_any_sequence_of_changes(steps, tmp_path_factory, saved_state, changes):
    folder = tmp_path_factory.mktemp("host")
    root = host(folder / "root")
    before = everything(root)
    for kind, path, value in steps:  # each step is a run of its own, as after a crash
        getattr(saved_state("base", changes(check=False), folder=str(folder / "found"), root=str(root)), kind)(
            path, value
        )
    saved_state("base", changes(check=False), folder=str(folder / "found"), root=str(root)).restore()
    assert everything(root) == before


def test_base_host_writes_its_files(load):
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


def test_sonic_config_has_ports_and_addresses(tables):
    made = tables()
    assert made["PORT"]["Ethernet0"] == {"admin_status": "up", "mtu": "9216", "speed": "400000"}
    assert made["PORT"]["Ethernet128"]["speed"] == "800000"
    assert len(made["PORT"]) == 20
    assert "Ethernet0|10.77.1.0/31" in made["INTERFACE"]
    assert made["INTERFACE"]["Ethernet128"] == {"ipv6_use_link_local_only": "enable"}
    assert "Loopback0|10.78.0.1/32" in made["LOOPBACK_INTERFACE"]


def test_sonic_config_maps_roce_and_cnp_and_pauses_only_roce(tables):
    made = tables()
    classes = made["DSCP_TO_TC_MAP"]["FAULTBED"]
    assert (classes["26"], classes["48"], classes["0"], classes["63"]) == ("3", "6", "0", "0")
    assert len(classes) == 64
    assert {port["pfc_enable"] for port in made["PORT_QOS_MAP"].values()} == {"3"}
    assert {key: row for key, row in made["QUEUE"].items() if key.startswith("Ethernet0|")} == {
        "Ethernet0|3": {"wred_profile": "FAULTBED_ROCE"},
        "Ethernet0|6": {"scheduler": "FAULTBED_STRICT"},
    }
    assert len(made["QUEUE"]) == 2 * len(made["PORT"])
    groups = made["TC_TO_PRIORITY_GROUP_MAP"]["FAULTBED"]
    assert [groups[str(number)] for number in range(8)] == ["0", "0", "0", "3", "0", "0", "0", "0"], (
        "as in SONiC's template: BGP and CNPs must not go to a group without a buffer"
    )
    profile = made["WRED_PROFILE"]["FAULTBED_ROCE"]
    assert (profile["ecn"], profile["green_min_threshold"], profile["green_drop_probability"]) == (
        "ecn_all",
        "1024000",
        "20",
    )
    assert made["PFC_WD"]["Ethernet0"]["detection_time"] == "200"
    assert made["PFC_WD"]["GLOBAL"] == {"POLL_INTERVAL": "200"}


def test_sonic_config_without_pfc_or_ecn_has_neither(tables):
    made = tables(pfc_priorities=[], ecn=None)
    assert "PFC_WD" not in made
    assert "WRED_PROFILE" not in made
    assert "pfc_enable" not in made["PORT_QOS_MAP"]["Ethernet0"], "an empty value is invalid up to 202411"


def test_sonic_unpaused_classes_avoid_a_paused_group_0(tables):
    made = tables(pfc_priorities=[0, 3])
    assert list(made["TC_TO_PRIORITY_GROUP_MAP"]["FAULTBED"].values()) == ["0", "1", "1", "3", "1", "1", "1", "1"]


def test_sonic_cnp_in_a_class_with_data_is_not_strict(tables):
    """Strictly scheduled data would starve all other classes."""
    assert "SCHEDULER" not in tables(cnp_dscp=26)
    assert "SCHEDULER" not in tables(cnp_dscp=1), "best effort"


def test_config_db_holds_strings_only(tables):
    def leaves(value):
        return [leaf for inner in value.values() for leaf in leaves(inner)] if isinstance(value, dict) else [value]

    assert {type(leaf) for leaf in leaves(tables())} == {str}
    json.dumps(tables())


def test_role_command_setting_is_restored_by_its_undo(role):
    """For settings that are not files, the undo is recorded before the change, once, and runs before everything
    else.
    """
    state = role.root / "state"
    state.write_text("dscp\n")

    def configure(want, *, check=False):
        have = state.read_text().strip()
        do, undo = (["sh", "-c", f"echo {word} > {state}"] for word in (want, have))
        one, made = role(check=check)
        one.command("trust", current=have, desired=want, do=do, undo=undo)
        return made.made

    assert configure("pcp", check=True) == ["trust: pcp (was dscp)"]
    assert state.read_text() == "dscp\n"
    assert configure("pcp") == ["trust: pcp (was dscp)"]
    assert configure("pcp") == []
    configure("other")
    assert role()[0].restore() == 1
    assert state.read_text() == "dscp\n"


def test_role_restores_sysfs_values_and_file_modes(role):
    (role.root / "sys").mkdir()
    (role.root / "sys/prio").write_text("0\n")
    (role.root / "etc/there").chmod(0o640)
    one, _ = role()
    assert one.value("/sys/prio", 1)
    assert not one.value("/sys/prio", 1)
    one.file("/etc/there", "new\n")
    assert (role.root / "etc/there").stat().st_mode & 0o777 == 0o640
    role()[0].restore()
    assert (role.root / "sys/prio").read_text().strip() == "0"
    assert ((role.root / "etc/there").read_text(), (role.root / "etc/there").stat().st_mode & 0o777) == ("old\n", 0o640)


MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: dscp
PFC configuration:
	priority    0   1   2   3   4   5   6   7
	enabled     0   0   0   1   0   0   0   0
	buffer      0   0   0   1   0   0   0   0
"""
MLXCONFIG = """\
Device #1:
----------
Device type:    ConnectX7
Configurations:                                      Next Boot
        CNP_DSCP_P1                                 48
        PCI_WR_ORDERING                             per_mkey(0)
        KEEP_ETH_LINK_UP_P1                         True(1)
"""


def test_rnic_tool_output_is_decoded(program):
    """The documented output of mlnx_qos and mlxconfig; not yet run on hardware."""
    rnic = program("rnic_host")
    assert rnic.trust_and_pfc(MLNX_QOS) == ("dscp", "0,0,0,1,0,0,0,0")
    assert rnic.trust_and_pfc("no such device") == (None, None)
    assert rnic.firmware_settings(MLXCONFIG) == {
        "CNP_DSCP_P1": "48",
        "PCI_WR_ORDERING": "0",
        "KEEP_ETH_LINK_UP_P1": "1",
    }


MLNX_QOS_TOOL = """\
# mlnx_qos of one interface, over its state in a file: what its help says of these options.
import json, pathlib, sys
path = pathlib.Path({state!r})
state = json.loads(path.read_text())
for option, value in zip(sys.argv[3::2], sys.argv[4::2]):
    what, dscp, priority = value.split(",")
    state[dscp] = int(priority) if what == "set" else 0
path.write_text(json.dumps(state))
print("Priority trust state: dscp\\ndscp2prio mapping:")
for priority in range(8):
    some = [dscp for dscp in state if state[dscp] == priority]
    print(f"\\tprio:{{priority}} dscp:" + "".join(f"{{int(dscp):02d}}," for dscp in some)) if some else None
"""


def test_rnic_dscp_map_follows_the_inventory_and_is_restored(tmp_path, monkeypatch, program, saved_state, changes):
    """Preflight checks this map on every RNIC and the role sets it. The stand-in follows the tool's help text."""
    rnic, state = program("rnic_host"), tmp_path / "state.json"
    before = {str(dscp): dscp >> 3 for dscp in range(64)} | {"26": 0}
    state.write_text(json.dumps(before))
    serve_script(tmp_path / "mlnx_qos", MLNX_QOS_TOOL.format(state=str(state)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert rnic.dscp_map(MLNX_QOS) == {}

    def configure(*, check=False):
        made = changes(check=check)
        rnic._configure_dscp_map(
            saved_state("rnic_host", made, folder=str(tmp_path / "found")), "rail0", {0: 0, 26: 3, 48: 6}
        )
        return made.made

    assert configure(check=True) == configure() == ["rail0 DSCP 26: 3 (was 0)"]
    assert configure() == []
    assert json.loads(state.read_text())["26"] == 3
    assert saved_state("rnic_host", changes(check=False), folder=str(tmp_path / "found")).restore() == 1
    assert json.loads(state.read_text()) == before


def test_role_restores_a_removed_file_with_its_private_mode_and_keeps_the_record_private(role):
    """FRR's files may contain passwords of neighbours."""
    (role.root / "etc/there").chmod(0o640)
    one, _ = role()
    one.file("/etc/there", None)
    one.file("/etc/new", "ours\n")
    record = role.root.parent / "found/base.json"
    assert "old" in record.read_text()
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert (role.root / "etc/new").stat().st_mode & 0o777 == 0o644
    role()[0].restore()
    assert ((role.root / "etc/there").read_text(), (role.root / "etc/there").stat().st_mode & 0o777) == ("old\n", 0o640)


SETPCI = """\
# setpci -s DEVICE ECAP_ACS+OFFSET.w=VALUE, over configuration spaces whose ACS capability is at 0x140; all numbers hex.
import pathlib, sys
_, device, what = sys.argv[1:]
at, _, value = what.removeprefix("ECAP_ACS+").partition(".w=")
config = pathlib.Path({folder!r}, device, "config")
data = bytearray(config.read_bytes())
data[0x140 + int(at, 16) : 0x142 + int(at, 16)] = int(value, 16).to_bytes(2, "little")
config.write_bytes(data)
"""


@pytest.fixture
def pcie(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role gpudirect_host on a host whose GPU and RNIC are below one switch, with ACS on at its ports."""
    look, folder = program("gpudirect_host"), tmp_path / "devices"
    places = {
        "0000:16:00.0": "pci0000:16/0000:16:00.0",
        "0000:17:00.0": "pci0000:16/0000:16:00.0/0000:17:00.0",
        "0000:18:00.0": "pci0000:16/0000:16:00.0/0000:17:00.0/0000:18:00.0",
        "0000:19:00.0": "pci0000:16/0000:16:00.0/0000:19:00.0",
        "0000:99:00.0": "pci0000:98/0000:99:00.0",
    }
    folder.mkdir()
    for name, place in places.items():
        control, kind = {"0000:18:00.0": (0, "0x020000"), "0000:19:00.0": (0, "0x030200")}.get(name, (0x1D, "0x060400"))
        config = bytearray(4096)
        config[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
        config[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x146:0x148] = control.to_bytes(2, "little")
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "class").write_text(f"{kind}\n")
        (tmp_path / place / "config").write_bytes(config)
        (folder / name).symlink_to(tmp_path / place)
    serve_script(tmp_path / "setpci", SETPCI.format(folder=str(folder)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, place in (("PCI", "devices"), ("CMDLINE", "cmdline"), ("MODULES", "modules"), ("DRIVER", "version")):
        monkeypatch.setattr(look, name, str(tmp_path / place))
    (tmp_path / "modules/nvidia_peermem").mkdir(parents=True)
    (tmp_path / "cmdline").write_text("quiet\n")
    monkeypatch.setattr(look, "SavedState", functools.partial(saved_state, folder=str(tmp_path / "found")))
    desired = {"gpus": [{"kind": "h100-sxm", "pcie": "0000:19:00.0"}], "rnics": [{"pcie": "0000:18:00.0"}]}

    def configure(*, check=False, **edit):
        made = changes(check=check)
        configure.notes = look._configure(desired | {"cmdline": "", "strict": False, "acs_off": False} | edit, made)[
            "notes"
        ]
        return made.made

    configure.look, configure.folder, configure.version = look, folder, tmp_path / "version"
    configure.acs = lambda: {one.name: look.acs_control((one / "config").read_bytes()) for one in folder.iterdir()}
    configure.teardown = lambda: saved_state(
        "gpudirect_host", changes(check=False), folder=str(tmp_path / "found")
    ).restore()
    return configure


def test_acs_is_checked_above_the_inventorys_devices_and_disabled_on_request(pcie):
    before = pcie.acs()
    assert pcie() == []
    assert [note.split(":")[0] for note in pcie.notes] == ["ACS redirects peers at 0000"] * 2
    with pytest.raises(pcie.look.StateError, match=r"at 0000:16:00\.0: set gpudirect_host_acs_off"):
        pcie(strict=True)
    desired = ["0000:16:00.0 ACS: 0011 (was 001d)", "0000:17:00.0 ACS: 0011 (was 001d)"]
    assert pcie(check=True, acs_off=True, strict=True) == pcie(acs_off=True, strict=True) == desired
    assert pcie.acs() == before | {"0000:16:00.0": 0x11, "0000:17:00.0": 0x11}, "a bridge elsewhere is not ours"
    assert pcie(acs_off=True, strict=True) == []
    pcie.teardown()
    assert pcie.acs() == before


@pytest.mark.parametrize(
    ("kind", "cmdline", "wrong"),
    [
        ("DMA-FQ", "quiet", "0000:18:00.0 (DMA-FQ): boot with iommu=pt"),
        ("DMA", "iommu=pt", "0000:18:00.0 (DMA)"),  # the device was switched to a translated domain later
        ("identity", "quiet", None),  # CONFIG_IOMMU_DEFAULT_PASSTHROUGH
        (None, "quiet", "0000:18:00.0 (type unknown)"),  # Linux before 5.11
        (None, "intel_iommu=on iommu=pt", None),
        (None, "iommu.passthrough=1", None),
    ],
)
def test_iommu_is_judged_by_the_domain_of_each_device(pcie, kind, cmdline, wrong):
    group = pcie.folder / "0000:18:00.0/iommu_group"
    group.mkdir()
    if kind:
        (group / "type").write_text(f"{kind}\n")
    (pcie.folder.parent / "cmdline").write_text(f"{cmdline}\n")
    pcie(acs_off=True)
    assert len(pcie.notes) == (wrong is not None)
    assert wrong is None or f"the IOMMU translates for {wrong}" in pcie.notes[0]


def test_gpu_memory_is_reached_by_dma_buf_too(pcie):
    """nvidia_peermem does not load beside the kernel's own RDMA stack, which rdma_stack_flavour inbox leaves."""
    (pcie.folder.parent / "modules/nvidia_peermem").rmdir()
    with pytest.raises(pcie.look.StateError, match="cannot reach GPU memory"):
        pcie(strict=True, acs_off=True)
    pcie.version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n")
    assert not pcie.look.has_dma_buf("6.8.0-45-generic")
    pcie.version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n")
    assert pcie.look.has_dma_buf("6.8.0-45-generic")
    assert not pcie.look.has_dma_buf("5.4.0-1-amd64")
    pcie(acs_off=True)
    assert pcie.notes == []


def test_soft_gpu_host_skips_the_pcie_checks(pcie):
    assert pcie(gpus=[{"kind": "soft"}], strict=True, acs_off=True) == []


def test_acs_is_read_from_configuration_space(program):
    look = program("gpudirect_host")
    assert look.acs_control(bytes(256)) == 0
    assert look.acs_control(b"") == 0
    looped = bytearray(4096)
    looped[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert look.acs_control(bytes(looped)) == 0


@pytest.fixture
def gpus(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role gpu_host over a stand-in nvidia-smi of one GPU; returns the changes that it reported."""
    gpu_host, root, folder = program("gpu_host"), tmp_path / "root", tmp_path / "found"
    output, boot = tmp_path / "commands", root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("first\n")
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\ncase "$*" in *query*) echo 0, Enabled;; *) echo $@ >>{output};; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_host, "SavedState", functools.partial(saved_state, folder=str(folder), root=str(root)))
    desired = {"gpus": [{"kind": "h100-pcie"}], "persistence": True, "fabric_manager": True}

    def configure(lock_mhz, *, check=False):
        made = changes(check=check)
        gpu_host._configure({**desired, "lock_mhz": lock_mhz}, made)
        return made.made

    configure.commands = lambda: output.read_text().splitlines() if output.exists() else []
    configure.reboot = lambda: boot.write_text("second\n")
    configure.teardown = lambda: saved_state(
        "gpu_host", changes(check=False), folder=str(folder), root=str(root)
    ).restore()
    return configure


def test_gpu_clock_change_takes_effect_and_is_locked_again_after_a_reboot(gpus):
    assert len(gpus(1410)) == 1
    assert gpus(1410) == []
    assert gpus(1200, check=True) == ["gpu0 clocks: 1200 (1410 was set in this boot)"]
    assert len(gpus(1200)) == 1
    assert gpus(1200) == []
    gpus.reboot()
    assert gpus(1200) == ["gpu0 clocks: 1200 (nothing was set in this boot)"]
    assert gpus(1200) == []
    assert gpus.commands() == [f"-i 0 -lgc {mhz},{mhz}" for mhz in (1410, 1200, 1200)]
    assert gpus.teardown() == 1
    assert gpus.commands()[-1] == "-i 0 -rgc"


def test_gpu_clock_of_zero_unlocks_an_earlier_lock(gpus):
    assert gpus(0) == []
    gpus(1410)
    assert gpus(0) == ["gpu0 clocks: as it was (1410 was set in this boot)"]
    assert gpus(0) == []
    assert gpus.commands() == ["-i 0 -lgc 1410,1410", "-i 0 -rgc"]
    gpus(1410)
    gpus.reboot()
    assert gpus(0) == []


def test_gpu_modes_are_decoded(program):
    assert program("gpu_host").persistence("0, Enabled\n1, Disabled\n") == [("0", "Enabled"), ("1", "Disabled")]


def test_ptp_needs_a_second_program_only_with_a_hardware_clock(program):
    ptp = program("time_host")
    desired = {"netdev": "ens1f0", "domain": 24, "hardware": True}
    made = ptp.files(desired)
    assert "domainNumber 24" in made[ptp.CONFIG]
    assert "-s ens1f0 -c CLOCK_REALTIME -w -n 24" in made[f"{ptp.UNITS}/{ptp.PHC2SYS}"]
    assert ptp.units(desired | {"hardware": False}) == [ptp.PTP4L]
    assert "time_stamping software" in ptp.files(desired | {"hardware": False})[ptp.CONFIG]


SYSTEMCTL = """\
# systemctl over a file of what is active, with what it was told in another.
import pathlib, sys
house = pathlib.Path({house!r})
active, (verb, *units) = set((house / "active").read_text().split()), sys.argv[1:]
if verb == "is-active":
    print("active" if units[0] in active else "inactive")
    sys.exit(0 if units[0] in active else 3)
with (house / "commands").open("a") as commands:
    print(verb, *units, file=commands)
active = active - set(units) if verb == "stop" else active | set(units)
(house / "active").write_text(" ".join(active))
"""


@pytest.fixture
def clocks(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role time_host over a stand-in for systemctl, on a host where chrony sets the clock."""
    role, root, folder = program("time_host"), tmp_path / "root", tmp_path / "found"
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    (tmp_path / "active").write_text("chrony.service")
    serve_script(tmp_path / "systemctl", SYSTEMCTL.format(house=str(tmp_path)))
    (tmp_path / "ptp4l").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(role, "SavedState", functools.partial(saved_state, folder=str(folder), root=str(root)))

    def configure(*, check=False, **edit):
        made = changes(check=check)
        role._configure({"netdev": "lo", "domain": 0, "hardware": True, "start": True} | edit, made)
        return [line.partition(":")[0] for line in made.made]

    configure.role, configure.files = (
        role,
        lambda: sorted(path.name for path in (root / "etc").rglob("*") if path.is_file()),
    )
    configure.active = lambda: set((tmp_path / "active").read_text().split())
    configure.commands = lambda: (tmp_path / "commands").read_text().splitlines()
    configure.teardown = lambda: saved_state(
        "time_host", changes(check=False), folder=str(folder), root=str(root)
    ).restore()
    return configure


def test_clock_role_runs_one_time_program_and_restores_the_other(clocks):
    """chrony and phc2sys would both steer the same clock."""
    ours = {clocks.role.PTP4L, clocks.role.PHC2SYS}
    assert clocks(check=True) == clocks()
    assert clocks.active() == ours
    assert clocks() == []
    clocks.teardown()
    assert clocks.active() == {"chrony.service"}
    assert clocks.files() == []
    assert clocks.commands()[-1] == "daemon-reload", "systemd has to forget units whose files are gone"


def test_ptp_that_runs_is_restarted_for_a_new_domain_and_once(clocks):
    clocks()
    assert clocks(domain=24, check=True)[-2:] == clocks(domain=24)[-2:] == [clocks.role.PTP4L, clocks.role.PHC2SYS]
    assert clocks.commands()[-2:] == [f"restart {clocks.role.PTP4L}", f"restart {clocks.role.PHC2SYS}"]
    assert clocks(domain=24) == []


def test_ptp_service_ends_when_removed_from_the_inventory(clocks):
    clocks()
    clocks(hardware=False)
    assert clocks.active() == {clocks.role.PTP4L}
    clocks(netdev="")
    assert clocks.active() == {"chrony.service"}
    assert clocks.files() == []
    assert clocks(netdev="") == []


def test_base_host_teardown_removes_our_servers_from_chrony(tmp_path, monkeypatch, program, saved_state, changes):
    role, root, folder = program("base_host"), tmp_path / "root", str(tmp_path / "found")
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    for name, text in (("pgrep", "exit 0"), ("chronyc", f"echo $@ >>{tmp_path}/commands")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(role, "SavedState", functools.partial(saved_state, folder=folder, root=str(root)))
    (root / "etc").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(role, "CHRONY_FILE", str(tmp_path / "faultbed.sources"))
        for _ in range(2):
            role._configure(
                {"sysctls": {}, "hugepages": 0, "memlock": 1, "ntp_servers": ["192.0.2.1"]}, changes(check=False)
            )
    assert (tmp_path / "commands").read_text().splitlines() == ["reload sources"]
    saved_state("base_host", changes(check=False), folder=folder, root=str(root)).restore()
    assert (tmp_path / "commands").read_text().splitlines() == ["reload sources"] * 2


def test_linux_switch_routes_like_a_soft_switch(program):
    hostvars = listing(inventories() / "rack-h100.example.yml")["_meta"]["hostvars"]["rtsw1"]
    desired = {"name": "rtsw1", **{key: hostvars[f"faultbed_{key}"] for key in ("asn", "loopback", "ports")}}
    made = program("frr_switch").config(desired)
    assert "router bgp 65101" in made
    assert made.count("interface peer-group fabric") == 4
    assert "ip address 10.78.0.1/32" in made


def test_back_end_has_a_table_per_rnic_and_no_default_route(program):
    hostvars = listing(inventories() / "rack-h100.example.yml")["_meta"]["hostvars"]["host1"]
    rnic = hostvars["faultbed_rnics"][3]
    made = program("split_host").network(rnic, 3, 9000)
    assert "[RoutingPolicyRule]\nFrom=10.77.1.7\nTable=103\nPriority=1003" in made
    assert "Gateway=10.77.1.6\nTable=103" in made
    assert "DefaultRouteOnDevice" not in made


_CONVERGE = """\
import importlib.util, json, subprocess, sys
house, folder, infiniband = sys.argv[1:]
sys.path.insert(0, house + "/module_utils")
spec = importlib.util.spec_from_file_location("split_host", house + "/roles/split_host/files/split_host.py")
role = importlib.util.module_from_spec(spec)
spec.loader.exec_module(role)
from faultbed_saved import SavedState
from faultbed_state import Changes, StateError
ip = lambda line: subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True).stdout
ip("link set dev lo up")
ip("tuntap add dev rail3 mode tap")
ip("link set dev rail3 address 02:fb:01:01:01:03")
role.INFINIBAND = infiniband
role.sysctls = lambda desired: {}  # no file either: /etc is this machine's
one = {"name": "mlx5_3", "netdev": "rail3", "mac": "02:fb:01:01:01:03"}
one |= {"address": "10.77.1.7/31", "gateway": "10.77.1.6"}
desired = {"front_end": {"netdev": "lo"}, "rnics": [one], "mtu": 9000, "networkd": False, "folder": ""}
role.SavedState = lambda name, changes: SavedState(name, changes, folder=folder)
look = lambda: [ip(x) for x in ("-br link show rail3", "-br -4 address show rail3", "rule", "route show table all")]
def run(check=False, **edit):
    made = Changes(check=check)
    try:
        role._configure(desired | {"rnics": [one | edit]}, made)
    except StateError as error:
        return str(error)
    return made.made
outputs = {"before": look(), "wrong_mac": run(mac="02:00:00:00:00:01"), "check": run(check=True)}
outputs |= {"after_check": look(), "first": run()}
outputs |= {"mtu": json.loads(ip("-j link show rail3"))[0]["mtu"], "second": run()}
outputs |= {"route": ip("route get 10.99.0.1 from 10.77.1.7"), "unknown_address": run(address="10.77.1.9/31")}
for _ in range(2):
    SavedState("split_host", Changes(check=False), folder=folder).restore()
outputs["after"] = look()
ip("link set dev rail3 up"); run(); ip("address flush dev rail3"); ip("rule del priority 1000")
SavedState("split_host", Changes(check=False), folder=folder).restore()
print(json.dumps(outputs))
"""


def test_back_end_is_applied_at_once_and_restored(tmp_path):
    """In a real network namespace, with a tap in place of the RNIC's interface."""
    (tmp_path / "infiniband/mlx5_3").mkdir(parents=True)
    argv = ["unshare", "-rn", sys.executable, "-c", _CONVERGE, playbooks(), tmp_path / "found", tmp_path / "infiniband"]
    if subprocess.run(["unshare", "-rn", "ip", "tuntap", "add", "dev", "a", "mode", "tap"], check=False).returncode:
        pytest.skip("no network namespaces for this user here")
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert "has the MAC 02:fb:01:01:01:03" in output["wrong_mac"]
    assert "has 10.77.1.7/31, the inventory has 10.77.1.9/31" in output["unknown_address"]
    assert output["check"] == output["first"]
    assert [line.partition(":")[0] for line in output["first"]] == [
        "rail3 MTU", "rail3 address", "rail3 state", "rail3 route of table 100", "rail3 rule",
    ]  # fmt: skip
    assert output["second"] == []
    assert "via 10.77.1.6 dev rail3" in output["route"]
    assert output["mtu"] == 9000
    assert output["after_check"] == output["after"] == output["before"]


@pytest.fixture
def storage(tmp_path, monkeypatch, program, saved_state, changes):
    """Runs of the role storage_target over a folder in place of configfs, whose rmdir takes attributes along."""
    role, nvmet, folder, file = program("storage_target"), tmp_path / "nvmet", tmp_path / "found", tmp_path / "it.img"
    nvmet.mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rmdir").write_text('#!/bin/sh\n[ -z "$(find $1 -type l)" ] && rm -r $1\n')
    (tmp_path / "bin/rmdir").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(role, "NVMET", str(nvmet))
    monkeypatch.setattr(role, "SavedState", functools.partial(saved_state, folder=str(folder)))

    def configure(*, check=False, **edit):
        made = changes(check=check)
        desired = {"gib": 1, "file": str(file), "nqn": "nqn.x:y", "port": 4420, "address": "10.79.0.1/24"}
        role._configure(desired | edit, made)
        return len(made.made)

    configure.role, configure.file, configure.nvmet = role, file, nvmet
    configure.at = nvmet / f"ports/{role.PORT_ID}"
    configure.teardown = lambda: saved_state("storage_target", changes(check=False), folder=str(folder)).restore()
    return configure


def test_storage_target_is_a_file_on_a_front_end_port(storage):
    assert storage(check=True) == storage() == 1
    assert storage.file.stat().st_size == 2**30
    assert (storage.at / "addr_traddr").read_text() == "10.79.0.1\n"
    assert (storage.at / "subsystems/nqn.x:y/namespaces/1/device_path").read_text() == str(storage.file)
    assert storage() == 0
    storage.teardown()
    assert not storage.file.exists()
    assert not list(storage.nvmet.rglob("*.*:*"))


def test_storage_target_follows_its_variables_and_keeps_its_data(storage):
    storage()
    with storage.file.open("r+") as file:
        file.write("checkpoint")
    assert storage(port=4421) == 1
    assert (storage.at / "addr_trsvcid").read_text() == "4421\n"
    assert storage(port=4421, nqn="nqn.x:z") == 1
    assert [link.name for link in (storage.at / "subsystems").iterdir()] == ["nqn.x:z"]
    subprocess.run(["rm", "-r", *map(str, storage.nvmet.iterdir())], check=True)  # as after a restart
    assert storage(port=4421, nqn="nqn.x:z", gib=2) == 1
    with storage.file.open("rb") as file:  # most of its 2 GiB is no data
        assert file.read(10) == b"checkpoint"
    assert storage.file.stat().st_size == 2**31
    assert storage(gib=0) == 2
    assert not storage.file.exists()
    assert not storage.at.exists()
    assert storage(gib=0) == 0


def test_storage_target_leaves_a_foreign_file_alone(storage):
    storage.file.write_text("somebody's")
    with pytest.raises(storage.role.StateError, match="name another file"):
        storage()
    storage.teardown()
    assert storage.file.read_text() == "somebody's"


def test_role_variables_are_documented_and_used():
    for role in sorted((playbooks() / "roles").iterdir()):
        defaults, tasks = role / "defaults/main.yml", (role / "tasks/main.yml").read_text()
        if not defaults.exists():
            continue
        text = defaults.read_text()
        for name in yaml.safe_load(text):
            assert name.startswith(f"{role.name}_"), name
            assert name in tasks, name
            above = text.split(f"\n{name}:")[0].rstrip().splitlines()
            assert any(line.startswith("#") for line in above), f"{name} has no comment"


def test_rack_only_files_do_not_invalidate_soft_lab_snapshots():
    """A change of these files must not reprovision soft labs; a change of the listed ones must."""
    files = {str(path.relative_to(playbooks())) for path in provision.files_of_soft_labs(playbooks())}
    assert {"provision.yml", "verify.yml", "ansible.cfg", "module_utils/faultbed_frr.py"} <= files
    assert "roles/roce_host/files/roce_host.py" in files
    assert "filter_plugins/faultbed.py" in files
    assert not any(word in path for path in files for word in ("rack", "rnic_host", "sonic", "teardown", "found"))


@pytest.fixture
def machine(tmp_path, program, saved_state, changes):
    """A machine with records of roles; `teardown` returns its messages or its error."""
    teardown, root, folder = program("host_teardown"), host(tmp_path / "root"), str(tmp_path / "found")
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")

    def run():
        made = changes(check=False)
        try:
            teardown._restore(None, made, folder=folder, root=str(root))
        except teardown.StateError as error:
            return str(error)
        return made.made

    run.root, run.folder, run.order, run.saved_state = root, tmp_path / "found", teardown.ORDER, teardown.SavedState
    run.role = lambda name: saved_state(name, changes(check=False), folder=folder, root=str(root))
    run.reboot = lambda: (root / "proc/sys/kernel/random/boot_id").write_text("second\n")
    return run


def test_teardown_skips_settings_that_vanished_with_a_restart_or_device(machine):
    """configfs is empty after a restart, and an RNIC's sysctls vanish with it: the rest must still be restored."""
    tos = machine.root / "sys/kernel/config/rdma_cm/mlx5_0/default_roce_tos"
    tos.parent.mkdir(parents=True)
    tos.write_text("0\n")
    before = everything(machine.root)
    role = machine.role("rnic_host")
    role.value("/sys/kernel/config/rdma_cm/mlx5_0/default_roce_tos", 104)
    role.sysctl("net/a", 5)
    role.file("/etc/there", "ours\n")
    tos.unlink()
    (machine.root / "proc/sys/net/a").unlink()
    assert len(machine()) == 3
    gone = {str(path.relative_to(machine.root)) for path in (tos, machine.root / "proc/sys/net/a")}
    assert everything(machine.root) == {path: text for path, text in before.items() if path not in gone}
    assert not machine.folder.exists()


def test_teardown_removes_the_configfs_folder_made_for_a_query(machine):
    (machine.root / "config").mkdir()
    assert machine.role("rnic_host").folder("/config/mlx5_0")
    assert machine.role("rnic_host").folder("/config/mlx5_0")
    machine()
    assert not list((machine.root / "config").iterdir())


def test_teardown_continues_after_a_failed_undo_and_retries_it(machine):
    """If a tool is missing, every teardown fails: all else is restored and the undo stays recorded."""
    state = machine.root / "state"
    state.write_text("")
    role = machine.role("rnic_host")
    for key, undo in (
        ("rail1 trust", ["sh", "-c", f"echo rail1 >> {state}"]),
        ("rail0 trust", ["sh", "-c", f"echo rail0 trust >> {state}"]),
        ("rail0 pfc", ["sh", "-c", f"test -e {machine.root}/tool && echo rail0 pfc >> {state}"]),
    ):
        role.command(key, current="1", desired="2", do=["true"], undo=undo)
    role.sysctl("net/a", 5)
    machine.role("base_host").file("/etc/there", "ours\n")
    output = machine()
    assert "rnic_host: not restored: rail0 pfc: `sh -c test" in output
    assert state.read_text() == "rail1\n", "what was changed before it at the same interface waits for it"
    assert (machine.root / "proc/sys/net/a").read_text() == "1"
    assert (machine.root / "etc/there").read_text() == "old\n"
    (machine.root / "tool").write_text("")
    assert machine() == ["rail0 pfc: as it was", "rail0 trust: as it was"]
    assert state.read_text() == "rail1\nrail0 pfc\nrail0 trust\n"
    assert not machine.folder.exists()


def test_teardown_that_is_killed_repeats_no_undo(machine, monkeypatch):
    """`dcb app del` and similar commands fail the second time: a completed undo must leave the record at once."""
    role = machine.role("frr_switch")
    for word in ("first", "second"):
        path = machine.root / word
        path.write_text("")
        role.command(f"swp1 {word}", current="1", desired="2", do=["true"], undo=["rm", str(path)])

    def killed(argv):
        if argv[-1].endswith("first"):
            raise KeyboardInterrupt
        subprocess.run(argv, check=True)

    with monkeypatch.context() as patch:
        patch.setitem(machine.saved_state.restore.__globals__, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            machine()
    assert not (machine.root / "second").exists()
    assert machine() == ["swp1 first: as it was"]


def test_teardown_runs_the_playbook_backwards(machine):
    """The role rdma_stack removes packages whose tools rnic_host needs to restore its settings."""
    output = machine.root / "commands"
    for name in ("base_host", "rdma_stack", "rnic_host"):
        machine.role(name).command(
            name, current="1", desired="2", do=["true"], undo=["sh", "-c", f"echo {name} >> {output}"]
        )
    machine()
    assert output.read_text().split() == ["rnic_host", "rdma_stack", "base_host"]
    assert machine.order == tuple(reversed(provision.roles_of("rack")))


def test_teardown_continues_after_a_record_that_is_not_json(machine):
    machine.role("base_host").file("/etc/there", "ours\n")
    (machine.folder / "rnic_host.json").write_text("{")
    assert machine().startswith("rnic_host: ")
    assert (machine.root / "etc/there").read_text() == "old\n"
