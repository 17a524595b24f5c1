"""Faults on a rack lab: plans, and commands that apply, revert and read back, with the tools' documented output.

There is no hardware: the stand-ins in `rack_tools` print what the documentation of the tools says.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import time

import pytest
from nvml_library import Card
from nvml_library import install as install_nvml
from rack_actuator_cases import CASES, HOPS, LINUX, ON_LINUX, RACK, SAMPLES, running
from waiting import until

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.mechanism import Request
from faultbed.inject.mechanisms.rack import MECHANISMS, gpu, linux, resolve
from faultbed.inject.mechanisms.rack.rack_mechanism import COUNTERS
from faultbed.inject.node import commands as commands_module
from faultbed.inject.node.actuator import Refused, make
from faultbed.inject.node.commands import CommandsActuator
from faultbed.inject.node.gpu import gpuneighbour
from faultbed.inject.node.machine.hog import busy_processes
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.shipped import inventories


def shot(kind, target, **params):
    if kind in CATALOGUE:
        return plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), RACK, lab_kind="rack")
    spec = FaultSpec(kind=kind, target=target, for_s=5.0, params=params)
    return resolve(Request(spec=spec, id="0-x-abc123", target=RACK.resolve(target), topology=RACK, where="f"))


def test_rack_mechanisms_all_have_a_sample():
    assert SAMPLES.keys() | ON_LINUX.keys() == MECHANISMS.keys()
    assert {way.kind for way in linux.MECHANISMS} == ON_LINUX.keys()
    assert all(CATALOGUE[kind].on_rack == way.by for kind, way in MECHANISMS.items() if kind in CATALOGUE)


def test_acl_matches_one_sender_and_one_receiver():
    """An ACL selects by addresses like a software hop."""
    planned = shot("packet.drop", "rtsw1:ctsw1", share=1, src="host1:mlx5_0", dst="host3:mlx5_0")
    rule = next(step.do for step in planned.mechanism.steps if "ACL_RULE" in step.do)
    src, dst = (RACK.resolve(name).rnic.ip for name in ("host1:mlx5_0", "host3:mlx5_0"))
    assert f"L4_DST_PORT 4791 SRC_IP {src}/32 DST_IP {dst}/32" in rule


@pytest.mark.parametrize(("kind", "target", "params"), CASES)
def test_rack_plan_shows_every_change_with_its_revert(kind, target, params):
    planned = shot(kind, target, **params)
    assert planned.mechanism.steps
    assert all(step.do and step.undo for step in planned.mechanism.steps)
    assert planned.place.netns is None
    assert not planned.place.local
    assert planned.mechanism.shows
    assert not any(".rxe" in key or "send_err" in key for key in planned.mechanism.must_not_move)
    if kind in CATALOGUE:
        assert planned.binding == "unit"
        assert planned.fidelity == MECHANISMS[kind].fidelity
        assert "rack" not in CATALOGUE[kind].tried, "when it has been run on hardware, say so in the docs too"


OTHERWISE = ("rnic.address", "rnic.remove", "gpu.lost", "gpu.noisy-neighbour", "switch.withdraw")
COMMANDED = [
    case for case in CASES if not case[0].startswith(("host.", "congestion.", "storage.")) and case[0] not in OTHERWISE
]


@pytest.mark.parametrize(("kind", "target", "params"), COMMANDED)
def test_rack_commands_apply_undo_and_read_back(kind, target, params, tools):
    before = json.loads(tools.read_text())
    actuator = make("commands", dict(shot(kind, target, **params).request["args"]))
    assert actuator.prepare()["applied"] is False
    first = actuator.hits()
    actuator.on()
    assert actuator.read()["applied"] is True
    assert json.loads(tools.read_text()) != before
    if first is not None:
        assert actuator.hits() > first
    actuator.off()
    assert actuator.read()["applied"] is False
    assert changed(before, json.loads(tools.read_text())) == []


@pytest.mark.parametrize(("kind", "target", "params"), COMMANDED)
def test_rack_stored_revert_alone_restores_repeatedly(kind, target, params, tools):
    """PID 1 runs the script when every other process is dead; if the fault cannot be undone, the script fails."""
    before = json.loads(tools.read_text())
    actuator = make("commands", dict(shot(kind, target, **params).request["args"]))
    actuator.prepare()
    script = actuator.revert_script()
    actuator.on()
    for _ in range(2):
        done = subprocess.run(["sh"], input=script, text=True, check=False, timeout=60, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert changed(before, json.loads(tools.read_text())) == []
    actuator.on()
    look = actuator.revert_script().splitlines()[-1]
    assert subprocess.run(["sh"], input=f"failed=\n{look}", text=True, check=False, timeout=60).returncode != 0


def changed(before, after):
    """Return the differences, without empty rows and counters."""

    def plain(state):
        tables = {name: {k: v for k, v in state[name].items() if v} for name in ("CONFIG_DB", "STATE_DB")}
        return {**{k: v for k, v in state.items() if k != "packets"}, **tables}

    one, two = plain(before), plain(after)
    return [(key, one[key], two[key]) for key in one if one[key] != two[key]]


@pytest.mark.parametrize(("kind", "target", "params"), COMMANDED)
def test_rack_fault_already_present_is_refused(kind, target, params, tools):
    args = dict(shot(kind, target, **params).request["args"])
    one, two = CommandsActuator(**args), CommandsActuator(**args)
    one.prepare()
    one.on()
    with pytest.raises(Refused, match=r"unexpected state|to restore"):
        two.prepare()


def test_rack_fault_without_tool_or_capability_is_refused(tools):
    args = dict(shot("link.oneway", "host1:mlx5_0").request["args"])
    with pytest.raises(Refused, match="no-such-tool is not installed here"):
        CommandsActuator(**args | {"needs": ["no-such-tool"]}).prepare()
    state = json.loads(tools.read_text())
    state["STATE_DB"]["ACL_STAGE_CAPABILITY_TABLE|EGRESS"]["action_list"] = "COUNTER"
    tools.write_text(json.dumps(state))
    with pytest.raises(Refused, match="ASIC cannot drop at egress"):
        CommandsActuator(**args).prepare()
    with pytest.raises(Refused, match="management"):
        CommandsActuator(**args | {"guard": "lo"}).prepare()


def test_power_limit_below_the_minimum_changes_nothing(tools):
    actuator = make("commands", dict(shot("gpu.power-cap", "host1:gpu0", percent=90).request["args"]))
    actuator.prepare()
    with pytest.raises(OSError, match="below the GPU limit of at least 200 W"):
        actuator.on()
    assert json.loads(tools.read_text())["limit"] == 700


@pytest.mark.parametrize("busy", [True, False])
def test_gpu_throttle_by_five_percent_sets_that_clock_on_a_busy_or_idle_gpu(tools, busy):
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "busy": busy}))
    actuator = make("commands", dict(shot("gpu.throttle", "host1:gpu0", percent=5).request["args"]))
    actuator.prepare()
    actuator.on()
    assert json.loads(tools.read_text())["lock"] == 1881
    assert actuator.read()["applied"]
    actuator.off()
    assert not actuator.read()["applied"]


@pytest.mark.parametrize("percent", [5, 50])
def test_gpu_clocks_locked_by_another_user_are_left_alone(tools, percent):
    """Another user's clock settings could not be restored, because no tool reports the locked values."""
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "lock": 1410}))
    actuator = make("commands", dict(shot("gpu.throttle", "host1:gpu0", percent=percent).request["args"]))
    with pytest.raises(Refused, match="not set by faultbed"):
        actuator.prepare()
    assert json.loads(tools.read_text())["lock"] == 1410


