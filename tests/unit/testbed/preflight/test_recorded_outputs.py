"""Outputs of real tools, from public sources, through every parser: decoded correctly or rejected, never wrong.

`tests/data/recorded/outputs.toml` lists each file's origin and content.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib

import pytest
from house import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.late_binding import bind, connected_qps
from faultbed.inject.mechanisms.mechanism import LateBinding
from faultbed.inject.node.command import match_lines
from faultbed.testbed.backends.rack import power_cycle
from faultbed.testbed.discover import answers, facts
from faultbed.testbed.errors import FaultError, LabError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.preflight import busbw, collect, fec
from faultbed.testbed.preflight.rack_formats import complaint, keeps_up, key_values, link_unreported, link_wrong, qos
from faultbed.testbed.shipped import inventories, playbooks

FOLDER = DATA / "recorded"
END_OF_RUN = "\n# Out of bounds values : 0 OK\n"
"""The line that a run of nccl-tests ends with; the recorded rows have none."""
OUTPUTS = tomllib.loads((FOLDER / "outputs.toml").read_text())["output"]
RACK = lab_inventory.load(inventories() / "rack-h100.example.yml").topology


def of(tool, *, key=None):
    """Return the outputs of a tool; with `key`, only those whose entry has this key."""
    return [each for each in OUTPUTS if each["file"].startswith(f"{tool}/") and (key is None or key in each)]


def named(outputs):
    return pytest.mark.parametrize("one", outputs, ids=[each["file"] for each in outputs])


def text_of(one):
    return (FOLDER / one["file"]).read_text()


@functools.cache
def role(name):
    """Import a role's program outside of Ansible."""
    sys.path.insert(0, str(playbooks() / "module_utils"))
    path = playbooks() / f"roles/{name}/files/{name}.py"
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_outputs_are_fifty_of_thirteen_tools_with_their_origin():
    assert len(OUTPUTS) >= 50
    assert len({each["file"].partition("/")[0] for each in OUTPUTS}) >= 13
    assert all(each["origin"] for each in OUTPUTS)
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert there == {"outputs.toml", *(each["file"] for each in OUTPUTS)}


@named(of("mlxlink", key="wrong"))
def test_mlxlink_outputs_are_decoded(one):
    values = key_values(text_of(one))
    assert [message for message, _ in link_wrong(values)] == one["wrong"]
    assert sorted(link_unreported(values)) == sorted(one["untold"])


@named(of("mlxlink", key="complaint"))
def test_mlxlink_error_output_is_no_link(one):
    assert "State" not in key_values(text_of(one))
    assert complaint("mlxlink", text_of(one)) == one["complaint"]


@named(of("mlxconfig"))
def test_mlxconfig_outputs_are_decoded(one):
    assert role("rnic_host").firmware_settings(text_of(one)) == one["settings"]
    assert {True: "yes", False: "no", None: "not told"}[keeps_up(text_of(one))] == one["keeps_up"]


@named(of("mlnx_qos"))
def test_mlnx_qos_outputs_are_decoded(one):
    have = qos(text_of(one))
    assert (have.trust or "not told") == one["trust"]
    assert sorted(have.pfc) == one["pfc"]
    assert {dscp: have.priority[int(dscp)] for dscp in one["dscp"]} == one["dscp"]
    assert bool(have.priority) == bool(one["dscp"])


@named(of("ethtool"))
def test_ethtool_outputs_are_decoded(one):
    look = fec.read(text_of(one))
    assert look.active == one["active"]
    assert {name: look.counters[name] for name in one["counters"]} == one["counters"]


@named(of("lldpctl"))
def test_lldpctl_outputs_are_decoded(one):
    heard = dict(facts._lldp(text_of(one)))
    for port, (chassis, far) in one["heard"].items():
        assert chassis in str(heard[port])
        assert far in str(heard[port])


def counted(text, rule):
    """Return the count that the holder of an ACL fault would read for the rule; -1: no count."""
    shot = plan(FaultSpec(kind="link.oneway", target="host1:mlx5_0", for_s=5.0), RACK, lab_kind="rack")
    match = re.search(shot.request["args"]["count"][1].replace("DROP", re.escape(rule)), text, re.MULTILINE)
    return int(match[1]) if match else -1


@named(of("aclshow"))
def test_aclshow_outputs_are_decoded(one):
    assert counted(text_of(one), one["rule"]) == one["packets"]


