"""The switch agent on a real kernel records what other programs change of its scheme, and what BGP loses."""

from __future__ import annotations

import json
import struct

import pytest
from own_namespace import answer_of, in_a_namespace

from faultbed.testbed.node.netlink import attribute
from faultbed.testbed.node.routing import marking_rules
from faultbed.testbed.node.routing.deviations import BGP, FOREIGN, SETTING, UNWATCHED, Deviation, DeviationLog

P2, P3 = "10.77.2.0/31", "10.77.3.0/31"


@pytest.fixture(scope="module")
def recorded():
    return in_a_namespace("switch_watched.py")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("route replaced", f"1 of 4 routes were not the scheme's: {P2} in table 1001 led to up2"),
        ("route replaced under its protocol", f"1 of 4 routes were not the scheme's: {P2} in table 1001 led to up2"),
        ("more specific route", "1 of 4 routes were not the scheme's: 10.77.2.1/32 in table 1001 led to no port"),
        ("rule moved", "1 of 2 rules of the scheme were missing"),
        ("rule removed", "1 of 2 rules of the scheme were missing"),
        ("rule before", "a rule of priority 500 (lookup 254) was there, which is not the scheme's"),
        ("weights", f"1 of 2 routes were not the scheme's: {P2} in table 1000 led to up1, up2"),
        ("members", "1 next hops or next-hop groups were not the scheme's"),
        ("route before it", f"1 of 4 routes were not the scheme's: {P2} in table 1001 led to up2"),
        ("route for one type of service", f"1 of 4 routes were not the scheme's: {P2} in table 1001 led to up2"),
        ("rule narrowed", "1 of 2 rules of the scheme were missing"),
        ("rule beside that of a fault", "a rule of priority 900 (lookup 77) was there, which is not the scheme's"),
        ("ecmp, rule before main", "a rule of priority 30000 (lookup 77) was there, which is not the scheme's"),
        ("ecmp, rule of main moved", "a rule of priority 32766 (lookup 254) was gone"),
    ],
)
def test_switch_agent_records_a_change_of_another_program_that_was_put_back(recorded, change, what):
    during, after = recorded[change]["during"], recorded[change]["after"]
    assert [(one["cause"], one["what"], one["end_ns"]) for one in during] == [(FOREIGN, what, None)]
    assert [(one["cause"], one["what"]) for one in after] == [(FOREIGN, what)]
    assert recorded[change]["put off"], "a comparison that comes too early is made later"
    assert recorded[change]["in time"] == [True]


def test_switch_agent_records_next_hops_that_bgp_lost_by_port_and_prefix(recorded):
    """Its own copies after BGP are no deviation."""
    (lost,) = recorded["withdrawn by BGP"]["after"]
    assert (lost["cause"], lost["port"], lost["prefix"]) == (BGP, "up1", P2)
    assert recorded["withdrawn by BGP"]["in time"] == [True]
    link_down = recorded["link down"]["after"]
    assert {(one["cause"], one["port"]) for one in link_down} == {(BGP, "up1")}
    assert {one["prefix"] for one in link_down} == {P2, P3}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("ecmp, route replaced", f"the main table had a route to {P2} of another program (protocol 4)"),
        ("ecmp, more specific route", "the main table had a route to 10.77.2.1/32 of another program (protocol 4)"),
        ("route of the local table", f"the local table had a route to {P2} of another program (protocol 4)"),
        ("ecmp, address on the switch", "the local table had a route to 10.77.2.1/32 of another program (protocol 2)"),
        ("ecmp, weights", f"the main table had next hops with unequal weights to {P2}"),
        ("ecmp, another port", f"the main table had a next hop by far1 to {P2}, which is not planned"),
    ],
)
def test_switch_agent_records_how_the_kernels_own_tables_led_elsewhere(recorded, change, what):
    (added,) = recorded[change]["after"]
    assert (added["cause"], added["what"]) == (FOREIGN, what)
    assert recorded[change]["in time"] == [True]


def test_switch_agent_of_plain_ecmp_records_next_hops_that_bgp_lost(recorded):
    (lost,) = recorded["ecmp, withdrawn by BGP"]["after"]
    assert (lost["cause"], lost["port"], lost["prefix"]) == (BGP, "up1", P2)


def test_switch_agent_sees_a_deletion_that_the_kernel_reports_before_it_makes_it(recorded):
    """On a lab's switches a single deletion was read too early, and nothing was read after it."""
    main, scheme = recorded["deleted late"]["main"], recorded["deleted late"]["scheme"]
    assert {(one["cause"], one["port"], one["prefix"]) for one in main} == {(BGP, "up1", P2), (BGP, "up2", P2)}
    assert [(one["cause"], one["what"]) for one in scheme] == [
        (FOREIGN, f"1 of 4 routes were not the scheme's: {P2} in table 1001 was missing")
    ]


