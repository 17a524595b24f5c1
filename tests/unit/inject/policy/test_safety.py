"""The owner's policy: a rack allows nothing by default, a soft lab everything. The audit log names users."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.conflicts import touches
from faultbed.inject.policy.safety import Forbidden
from faultbed.testbed.backends.rack import power_cycle
from faultbed.testbed.errors import FaultError, Unsupported, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.audit import audit
from faultbed.testbed.inventory.schema import SafetyVars
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import audit_log

RACK = inventory_module.load(inventories() / "rack-h100.example.yml")
SOFT = inventory_module.load(inventories() / "soft.yml")


def planned(kind, target, for_s=5.0, inventory=RACK, **params):
    spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
    return plan(spec, inventory.topology, lab_kind=inventory.kind)


def under(**policy):
    return replace(RACK, safety=SafetyVars(**policy))


def test_safety_example_allows_its_first_rack_for_two_minutes():
    safety.check(planned("link.down", "host1:mlx5_0", 120), RACK)
    safety.check(planned("link.down", "rtsw1:host2:mlx5_7"), RACK)
    with pytest.raises(Forbidden, match=r"120 s that rack-h100 allows \(faultbed_safety.longest_fault_s\)"):
        safety.check(planned("link.down", "host1:mlx5_0", 120.5), RACK)
    for target in ("host3:mlx5_0", "rtsw1:ctsw1", "rtsw2:host3:mlx5_0"):
        with pytest.raises(Forbidden, match="does not allow"):
            safety.check(planned("link.down", target), RACK)


def test_safety_without_a_policy_allows_nothing_on_a_rack_and_everything_on_a_soft_lab():
    with pytest.raises(Forbidden, match="allows nothing"):
        safety.check(planned("link.down", "host1:mlx5_0"), replace(RACK, safety=None))
    assert SOFT.safety is None
    safety.check(planned("host.rank-kill", "host1", 1e6, SOFT), SOFT)


def test_safety_fault_that_may_spread_needs_confirmation():
    storm = planned("congestion.pfc-storm", "host1:mlx5_0")
    lab = under(may_disrupt=["host1:mlx5_0"], longest_fault_s=60)
    with pytest.raises(Forbidden, match=r"may affect other users of the fabric.*--confirm congestion\.pfc-storm"):
        safety.check(storm, lab)
    safety.check(storm, lab, confirmed=["congestion.pfc-storm"])
    with pytest.raises(Forbidden, match="irreversible: never"):
        never = under(may_disrupt=["host1:mlx5_0"], longest_fault_s=60, irreversible="never")
        safety.check(storm, never, confirmed=["congestion.pfc-storm"])


def test_safety_irreversible_fault_needs_confirmation():
    kill = planned("host.rank-kill", "host1")
    with pytest.raises(Forbidden, match=r"--confirm host\.rank-kill"):
        safety.check(kill, RACK)
    safety.check(kill, RACK, confirmed=["host.rank-kill"])
    with pytest.raises(Forbidden, match="nothing can revert"):
        safety.check(kill, RACK, confirmed=["host.rank-hang"])
    safety.check(kill, under(may_disrupt=["host1"], irreversible="allow"))
    with pytest.raises(Forbidden, match="choose another kind"):
        safety.check(kill, under(may_disrupt=["*"], irreversible="never"), confirmed=["host.rank-kill"])


def test_safety_uplink_pattern_matches_the_names_of_both_ends():
    for pattern in ("rtsw1:ctsw1", "ctsw1:rtsw1", "ctsw1:*"):
        for target in ("rtsw1:ctsw1", "ctsw1:rtsw1"):
            safety.check(planned("link.down", target), under(may_disrupt=[pattern]))


def test_safety_fault_done_from_another_host_needs_permission_for_that_host():
    """Elephant flows to host1 are sent by a host of the other rack, which another user may have reserved."""
    elephants = planned("congestion.background", "host1:mlx5_0", rate=1000)
    assert elephants.place.node == "host3"
    assert touches(elephants, RACK.topology) == ("host1:mlx5_0", "host3")
    with pytest.raises(Forbidden, match="it runs on host3"):
        safety.check(elephants, under(may_disrupt=["host1:*"]))
    safety.check(elephants, under(may_disrupt=["host1:*", "host3"]))
    assert touches(planned("link.oneway", "host1:mlx5_0"), RACK.topology) == ("host1:mlx5_0",)
    assert touches(planned("link.down", "rtsw1:host1:mlx5_0"), RACK.topology) == ("rtsw1:host1:mlx5_0",)


def test_safety_removed_pcie_device_claims_the_buses_of_its_host():
    """The rescan that restores one device would also restore another that must stay removed."""
    assert touches(planned("rnic.remove", "host1:mlx5_0"), RACK.topology) == ("host1:mlx5_0", "host1")
    specs = [FaultSpec(kind="rnic.remove", target=f"host1:mlx5_{n}", at_s=n, for_s=5.0) for n in (0, 1)]
    with pytest.raises(UsageError, match="both change the PCI buses of host1"):
        plan_all(specs, RACK.topology, lab_kind="rack")
    specs[1] = replace(specs[1], target="host2:mlx5_1")
    assert len(plan_all(specs, RACK.topology, lab_kind="rack")) == 2


@given(st.lists(st.sampled_from(["host1", "host1:*", "rtsw1:*", "ctsw?", "nothing"])), st.floats(3, 1000))
def test_safety_more_patterns_never_forbid_more(patterns, for_s):
    """A fault permitted by some patterns is permitted by more of them."""
    fault = planned("link.down", "host1:mlx5_0", for_s)

    def allowed(may):
        try:
            safety.check(fault, under(may_disrupt=may, longest_fault_s=500.0))
        except Forbidden:
            return False
        return True

    assert not allowed(patterns) or allowed([*patterns, "rtsw2:*"])
    assert allowed(["*"]) == (for_s <= 500.0)


def together(inventory, *faults):
    """Check faults of one run, as (kind, target, at, for); return the reason if they are refused."""
    specs = [FaultSpec(kind=kind, target=target, at_s=at_s, for_s=for_s) for kind, target, at_s, for_s in faults]
    try:
        blast_radius.check(plan_all(specs, inventory.topology, lab_kind=inventory.kind), inventory)
    except Forbidden as refused:
        return str(refused)
    return None


RNICS = [("link.down", f"host1:mlx5_{n}", 1.0, 5.0) for n in range(3)]


def test_safety_rack_has_one_fault_at_a_time_unless_the_policy_allows_more():
    """A second link fault during the first is rejected. A later one, or a GPU fault at the same time, is accepted."""
    cautious = under(may_disrupt=["*"])
    assert together(cautious, RNICS[0], ("gpu.lost", "host2:gpu0", 1.0, 5.0)) is None
    assert together(cautious, RNICS[0], ("link.down", "host1:mlx5_1", 6.0, 5.0)) is None
    output = together(cautious, RNICS[0], RNICS[1])
    assert "2 links would be affected at 1 s (rtsw1:host1:mlx5_0, rtsw" in output
    assert "allows 1 (faultbed_safety.most_links)" in output
    assert together(under(may_disrupt=["*"], most_links=2), *RNICS[:2]) is None
    assert "3 links" in together(under(may_disrupt=["*"], most_links=2), *RNICS)
    assert "most_hosts" in together(cautious, *(("gpu.lost", f"host{n}:gpu0", 0.0, 5.0) for n in (1, 2)))


def test_safety_all_uplinks_of_a_rack_switch_need_permission():
    """This covers faults on each uplink, on the switches at their far ends, and on the switch itself."""
    ups = [link.name for link in RACK.topology.links_of("rtsw1") if link.is_uplink]
    spines = sorted({link.other("rtsw1").node for link in RACK.topology.links_of("rtsw1") if link.is_uplink})
    by_links = [("link.down", name, 0.0, 5.0) for name in ups]
    by_spines = [("switch.bgp-kill", name, 0.0, 5.0) for name in spines]
    by_itself = [("switch.bgp-kill", "rtsw1", 0.0, 5.0)]
    wide = {"may_disrupt": ["*"], "most_links": 99, "most_switches": 99}
    for faults in (by_links, by_spines, by_itself):
        assert "all uplinks of rtsw1 would be affected at once" in together(under(**wide), *faults)
        assert together(under(**wide, all_uplinks="allow"), *faults) is None
    assert together(under(**wide), *by_links[1:]) is None
    assert together(under(**wide), ("switch.hash-policy", "rtsw1", 0.0, 5.0)) is None


def test_safety_soft_lab_has_only_its_configured_limits():
    faults = [("link.down", link.name, 0.0, 5.0) for link in SOFT.topology.links]
    assert together(SOFT, *faults) is None
    assert together(replace(SOFT, safety=SafetyVars(may_disrupt=["*"])), *faults) is None
    limited = replace(SOFT, safety=SafetyVars(may_disrupt=["*"], most_links=2))
    assert "most_links" in together(limited, *faults[:3])


def test_injector_counts_faults_already_prepared(tmp_path, monkeypatch):
    """Manual faults have no windows: a prepared fault counts until it is cleared."""
    monkeypatch.setattr("faultbed.inject.leases.lease.Lease.begin", lambda _: None)
    monkeypatch.setattr("faultbed.inject.prepared_fault.PreparedFault.prepare_target", lambda _: {})
    limited = under(may_disrupt=["*"])
    lab = SimpleNamespace(
        inventory_model=limited, name="rack", state_dir=tmp_path / "state", topology=RACK.topology, reserved=("*",)
    )
    with Journal(tmp_path / "journal") as journal:
        injector = Injector(lab, journal)
        first = injector.prepare(planned("link.down", "host1:mlx5_0"))
        with pytest.raises(Forbidden, match="most_links"):
            injector.prepare(planned("link.down", "host1:mlx5_1"))
        assert injector.active() == (first,)
        injector.remove(first)
        injector.prepare(planned("link.down", "host1:mlx5_1"))


def test_injector_checks_the_policy_before_any_action(tmp_path):
    """No channel is opened and nothing is prepared; the refusal is recorded with the revert."""
    lab = SimpleNamespace(
        inventory_model=RACK, name="rack", state_dir=tmp_path / "state", topology=RACK.topology, reserved=("*",)
    )
    with Journal(tmp_path / "journal") as journal, Injector(lab, journal) as injector:
        with pytest.raises(Forbidden):
            injector.prepare(planned("link.down", "host3:mlx5_0"))
        assert injector.active() == ()
    (line,) = audit_log.entries(lab.state_dir)
    assert (line["event"], line["kind"], line["target"]) == ("forbidden", "link.down", "host3:mlx5_0")
    assert line["revert"] == ["mlxlink -d 0000:18:00.0 --port_state UP"]
    assert "@" in line["who"]


def test_audit_log_records_failures(tmp_path, monkeypatch):
    """Recorded are a target's refusal, a fault that cannot be armed, and one whose end is unseen because of Ctrl-C."""
    monkeypatch.setattr("faultbed.inject.leases.lease.Lease.begin", lambda _: None)
    monkeypatch.setattr("faultbed.inject.prepared_fault.Witnesses", lambda *_: SimpleNamespace(before={}))

    def ask(_lease, request):
        if refuses:
            raise FaultError("unexpected state")
        if request["do"] == "arm":
            raise FaultError("no such program")
        if request["do"] == "clear":
            raise KeyboardInterrupt
        return {"before": {}}

    monkeypatch.setattr("faultbed.inject.leases.lease.Lease.request", ask)
    lab = SimpleNamespace(
        inventory_model=RACK, name="rack", state_dir=tmp_path / "state", topology=RACK.topology, reserved=("*",)
    )
    refuses = True
    with Journal(tmp_path / "journal") as journal:
        injector = Injector(lab, journal)
        with pytest.raises(FaultError):
            injector.prepare(planned("link.down", "host1:mlx5_0"))
        refuses = False
        with pytest.raises(KeyboardInterrupt), injector:
            ready = injector.prepare(planned("link.down", "host1:mlx5_0"))
            with pytest.raises(FaultError):
                ready.arm()
    actual = [(line["event"], line.get("detail", "")) for line in audit_log.entries(lab.state_dir)]
    assert actual == [
        ("not prepared", "unexpected state"), ("arming", ""), ("not armed", "no such program"),
        ("not cleared", "its end was not observed: the command was interrupted"),
    ]  # fmt: skip