@named(of("sonic-db-cli"))
def test_sonic_db_cli_outputs_are_decoded(one):
    assert role("sonic_switch").capable(text_of(one)) == one["fields"]


@named(of("sonic-cfggen"))
def test_sonic_cfggen_outputs_are_decoded(one):
    tables = {"BUFFER_PROFILE": {"IN": {"pool": "ingress_lossless_pool", "xoff": "1", "dynamic_th": "0"}}}
    assert one["pools"] in "; ".join(role("sonic_switch").fit_pools(tables, json.loads(text_of(one))))


@named(of("nccl-tests", key="busbw"))
def test_nccl_tests_outputs_are_decoded(one):
    run = busbw.read(f"{text_of(one)}{END_OF_RUN}")
    assert {str(line.size_bytes): line.gbytes_per_s for line in run.lines} == one["busbw"]


@named(of("nccl-tests", key="refused"))
def test_nccl_tests_that_cannot_be_read_are_refused(one):
    with pytest.raises(UsageError, match=one["refused"]):
        busbw.read(text_of(one))


@named(of("redfish"))
def test_redfish_outputs_are_decoded(one):
    program, wanted = (
        (power_cycle._ONLY_SYSTEM, one["system"]) if "system" in one else (power_cycle._RESET, one["reset"])
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=text_of(one), text=True, capture_output=True, check=True, timeout=60
    )
    assert done.stdout.strip() == wanted


@named(of("dcgmi"))
def test_dcgmi_gpu_number_is_found_by_its_bus_address(one):
    shot = plan(FaultSpec(kind="gpu.xid", target="host1:gpu0", for_s=5.0), RACK, lab_kind="rack")
    pattern = shot.request["args"]["remember"]["entity"][1]
    ours = re.escape(RACK.resolve("host1:gpu0").gpu.pcie.partition(":")[2])
    for bus, number in one["gpu_ids"].items():
        match = re.search(pattern.replace(ours, re.escape(bus.partition(":")[2])), text_of(one), re.MULTILINE)
        assert (match[1] if match else "none") == number, bus


@named(of("rdma", key="links"))
def test_rdma_link_outputs_are_decoded(one):
    facts_read = collect.Facts()
    collect._read_rdma(facts_read, text_of(one))
    assert {name: list(link) for name, link in facts_read.rdma.items()} == one["links"]
    machine = facts.machine_of("host1", answers.Answers(own={"rdma": text_of(one)}))
    assert dict(machine.rdma) == one["rnics"]
    assert set(machine.excluded_rnics) == set(one["links"]) - set(one["rnics"]), (
        "each other link is reported with its reason"
    )


class OneOutput:
    """A lab whose only host prints one text."""

    def __init__(self, text):
        self.stdout = text

    def node(self, host):
        return self

    def run(self, argv, *, timeout_s):
        return self


@named(of("rdma", key="connected"))
def test_rdma_queue_pairs_are_decoded_or_the_fault_is_refused(one):
    qps = LateBinding(host="host1", rnic="mlx5_0", qp="any", psn_ahead=None)
    words = "no list of queue pairs.*iproute2" if one["connected"] == "none" else "no connected QP any"
    with pytest.raises(FaultError, match=words):
        bind(OneOutput(text_of(one)), qps, qp=None, psn=None, where="fault", timeout_s=1.0)


@pytest.mark.parametrize(("qp", "number"), [("any", 17), ("any[0]", 17), ("any[2]", 19), (18, 18)])
def test_queue_pair_is_chosen_by_its_place_among_the_connected_ones(qp, number):
    listed = [{"lqpn": lqpn, "type": "RC", "state": "RTS"} for lqpn in (19, 17, 18)]
    listed += [{"lqpn": 1, "type": "GSI", "state": "RTS"}, {"lqpn": 20, "type": "RC", "state": "INIT"}]
    lab, binding = OneOutput(json.dumps(listed)), LateBinding(host="host1", rnic="rxe0", qp=qp, psn_ahead=3)
    assert bind(lab, binding, qp=None, psn=None, where="fault", timeout_s=1.0) == {"qp": number, "ahead": 3}
    for missing in ("any[3]", 20):
        binding = LateBinding(host="host1", rnic="rxe0", qp=missing, psn_ahead=3)
        with pytest.raises(FaultError, match="connected: 17, 18, 19"):
            bind(lab, binding, qp=None, psn=None, where="fault", timeout_s=1.0)