@pytest.mark.parametrize(
    ("kind", "target", "params", "words"),
    [
        ("packet.drop", "host1:mlx5_0", {"share": 0.01}, ["not supported on this lab", "ACL"]),
        ("packet.drop", "host1:mlx5_0", {"psn": 7, "qp": 17}, ["not supported on this lab", "PSN"]),
        ("packet.delay", "host1:mlx5_0", {"delay": 5}, ["not supported on this lab", "a Linux switch"]),
        ("host.freeze", "host1", {}, ["host.freeze is not supported on this lab"]),
        ("gpu.thermal", "host1:gpu0", {}, ["gpu.thermal is not supported on this lab"]),
        ("link.rate", "host1:mlx5_0", {"rate": 5, "direction": "from"}, ["direction", "not supported on this lab"]),
    ],
)
def test_rack_unsupported_fault_is_rejected_at_plan_time(kind, target, params, words):
    with pytest.raises(Unsupported) as caught:
        shot(kind, target, **params)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("kind", "target", "params", "counter"), HOPS)
def test_linux_switch_is_a_software_hop_on_the_machine_itself(kind, target, params, counter):
    """The mechanism is the soft lab's without a namespace; witnesses are counters that hardware RNICs or kernels
    have.
    """
    planned = plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), LINUX, lab_kind="rack")
    switch = "ctsw1" if target == "ctsw1" else "rtsw1"
    assert (planned.place.node, planned.place.netns, planned.place.local) == (switch, None, False)
    assert str(planned.request["claims"]).startswith(switch), "what two faults collide by"
    text = json.dumps(planned.to_json())
    assert not re.search(r"netns exec|ip -n|tc -n|vtysh -N|/run/netns|None[ /]", text), text
    told_by = [key for witness in planned.mechanism.must_move for key in witness.any_of]
    assert planned.mechanism.must_move[0].any_of[0] == counter
    rxe_alone = set(COUNTERS) - set(COUNTERS.values()) | {"send_err"}
    on_hosts = [key for key in (*told_by, *planned.mechanism.must_not_move) if key.startswith("host")]
    assert not [key for key in on_hosts if key.partition(".")[2] in rxe_alone or "/ip." in key]