def test_scheme_that_installs_nothing_is_applied_while_its_switches_are_watched(recorded):
    states = [(each["applied"], each["whole"], each["rules"], each["routes"]) for each in recorded["only watching"]]
    assert states == [(False, False, 0, 0), (True, True, 0, 0), (False, False, 0, 0)]


@pytest.mark.parametrize(
    "change", ["rule of a fault", "nothing of the scheme", "ecmp, rule of a fault", "ecmp, nothing of the scheme"]
)
def test_switch_agent_records_nothing_of_faults_and_of_others_beside_the_scheme(recorded, change):
    assert recorded[change]["after"] == []


def test_switch_agent_follows_bgp_once_more_before_its_last_comparison(recorded):
    """Tables that are behind BGP are no deviation; a foreign route ends when the agent overwrites or removes it."""
    found = {one["cause"]: one for one in recorded["at the end"]}
    assert set(found) == {FOREIGN, BGP}
    assert found[FOREIGN]["end_ns"] is not None
    assert (found[BGP]["port"], found[BGP]["end_ns"]) == ("up2", None)


def test_switch_agent_whose_last_comparison_never_ended_says_that_it_did_not_watch(recorded):
    (unknown,) = recorded["restless"]
    assert (unknown["cause"], unknown["what"]) == (
        UNWATCHED, "the main table changed during each of the last comparisons",
    )  # fmt: skip


def test_switch_agent_records_a_rule_that_was_there_before_the_scheme(recorded):
    """Sample packets of another source do not meet it."""
    (rule,) = recorded["rule from before"]
    assert (rule["cause"], rule["what"]) == (
        FOREIGN, "a rule of priority 500 (lookup 77) was there, which is not the scheme's",
    )  # fmt: skip
    assert rule["end_ns"] is not None


def test_scheme_actuator_is_polled_only_while_a_comparison_is_put_off(recorded):
    assert recorded["polls"]["polls"] == [0.5, 0.25, 0.25, 0.5], "a changed switch is compared twice"
    readback = recorded["polls"]["readback"]
    assert readback["applied"] is False
    assert [(one["cause"], one["end_ns"], one["netns"]) for one in readback["deviations"]] == [(FOREIGN, None, None)]


ENTRY = "the neighbour entry of 169.254.0.1 on up1"


@pytest.mark.parametrize(
    ("case", "cause", "what", "is_over"),
    [
        ("policy during", SETTING, "net.ipv4.fib_multipath_hash_policy was 0, not 1", False),
        ("policy_changed", SETTING, "net.ipv4.fib_multipath_hash_policy was 0, not 1", True),
        ("neighbour_changed", FOREIGN, f"{ENTRY} led to 02:00:00:00:00:02, not to 02:00:00:00:00:01", True),
        (
            "neighbour_wrong_until_the_end",
            FOREIGN,
            f"{ENTRY} led to 02:00:00:00:00:02, not to 02:00:00:00:00:01",
            False,
        ),
        ("neighbour_deleted", FOREIGN, f"{ENTRY} was gone", False),
    ],
)
def test_switch_agent_records_settings_and_neighbours_that_lead_elsewhere(recorded, case, cause, what, is_over):
    """Policy 1, 0, 1 under plain ECMP put all flows on one uplink, and nothing was recorded; so did an entry."""
    (only,) = recorded["path choice"][case]
    assert (only["cause"], only["what"], only["end_ns"] is not None) == (cause, what, is_over)
    assert only["begin_ns"] < (only["end_ns"] or only["begin_ns"] + 1), "from the last look without it"


def test_switch_agent_whose_settings_were_not_read_for_long_says_so(recorded):
    (only,) = recorded["path choice"]["not_looked"]
    assert only["cause"] == UNWATCHED
    assert only["what"].startswith("the settings of ECMP were not read for 100")
    assert only["end_ns"] - only["begin_ns"] > 1000e9


def test_switch_agent_blames_no_neighbour_of_a_port_that_went_down_or_is_not_the_schemes(recorded):
    assert {one["cause"] for one in recorded["path choice"]["port_down"]} == {BGP}
    assert recorded["path choice"]["nothing"] == []


def test_switch_agent_that_lost_notifications_says_when_it_did_not_watch(recorded):
    (lost,) = recorded["overrun"]
    assert (lost["cause"], lost["what"]) == (
        UNWATCHED, "the kernel dropped notifications, because more came than were read",
    )  # fmt: skip
    assert lost["begin_ns"] < lost["end_ns"]