def modes(text):
    """Return the modes that the role gpu_host reads in a text."""
    module = role("gpu_host")
    try:
        return dict(module.persistence(text))
    except module.StateError:
        return "refused"


@named(of("nvidia-smi", key="gpus"))
def test_nvidia_smi_lists_of_gpus_are_decoded(one):
    assert {str(gpu.index): gpu.pcie for gpu in facts._gpus(text_of(one))} == one["gpus"]


@named(of("nvidia-smi", key="modes"))
def test_nvidia_smi_persistence_modes_are_decoded(one):
    assert modes(text_of(one)) == one["modes"]


def value(name, text):
    """Return the value that a GPU fault reads in a text, to restore it or to compute with it."""
    kind, _, item = name.partition(" ")
    params = {} if kind == "gpu.lost" else {"percent": 20}
    shot = plan(FaultSpec(kind=kind, target="host1:gpu0", for_s=5.0, params=params), RACK, lab_kind="rack")
    if item == "processes":
        pattern = next(pattern for words, pattern, _ in shot.request["args"]["able"] if "nvidia-smi" in words)
    else:
        pattern = shot.request["args"]["remember"][item][1]
    match = match_lines(pattern, text)
    return "refused" if match is None else match[match.lastindex or 0]


@named(of("nvidia-smi", key="values"))
def test_nvidia_smi_values_are_decoded_or_the_fault_is_refused(one):
    assert {name: value(name, text_of(one)) for name in one["values"]} == one["values"]


ALL = [text_of(each) for each in OUTPUTS]
MESS = st.sampled_from(
    ["", "\n", "\x1b[31m", "N/A", "Fehler: Gerät nicht gefunden\n", "0", "-", ":", "|", "{", '"', "\0"]
)


@settings(deadline=None, max_examples=samples(300))
@given(
    text=st.sampled_from(ALL), start=st.integers(0, 400), end=st.integers(0, 4000), mess=MESS, at=st.integers(0, 2000)
)
def test_parsers_survive_truncated_and_garbled_output(text, start, end, mess, at):
    """Each returns plain data or its one error type; none decodes a number from a text that has none."""
    cut = text[start : start + end]
    garbled = cut[:at] + mess + cut[at:]
    values = key_values(garbled)
    link_wrong(values)
    link_unreported(values)
    assert complaint("tool", garbled).startswith("tool")
    have = qos(garbled)
    assert have.pfc is None or have.pfc <= frozenset(range(8))
    fec.read(garbled)
    assert keeps_up(garbled) in (True, False, None)
    role("rnic_host").firmware_settings(garbled)
    role("sonic_switch").capable(garbled)
    assert role("rdma_stack").dkms_problem(garbled) or "installed" in garbled
    assert counted(garbled, "RULE_1") >= -1
    assert all(re.fullmatch(r"[0-9a-f]*:.*", gpu.pcie) for gpu in facts._gpus(garbled))
    assert modes(garbled) == "refused" or set(modes(garbled).values()) <= {"Enabled", "Disabled"}
    assert value("gpu.throttle max", garbled) == "refused" or value("gpu.throttle max", garbled) in garbled
    try:
        facts.machine_of("host1", answers.Answers(own={"rdma": garbled}))
    except LabError as error:
        assert "rdma -j link" in str(error)
    with contextlib.suppress(
        ValueError, LookupError, TypeError, AttributeError
    ):  # errors that preflight and bind handle
        collect._read_rdma(collect.Facts(), garbled)
        assert set(map(str, connected_qps(garbled))) <= set(re.findall(r"\d+", garbled))
    try:
        busbw.read(garbled)
    except UsageError as error:
        assert str(error)


@settings(deadline=None, max_examples=samples(100))
@given(data=st.data())
def test_nccl_tests_truncated_rows_never_give_other_numbers(data):
    """A truncated row must be ignored, because its numbers would look like a slower or faster result."""
    one = of("nccl-tests", key="busbw")[0]
    text = text_of(one)
    kept = text[: data.draw(st.integers(0, len(text)))]
    try:
        lines = busbw.read(f"{kept}{END_OF_RUN}").lines
    except UsageError:
        return
    assert {str(line.size_bytes): line.gbytes_per_s for line in lines}.items() <= one["busbw"].items()