@pytest.mark.parametrize(
    ("nos", "kind", "target", "params", "words"),
    [
        (("frr",), "packet.delay", "host1:mlx5_0", {"delay": 5}, "no counter of a hardware RNIC.*`direction` from"),
        (("frr",), "packet.forge", "host1:mlx5_0", {"what": "stray"}, "no counter of a hardware RNIC"),
        # The kernel of an ASIC switch does not count forwarded packets, so the far end must be a Linux switch, too.
        (("frr", "frr", "sonic"), "packet.delay", "rtsw1:ctsw1", {"delay": 5}, "no counter of a hardware RNIC"),
        (("frr",), "switch.bgp-kill", "rtsw1", {}, "rtsw1 runs frr, and watchfrr"),
        (("frr",), "switch.freeze", "rtsw1", {}, "rtsw1 runs frr, and watchfrr"),
        (("cumulus",), "packet.drop", "host1:mlx5_0", {"share": 0.1}, "runs cumulus, and its ASIC forwards"),
        (("cumulus",), "link.oneway", "host1:mlx5_0", {}, "runs cumulus, and its ASIC forwards"),
        ((None,), "link.oneway", "host1:mlx5_0", {}, "rtsw1 has no faultbed_nos"),
        (("sonic",), "packet.reorder", "host1:mlx5_0", {"share": 0.1}, "it needs a Linux switch"),
    ],
)
def test_switch_unsupported_fault_is_rejected_with_the_reason(nos, kind, target, params, words):
    spec = FaultSpec(kind=kind, target=target, for_s=5.0, params=params)
    with pytest.raises(Unsupported, match=words):
        plan(spec, running(*nos), lab_kind="rack")