def test_switch_agent_records_marks_that_were_flushed_and_loaded_again(recorded):
    if recorded["marks"] is None:
        pytest.skip("no nft here; the lab's switches have it")
    table = "nftables had a table of another program, whose rules may change marks: ip other"
    assert [(one["cause"], one["what"]) for one in recorded["marks"]] == [
        (FOREIGN, "the nftables marks were not the scheme's"), (FOREIGN, table),
    ]  # fmt: skip
    assert all(one["end_ns"] is not None for one in recorded["marks"])


def test_switch_agent_reads_nftables_of_its_own_marks_and_of_other_programs_only():
    """A fault's own table is armed and cleared while the workload runs, and nft costs an emulated switch 0.1 s."""

    def message(kind, table):
        body = bytes(4) + attribute(1, table)
        return struct.pack("=IHHII", 16 + len(body), 0xA00 | kind, 0, 0, 0) + body

    generation = message(15, b"\0\0\0\7")
    assert not marking_rules.concerns_marks(message(6, b"faultbed_7cf9f21b\0") + generation)
    assert marking_rules.concerns_marks(message(6, b"faultbed_routing\0") + generation)
    assert marking_rules.concerns_marks(message(6, b"faultbed_7cf9f21b\0") + message(0, b"other\0"))


def test_switch_agent_compares_its_marks_after_a_notification_of_nftables(monkeypatch):
    """Counters of the statements and the order of elements in sets are no change."""
    listed = [[[0, 1001], [1, 1002]], [[0, 1001]], [[1, 1002], [0, 1001]]]

    def nft(_netns, _words):
        count = {"counter": {"packets": 7 * len(listed), "bytes": 9}}
        return json.dumps({"nftables": [{"rule": {"expr": [count, {"mangle": {"map": {"set": listed.pop(0)}}}]}}]})

    monkeypatch.setattr(marking_rules, "_nft", nft)
    first = marking_rules.mark_rules(None)
    assert (marking_rules.mark_rules(None) == first, marking_rules.mark_rules(None) == first) == (False, True)


@pytest.mark.parametrize(
    "change", [{"table": {"flags": ["dormant"]}}, {"chain": {"prio": -300}}, {"chain": {"hook": "input"}}]
)
def test_switch_agent_sees_marks_that_a_dormant_table_or_another_hook_switches_off(monkeypatch, change):
    """The rules are listed as before, but no packet meets them."""

    def listed(handle, **more):
        table = {"family": "ip", "name": "faultbed_routing", "handle": handle, **more.get("table", {})}
        chain = {"name": "choose", "handle": handle, "hook": "prerouting", "prio": -150, **more.get("chain", {})}
        rule = {"expr": [{"counter": {"packets": handle, "bytes": 0}}, {"mangle": {"value": 1001}}]}
        return json.dumps({"nftables": [{"table": table}, {"chain": chain}, {"rule": rule}]})

    answers = [listed(1), listed(2), listed(2, **change)]
    monkeypatch.setattr(marking_rules, "_nft", lambda _netns, _words: answers.pop(0))
    first = marking_rules.mark_rules(None)
    assert (marking_rules.mark_rules(None) == first, marking_rules.mark_rules(None) == first) == (True, False)


def test_switch_agent_subscription_to_nftables_is_accepted_by_the_kernel():
    program = (
        "from faultbed.testbed.node.routing.agent import _subscribed; _subscribed(12, (7,)).close(); print('true')"
    )
    assert answer_of(program) is True


def test_deviation_begins_with_the_first_change_and_ends_with_the_last_one():
    log = DeviationLog()
    log.update(10, 12, {"rules": Deviation(FOREIGN, "gone")})
    log.update(20, 25, {"rules": Deviation(FOREIGN, "still gone")})
    assert [(one["begin_ns"], one["end_ns"], one["what"]) for one in log.report()] == [(10, None, "gone")]
    log.begin(30, {"unread": Deviation(UNWATCHED, "no answer")})
    log.update(40, 45, {})
    assert [(one["begin_ns"], one["end_ns"]) for one in log.report()] == [(10, 45), (30, 45)]


def test_deviations_beyond_the_limit_are_reported_as_not_watched():
    log = DeviationLog()
    for number in range(1002):
        log.not_watched(number, number + 1, "")
    last = log.report()[-1]
    assert (len(log.report()), last["cause"], last["begin_ns"], last["end_ns"]) == (1001, UNWATCHED, 1000, None)
