"""Outputs of real tools, from public sources, through every parser: decoded correctly or rejected, never wrong.

`tests/data/recorded/outputs.toml` lists each file's origin and content.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inject.fault_plan import FaultSpec, plan
from testbed.backends.rack import power_cycle
from testbed.discover import facts
from testbed.errors import UsageError
from testbed.inventory import lab_inventory
from testbed.preflight import busbw, fec
from testbed.preflight.rack_formats import complaint, keeps_up, key_values, link_untold, link_wrong, qos
from testbed.shipped import inventories, playbooks

FOLDER = Path(__file__).parents[1] / "data/recorded"
OUTPUTS = tomllib.loads((FOLDER / "outputs.toml").read_text())["output"]
RACK = lab_inventory.load(inventories() / "rack-h100.example.yml").topology


def of(tool, *, key=None):
    """Outputs of a tool; with `key`, those that say that of themselves."""
    return [each for each in OUTPUTS if each["file"].startswith(f"{tool}/") and (key is None or key in each)]


def named(outputs):
    return pytest.mark.parametrize("one", outputs, ids=[each["file"] for each in outputs])


def text_of(one):
    return (FOLDER / one["file"]).read_text()


@functools.cache
def role(name):
    """A role's program, outside of Ansible."""
    sys.path.insert(0, str(playbooks() / "module_utils"))
    path = playbooks() / f"roles/{name}/files/{name}.py"
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_outputs_are_thirty_of_eight_tools_with_their_origin():
    assert len(OUTPUTS) >= 30
    assert len({each["file"].partition("/")[0] for each in OUTPUTS}) >= 8
    assert all(each["origin"] for each in OUTPUTS)
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert there == {"outputs.toml", *(each["file"] for each in OUTPUTS)}


@named(of("mlxlink", key="wrong"))
def test_mlxlink_outputs_are_decoded(one):
    values = key_values(text_of(one))
    assert [found for found, _ in link_wrong(values)] == one["wrong"]
    assert sorted(link_untold(values)) == sorted(one["untold"])


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
    """What the holder of an ACL fault would count of that rule; -1: nothing."""
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
    run = busbw.read(text_of(one))
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


ALL = [text_of(each) for each in OUTPUTS]
MESS = st.sampled_from(
    ["", "\n", "\x1b[31m", "N/A", "Fehler: Gerät nicht gefunden\n", "0", "-", ":", "|", "{", '"', "\0"]
)


@settings(deadline=None, max_examples=300)
@given(
    text=st.sampled_from(ALL), start=st.integers(0, 400), end=st.integers(0, 4000), mess=MESS, at=st.integers(0, 2000)
)
def test_parsers_survive_truncated_and_garbled_output(text, start, end, mess, at):
    """Each returns plain data or its one error type; none decodes a number from a text that has none."""
    cut = text[start : start + end]
    garbled = cut[:at] + mess + cut[at:]
    values = key_values(garbled)
    link_wrong(values)
    link_untold(values)
    assert complaint("tool", garbled).startswith("tool")
    have = qos(garbled)
    assert have.pfc is None or have.pfc <= frozenset(range(8))
    fec.read(garbled)
    assert keeps_up(garbled) in (True, False, None)
    role("rnic_host").firmware_settings(garbled)
    role("sonic_switch").capable(garbled)
    assert role("rdma_stack").unbuilt(garbled) or "installed" in garbled
    assert counted(garbled, "RULE_1") >= -1
    try:
        busbw.read(garbled)
    except UsageError as error:
        assert str(error)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_nccl_tests_truncated_rows_never_give_other_numbers(data):
    """A row is whole or is no row: what is left of one must not be read as a slower or faster one."""
    one = of("nccl-tests", key="busbw")[0]
    text = text_of(one)
    kept = text[: data.draw(st.integers(0, len(text)))]
    try:
        lines = busbw.read(kept).lines
    except UsageError:
        return
    assert {str(line.size_bytes): line.gbytes_per_s for line in lines}.items() <= one["busbw"].items()