def test_cumulus_runs_the_frr_mechanisms():
    for kind, target in (("switch.withdraw", "rtsw1"), ("link.flap", "rtsw1:ctsw1")):
        planned = plan(FaultSpec(kind=kind, target=target, for_s=5.0), running("cumulus"), lab_kind="rack")
        assert planned.place.node == "rtsw1"


def test_rnic_link_fault_acts_on_its_host_for_any_switch():
    planned = plan(FaultSpec(kind="link.flap", target="host1:mlx5_0", for_s=5.0), LINUX, lab_kind="rack")
    assert planned.place.node == "host1"
    assert planned.mechanism.steps[0].do.startswith("mlxlink")


def test_switch_management_port_is_never_a_target():
    link = RACK.links[0]
    eth0 = dataclasses.replace(link, a=dataclasses.replace(link.a, netdev="eth0"))
    wrong = dataclasses.replace(RACK, links=(eth0, *RACK.links[1:]))
    with pytest.raises(UsageError, match="front-panel port"):
        plan(FaultSpec(kind="link.down", target=link.name, for_s=1.0), wrong, lab_kind="rack")


def test_pcie_device_is_removed_by_its_address():
    planned = shot("rnic.remove", "host1:mlx5_0")
    assert planned.mechanism.steps[0].do == "sh -c 'echo 1 > /sys/bus/pci/devices/0000:18:00.0/remove'"
    assert "/sys/bus/pci/rescan" in planned.mechanism.steps[0].undo
    assert planned.request["args"]["guard"] == "rail0"
    assert all("host1/" not in key for witness in planned.mechanism.must_move for key in witness.any_of)


@pytest.fixture
def lost(tools, tmp_path, monkeypatch):
    """Return a GPU that may leave the bus: its actuator, its path in sysfs and the tools' state."""
    pci = tmp_path / "pci"
    device = pci / "devices" / "0000:dc:00.0"
    device.mkdir(parents=True)
    (pci / "rescan").write_text("")
    tools.write_text(json.dumps(json.loads(tools.read_text()) | {"pci": str(pci)}))
    monkeypatch.setattr(gpu, "PCI", str(pci))
    planned = shot("gpu.lost", "host1:gpu7")
    assert planned.mechanism.shows == {"pcie": "0000:dc:00.0"}
    return make("commands", dict(planned.request["args"])), device, tools


def test_gpu_is_removed_from_the_bus_by_its_driver_and_rescanned(lost):
    actuator, device, tools = lost
    before = tools.read_text()
    actuator.prepare()
    script = actuator.revert_script()
    for revert in (actuator.off, lambda: subprocess.run(["sh"], input=script, text=True, check=True, timeout=60)):
        actuator.on()
        assert not device.exists()
        assert actuator.read()["applied"]
        revert()
        assert device.exists()
        assert not actuator.read()["applied"]
        assert json.loads(tools.read_text()) == json.loads(before)
        (device.parent.parent / "rescan").write_text("")


def test_gpu_in_use_is_refused_and_never_removed_through_sysfs(lost):
    """Otherwise the driver would wait inside the kernel until all programs close the GPU, and block the holder."""
    actuator, device, tools = lost
    assert "remove" not in json.dumps(shot("gpu.lost", "host1:gpu7").request["args"]["on"])
    state = json.loads(tools.read_text())
    tools.write_text(json.dumps(state | {"computing": [4711]}))
    with pytest.raises(Refused, match="a process computes on this GPU"):
        actuator.prepare()
    tools.write_text(json.dumps(state))
    actuator.prepare()
    tools.write_text(json.dumps(state | {"computing": [4711]}))  # the program opened the GPU in between
    with pytest.raises(OSError, match="In use by another client"):
        actuator.on()
    actuator.off()
    assert device.exists()
    assert json.loads(tools.read_text()) == state | {"computing": [4711]}