def test_audit_log_only_grows_and_survives_a_truncated_line(tmp_path):
    audit_log.append(tmp_path, "arming", kind="a")
    first = audit_log.path_of(tmp_path).read_bytes()
    with audit_log.path_of(tmp_path).open("ab") as file:
        file.write(b'{"at": "2026-')
    audit_log.append(tmp_path, "cleared", kind="a")
    assert audit_log.path_of(tmp_path).read_bytes().startswith(first)
    assert [entry["event"] for entry in audit_log.entries(tmp_path)] == ["arming", "cleared"]


@pytest.mark.process
def test_audit_log_loses_no_line_of_many_writers(tmp_path):
    code = (
        "import sys; from pathlib import Path; from faultbed.testbed.tenancy import audit_log as auditlog\n"
        "for n in range(50): auditlog.append(Path(sys.argv[1]), 'arming', n=n, text='x' * 3000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    assert len(list(audit_log.entries(tmp_path))) == 200


def test_audit_reports_a_policy_that_matches_nothing(tmp_path):
    text = (inventories() / "soft-mini.yml").read_text()
    path = tmp_path / "lab.yml"
    policy = "faultbed_safety: {may_disrupt: ['host1:*', 'host9'], longest_fault_s: 0}, faultbed_schema: 1"
    path.write_text(text.replace("faultbed_schema: 1", policy))
    assert [finding.place for finding in audit(path)] == ["all.safety.longest_fault_s", "all.safety.may_disrupt[1]"]
    path.write_text(text.replace("faultbed_schema: 1", "faultbed_safety: {most_hosts: 0}, faultbed_schema: 1"))
    assert [finding.place for finding in audit(path)] == ["all.safety.most_hosts"]


def test_power_cycle_needs_policy_dirty_lab_and_bmc():
    allowed = replace(RACK, safety=SafetyVars(power_cycle="after-heal", may_disrupt=["host?"]))
    elsewhere = replace(RACK, safety=SafetyVars(power_cycle="after-heal", may_disrupt=["host2", "host1:*"]))
    for inventory, dirty, words in (
        (RACK, True, "allows no power cycle"),
        (replace(RACK, safety=None), True, "allows no power cycle"),
        (elsewhere, True, "does not allow it to be disrupted"),
        (allowed, False, "not DIRTY"),
        (replace(allowed, bmcs={}), True, "no faultbed_bmc"),
    ):
        with pytest.raises(Unsupported, match=words):
            power_cycle.plan(inventory, "host1", dirty=dirty)
    with pytest.raises(UsageError, match="no host"):
        power_cycle.plan(allowed, "rtsw1", dirty=True)
    result = power_cycle.plan(allowed, "host1", dirty=True)
    assert "https://198.51.100.11/redfish/v1/Systems " in result.commands[0]
    assert "password" not in " ".join(result.commands).lower()
    ipmi = {name: type(bmc)(address=bmc.address, protocol="ipmi") for name, bmc in RACK.bmcs.items()}
    assert (
        power_cycle.plan(replace(allowed, bmcs=ipmi), "host2", dirty=True).commands[1].endswith("chassis power cycle")
    )


def test_inject_and_power_cycle_commands_apply_the_policy(faultbed, tmp_path):
    rack = ("--lab", "inventory/rack-h100.example.yml")
    shown = faultbed(*rack, "inject", "link.down", "host3:mlx5_0", "--for", "5s", "--plan")
    assert shown.returncode == 0
    assert "would be refused" in shown.stderr
    done = faultbed(*rack, "inject", "link.down", "host3:mlx5_0", "--for", "5s")
    assert (done.returncode, "may_disrupt" in done.stderr) == (4, True)
    shown = faultbed(*rack, "run", "tests/experiments/rack-link.toml", "--plan")
    assert "would be refused" not in shown.stderr
    text = (inventories() / "../tests/experiments/rack-link.toml").read_text()
    forbidden = tmp_path / "forbidden.toml"
    forbidden.write_text(text.replace('target = "host[0]:rnic[0]"', 'target = "host3:mlx5_0"'))
    shown = faultbed(*rack, "run", str(forbidden), "--plan")
    assert (shown.returncode, "would be refused" in shown.stderr) == (0, True), shown.stderr
    assert faultbed(*rack, "power-cycle", "host1").returncode == 4
    written = json.loads(faultbed(*rack, "audit", "--json").stdout)
    assert [(line["event"], line["target"]) for line in written] == [
        ("forbidden", "host3:mlx5_0"), ("power-cycle refused", "host1"),
    ]  # fmt: skip
    assert "may_disrupt" in written[0]["detail"]