def test_bit_errors_before_fec_restore_both_offsets_and_toggle_the_port(tools):
    planned = shot("link.fec", "host1:mlx5_0", offset=40)
    actuator = make("commands", dict(planned.request["args"]))
    actuator.prepare()
    actuator.on()
    assert json.loads(tools.read_text())["mixers"] == ["0x28", "0x3"]
    actuator.off()
    state = json.loads(tools.read_text())
    assert (state["mixers"], state["toggles"]) == (["0x1e", "0x3"], 1)
    (witness,) = planned.mechanism.must_move
    # More than 400 Gb/s with a bit error rate of 1e-5 has in the 5 s of the fault and the time around it.
    assert witness.at_least == pytest.approx(1e-5 * 400e9 * 35)
    assert planned.mechanism.quality == tuple(key.rpartition(".")[0] for key in witness.any_of)


def test_bit_errors_before_fec_without_the_firmwares_means_are_refused(tools):
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "mixers": None}))
    actuator = make("commands", dict(shot("link.fec", "host1:mlx5_0", offset=40).request["args"]))
    with pytest.raises(Refused, match="bit errors before FEC cannot be made at this port"):
        actuator.prepare()


def test_bit_errors_before_fec_at_the_offset_that_is_set_already_are_refused(tools):
    actuator = make("commands", dict(shot("link.fec", "host1:mlx5_0", offset=0x1E).request["args"]))
    with pytest.raises(Refused, match="unexpected state"):
        actuator.prepare()


def test_late_receives_are_witnessed_by_the_rnics_of_both_ends():
    """The receiver counts out of buffer, and the other hosts' RNICs count RNR NAKs."""
    planned = shot("congestion.late-receives", "host1", late=200)
    assert (planned.request["actuator"], planned.request["args"]) == ("late_receives", {"late_ms": 200})
    actual, own = ({key.partition("/")[::2] for key in witness.any_of} for witness in planned.mechanism.must_move)
    assert own == {("host1", f"{rnic.name}.out_of_buffer") for rnic in RACK.host_by_name["host1"].rnics}
    others = [host for host in RACK.hosts if host.name != "host1"]
    assert actual == {(host.name, f"{rnic.name}.rnr_nak_retry_err") for host in others for rnic in host.rnics}
    assert planned.mechanism.must_not_move == ()
    assert planned.mechanism.of_workload


class Work:
    """Stand-in for the computation, without a GPU."""

    def __init__(self, *, pcie, number):
        assert (pcie, number) == ("0000:19:00.0", 0)

    def compute(self, units):
        time.sleep(0.001 * units)


class Busy(Card):
    """A GPU on which every busy process of a fault computes."""

    @property
    def pids(self):
        return sorted(busy_processes())

    @pids.setter
    def pids(self, _value):
        """Ignore assignments: the processes are found."""


@pytest.fixture
def card(monkeypatch, tmp_path):
    card = Busy()
    install_nvml(monkeypatch, tmp_path, [Card(bus="00000000:2B:00.0"), card])
    return card


@pytest.fixture
def neighbours(card, monkeypatch):
    monkeypatch.setattr(gpuneighbour, "CudaWork", Work)
    actuator = make("gpu_neighbour", dict(shot("gpu.noisy-neighbour", "host1:gpu0", neighbours=2).request["args"]))
    yield actuator
    actuator.off()


def test_gpu_neighbours_compute_and_end(neighbours):
    """Real processes, which the stand-in for NVML lists as the driver would."""
    assert neighbours.prepare() == {"applied": False, "gpu": "0000:19:00.0", "processes": 0, "computing": 0}
    neighbours.on()
    done = neighbours.hits()
    assert done >= 2
    reading = neighbours.read()
    planned = shot("gpu.noisy-neighbour", "host1:gpu0", neighbours=2)
    assert {name: reading[name] for name in planned.mechanism.shows} == dict(planned.mechanism.shows)
    assert reading["applied"]
    until(lambda: neighbours.hits() > done)
    neighbours.off()
    assert not neighbours.read()["applied"]


def test_gpu_neighbours_on_an_exclusive_gpu_are_refused(neighbours, card, monkeypatch):
    card.mode = 3
    with pytest.raises(Refused, match="compute mode is Exclusive_Process"):
        neighbours.prepare()
    monkeypatch.setattr(nvml, "_DRIVER", "/nowhere/version")
    with pytest.raises(Refused, match=r"no NVIDIA GPU at 0000:19:00.0: no NVIDIA driver is loaded"):
        neighbours.prepare()


def test_gpu_neighbour_that_cannot_start_is_an_error_and_leaves_no_process(card, capfd):
    """The real child process, on a host without CUDA, writes the reason to the holder's stderr."""
    actuator = make("gpu_neighbour", {"pcie": "0000:19:00.0", "count": 2})
    actuator.prepare()
    with pytest.raises(OSError, match="2 of 2 processes did not begin to compute"):
        actuator.on()
    actuator.off()
    assert actuator.read()["processes"] == 0
    assert "no CUDA driver on this host" in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "target", "params"), COMMANDED)
def test_patterns_match_the_same_lines_in_python_and_grep(kind, target, params):
    """The holder reads them with Python, the stored revert with grep -E."""
    args = shot(kind, target, **params).request["args"]
    lines = ["up", "down", "Active", "None", "x1500", "1500", "State:\tT (stopped)", "held 0x2", "GPU 0     79"]
    lines += ["State : N/A", "State : Disable", "State : Polling"]
    for pattern in (args["applied"], args["normal"], *filter(None, (args.get("gone"),))):
        matching = subprocess.run(
            ["grep", "-E", "--", pattern], input="\n".join(lines), text=True, check=False, capture_output=True
        ).stdout
        assert matching.splitlines() == [line for line in lines if re.search(pattern, line, re.MULTILINE)], pattern


def test_rack_user_other_than_root_uses_sudo(tmp_path):
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.remote.ssh import Address

    def address(user):
        return Address(host="192.0.2.11", port=22, user=user, identity=tmp_path / "key", host_key="ssh-ed25519 AAAA")

    model = lab_inventory.load(inventories() / "rack-h100.example.yml")
    with Lab(model, {"host1": address("faultbed"), "host2": address("root")}, accelerator=None) as lab:
        assert lab.node("host1")._prefix == ("sudo", "-n", "--")
        assert lab.node("host2")._prefix == ()


OF_A_WINDOW = ("gpu.ecc", "gpu.row-remap", "gpu.overheat")


@pytest.mark.parametrize(("kind", "target", "params"), COMMANDED)
def test_rack_fault_that_another_program_has_ended_is_lost_or_its_receipt_says_why_not(kind, target, params, tools):
    """An operator brings the port up, restarts BGP or resets the clocks in the middle: nothing noticed."""
    actuator = make("commands", dict(shot(kind, target, **params).request["args"]))
    before = json.loads(tools.read_text())
    actuator.prepare()
    actuator.on()
    assert actuator.is_lost() is False
    assert actuator.loss_unknown_why is None
    tools.write_text(json.dumps(before))
    if kind in OF_A_WINDOW:
        assert actuator.is_lost() is False
        assert "DCGM" in actuator.loss_unknown_why
    else:
        assert actuator.is_lost() is True


def test_idle_gpu_does_not_show_whether_its_clocks_are_still_locked(tools):
    """Its clock is low without a lock, too: neither lost nor silently believed."""
    actuator = make("commands", dict(shot("gpu.throttle", "host1:gpu0", percent=50).request["args"]))
    actuator.prepare()
    actuator.on()
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "lock": None, "busy": False}))
    assert actuator.is_lost() is False
    assert "only a busy one shows" in actuator.loss_unknown_why


@pytest.mark.parametrize("ends", [True, False])
def test_frr_line_that_another_program_has_restored_is_lost(tools, ends):
    """The look is part of the command that restores the line, so that it costs no time of its own."""
    actuator = make("frr", dict(shot("switch.withdraw", "rtsw1").request["args"]))
    actuator.prepare()
    actuator.on()
    if ends:
        tools.write_text(json.dumps({**json.loads(tools.read_text()), "redistributes": True}))
    actuator.off()
    assert actuator.was_lost is ends
    assert actuator.read()["applied"] is False


@pytest.mark.parametrize("daemon", ["bgpd", "zebra"])
def test_frozen_switch_of_which_one_daemon_runs_again_is_lost(tools, daemon):
    """The readback looked at bgpd alone."""
    actuator = make("commands", dict(shot("switch.freeze", "rtsw1").request["args"]))
    actuator.prepare()
    actuator.on()
    assert not actuator.is_lost()
    tools.write_text(json.dumps({**json.loads(tools.read_text()), daemon: "S"}))
    assert actuator.is_lost()
    assert actuator.read()["applied"], "a revert must not stop here"


def kept_by_orchagent(tools):
    """Let the ASIC keep what it is programmed with now, whatever the configuration says from now on."""
    state = json.loads(tools.read_text())
    tools.write_text(json.dumps({**state, "programmed": state["CONFIG_DB"]}))


def test_shaper_that_the_asic_keeps_is_not_cleared(tools, monkeypatch):
    """The configuration was gone at once, which counted as cleared, although orchagent still shaped the port."""
    monkeypatch.setattr(commands_module, "_SCRIPT_TRIES", "1")
    args = dict(shot("link.rate", "rtsw1:host1:mlx5_0", rate=100).request["args"])
    actuator = CommandsActuator(**args | {"settle_s": 0.1})
    actuator.prepare()
    actuator.on()
    kept_by_orchagent(tools)
    actuator.off()
    assert actuator.read()["gone"] is False
    revert = ["sh", "-c", actuator.revert_script()]
    assert subprocess.run(revert, check=False, timeout=60).returncode != 0
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "programmed": None}))
    assert actuator.read()["gone"] is True
    assert subprocess.run(revert, check=False, timeout=60).returncode == 0


def test_ecmp_hash_that_only_the_configuration_has_is_not_armed(tools):
    """The readback was the configuration that the fault itself had written, and any traffic moved its witness."""
    args = dict(shot("switch.hash-policy", "rtsw1").request["args"])
    actuator = CommandsActuator(**args | {"settle_s": 0.1})
    actuator.prepare()
    kept_by_orchagent(tools)
    actuator.on()
    assert actuator.read()["applied"] is False
    actuator.off()
    assert actuator.read()["gone"] is True


@pytest.mark.parametrize(
    ("kind", "target", "params"),
    [case for case in COMMANDED if case[0].startswith(("gpu.", "rnic.")) or case[:2] == ("link.down", "host1:mlx5_0")],
)
def test_device_that_does_not_answer_after_the_revert_is_not_cleared(kind, target, params, tools, monkeypatch):
    """A message of the tool instead of the state counted as its absence, because it does not show the fault."""
    monkeypatch.setattr(commands_module, "_SCRIPT_TRIES", "1")
    args = dict(shot(kind, target, **params).request["args"])
    actuator = CommandsActuator(**args | {"settle_s": 0.1})
    actuator.prepare()
    actuator.on()
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "silent": True}))
    actuator.off()
    readback = actuator.read()
    assert (readback["applied"], readback["gone"]) == (False, False), readback["said"]
    revert = ["sh", "-c", actuator.revert_script()]
    assert subprocess.run(revert, check=False, timeout=60, capture_output=True).returncode != 0
    tools.write_text(json.dumps({**json.loads(tools.read_text()), "silent": False}))
    assert actuator.read()["gone"] is True
    assert subprocess.run(revert, check=False, timeout=60, capture_output=True).returncode == 0
