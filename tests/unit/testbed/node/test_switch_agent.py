"""The switch agent on a real kernel: its rules and tables, how it follows BGP, its refusals and its leftovers."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest
from own_namespace import in_a_namespace

from faultbed.inject.node.network.scheme import SWEEP
from faultbed.testbed.node.routing import marking_rules
from faultbed.testbed.routing.jenkins_hash import nft_jhash

P2, P3 = "10.77.2.0/31", "10.77.3.0/31"
SCHEMES = ("static", "marked", "weighted", "resilient")


@pytest.fixture(scope="module")
def recorded():
    return in_a_namespace("switch_namespace.py")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return in_a_namespace("switch_held.py", str(tmp_path_factory.mktemp("faults")))


def test_switch_agent_tables_hold_bgps_next_hops_for_each_uplink(recorded):
    for scheme in ("static", "marked"):
        assert recorded[scheme]["refused"] == ""
        assert recorded[scheme]["applied"]["tables"] == {
            "1001": {P2: ["up1"], P3: ["up1"]},
            "1002": {P2: ["up2"], P3: ["up2"]},
        }
        assert recorded[scheme]["idle"] == 0, "nothing is written again while BGP has changed nothing"
    assert recorded["weighted"]["applied"]["tables"]["1000"][P2] == ["up1 weight 3", "up2 weight 1"]
    assert recorded["resilient"]["applied"]["groups"]["1001000"] == {"ports": ["up1", "up2"], "buckets": 32}


def test_switch_agent_kernel_routes_by_the_schemes_table(recorded):
    assert "dev up2 table 1002 " in recorded["static"]["decision"]
    assert "dev up1 table 1001 " in recorded["marked"]["marked decision"]
    assert "table" not in recorded["marked"]["decision"], "a packet without a mark is BGP's"
    for scheme in ("weighted", "resilient"):
        assert "table 1000" in recorded[scheme]["decision"]


def test_switch_agent_route_query_returns_port_and_table(recorded):
    """The query by rtnetlink equals `ip route get`, for packets without a mark and with each of two marks."""
    assert recorded["static"]["asked"] == [["up2", 1002], ["up2", 1002], ["up2", 1002]]
    assert recorded["marked"]["asked"][0][1] == 254
    assert recorded["marked"]["asked"][1:] == [["up1", 1001], ["up2", 1002]]
    assert [table for _, table in recorded["weighted"]["asked"]] == [1000, 1000, 1000]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_switch_agent_withdrawn_next_hop_leaves_the_tables_of_every_scheme(recorded, scheme):
    """BGP reaches the first prefix by the second uplink alone; the other prefix keeps both."""
    life = recorded[scheme]
    assert life["told"], "the kernel has reported it"
    if scheme == "weighted":
        assert life["withdrawn"]["tables"]["1000"] == {P2: ["up2"], P3: ["up1 weight 3", "up2 weight 1"]}
    elif scheme == "resilient":
        ports = {name: group["ports"] for name, group in life["withdrawn"]["groups"].items()}
        assert ports == {"1001000": ["up2"], "1001001": ["up1", "up2"]}
    else:
        assert life["withdrawn"]["tables"] == {"1001": {P3: ["up1"]}, "1002": {P2: ["up2"], P3: ["up2"]}}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_switch_agent_downed_uplink_leaves_the_tables_without_the_agent(recorded, scheme):
    """The kernel itself removes routes of a dead uplink, so packets use BGP's routes before the agent acts."""
    at_once = recorded[scheme]["at once"]
    named = {port.split()[0] for table in at_once["tables"].values() for hops in table.values() for port in hops}
    assert "up1" not in named
    assert all("up1" not in group["ports"] for group in at_once["groups"].values())
    assert " dev up2 " in f"{recorded[scheme]['without uplink']} "


@pytest.mark.parametrize("scheme", SCHEMES)
def test_switch_agent_restored_uplink_is_used_again(recorded, scheme):
    assert recorded[scheme]["up"]["tables"] == recorded[scheme]["applied"]["tables"]
    assert recorded[scheme]["up"]["groups"] == recorded[scheme]["applied"]["groups"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_switch_agent_removal_leaves_nothing_and_bgps_routes_unchanged(recorded, scheme):
    removed = recorded[scheme]["removed"]
    assert (removed["rules"], removed["tables"], removed["groups"], removed["left"]) == ([], {}, {}, 0)
    assert removed["main"] == {P2: ["up1", "up2"], P3: ["up1", "up2"]}


@pytest.fixture(scope="module")
def carried():
    """Return how a switch with two uplinks forwards packets of 48 queue pairs with one 5-tuple, by scheme."""
    return in_a_namespace("switch_packets.py")


def test_packets_of_one_5_tuple_all_take_one_uplink_by_bgp_and_another_one_by_a_pin(carried):
    assert sorted(carried["bgp"].values()) == [0, 48]
    assert carried["pinned"] == {"up1": 0, "up2": 48}
    assert carried["after"] == carried["bgp"], "removed, the scheme decides nothing any more"


def test_no_packet_is_lost_when_the_uplink_of_a_pin_goes_down_before_the_agent_has_copied_anything(carried):
    assert carried["pinned, its uplink down"] == {"up1": 48, "up2": 0}


def test_spray_gives_both_uplinks_as_many_packets(carried):
    if "spray" not in carried:
        pytest.skip("no nft here; the lab's switches have it")
    assert carried["spray"] == {"up1": 24, "up2": 24}


def test_e_ecmp_sends_each_queue_pair_by_the_uplink_that_its_hash_computes(carried):
    if "e-ecmp" not in carried:
        pytest.skip("no nft here; the lab's switches have it")
    computed = {str(qpn): ("up1", "up2")[nft_jhash(qpn.to_bytes(3, "big"), modulus=2, seed=7)] for qpn in range(17, 65)}
    assert carried["e-ecmp"] == computed


def listed_by_nft(*draws):
    """What nft 1.1.3 lists of two statements of a scheme."""
    match = {"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 4791}}
    maps = [{"map": {"key": draw, "data": {"set": [[0, 1001], [1, 1002]]}}} for draw in draws]
    statements = [{"mangle": {"key": {"meta": {"key": "mark"}}, "value": each}} for each in maps]
    rules = [{"rule": {"expr": [match, {"counter": {"packets": 5, "bytes": 9}}, each]}} for each in statements]
    return json.dumps({"nftables": [{"metainfo": {"version": "1.1.3"}}, {"table": {"family": "ip"}}, *rules]})


def test_switch_agent_reads_modulus_and_seed_of_its_marks(monkeypatch):
    expression = {"payload": {"base": "th", "offset": 104, "len": 24}}
    hashed = {"jhash": {"mod": 2, "seed": 7, "expr": expression}}
    in_turn = {"numgen": {"mode": "inc", "mod": 3, "offset": 0}}
    constant = 1001
    monkeypatch.setattr(marking_rules, "_nft", lambda *_: listed_by_nft(hashed, in_turn, constant))
    marks = marking_rules.read_marks(None)
    assert marks["draws"] == [[2, 7], [3, None], [None, None]]
    assert [[*statement] for rule in marks["mark_rules"] for statement in rule] == [["match"], ["mangle"]] * 3
    assert marking_rules.marked_packets(None) == [5, 5, 5]


def test_mark_rules_of_a_switch_include_rules_without_a_counter(monkeypatch):
    """Such a rule may overwrite the marks of the scheme, and counts nothing."""
    listed = json.loads(listed_by_nft(1001))
    listed["nftables"].append({"rule": {"expr": [{"mangle": {"key": {"meta": {"key": "mark"}}, "value": 0}}]}})
    monkeypatch.setattr(marking_rules, "_nft", lambda *_: json.dumps(listed))
    marks = marking_rules.read_marks(None)
    assert (marks["marked"], len(marks["mark_rules"])) == ([5], 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fingerprint_shows_a_routing_scheme_left_behind_and_not_a_removed_one(recorded, scheme):
    assert set(recorded[scheme]["facts"]) == {"route", "rule"} | ({"nexthop"} if scheme == "resilient" else set())
    assert recorded[scheme]["facts left"] == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rule", "a rule of priority 1000 (lookup 77)"),
        ("route", "a route to 10.9.0.0/16 in table 1500"),
        ("blackhole", "a route to 10.9.0.0/16 in table 1001"),
        ("next hop", "a next hop 1000007"),
        ("port", "no port up9; check that the lab is provisioned"),
    ],
)
def test_switch_agent_foreign_state_in_its_ranges_is_refused_by_name(recorded, kind, message):
    assert message in recorded["foreign"][kind]


@pytest.mark.parametrize("kind", ["rule", "route", "blackhole", "next hop"])
def test_switch_agent_foreign_state_is_gone_after_what_its_refusal_advises(recorded, kind):
    """`faultbed heal` was advised, which leaves foreign state alone."""
    assert "heal" not in recorded["foreign"][kind]
    assert recorded["foreign"][f"{kind}, removed"] == ""


def test_switch_agent_leftover_of_a_scheme_is_refused_with_the_advice_to_heal(recorded):
    assert recorded["foreign"]["leftover"].endswith(
        "a rule of priority 1000 (lookup 1001) already exists in the range reserved for routing schemes; "
        "run `faultbed heal`"
    )


def test_switch_agent_stored_revert_removes_only_our_state():
    """After two runs the scheme's state is gone, and a foreign rule and table in the same ranges stay."""
    script = f"""
        ip link add up1 type veth peer name far1 || exit 77
        ip link set up1 up; ip link set far1 up
        ip rule add to 10.0.0.0/8 lookup 1001 priority 1000 protocol 251
        ip rule add fwmark 1002 lookup 1002 priority 1000 protocol 251
        ip rule add to 11.0.0.0/8 lookup 1002 priority 1000
        ip route add 10.0.0.0/8 dev up1 table 1001 proto 251
        ip route add 12.0.0.0/8 dev up1 table 1003
        ip nexthop add id 1000000 dev up1 proto 251
        sh -c '{SWEEP}' || exit 1
        sh -c '{SWEEP}' || exit 1
        ip rule; ip -4 route show table all; ip nexthop
    """
    done = subprocess.run(["unshare", "-rn", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no network namespaces for this user here")
    assert done.returncode == 0, done.stderr
    assert "251" not in done.stdout
    assert "from all to 11.0.0.0/8 lookup 1002" in done.stdout
    assert "12.0.0.0/8 dev up1 table 1003" in done.stdout
    assert "1000000" not in done.stdout


def test_switch_agent_holder_reads_back_and_stores_its_revert_first(held):
    assert held["prepared"]["event"] == "prepared"
    assert held["armed"]["readback"]["whole"] is True
    assert held["stored"] == ["one.revert"]


def test_switch_agent_holder_follows_bgp_on_kernel_events(held):
    """The holder wakes up on a netlink message instead of polling. Two seconds allow for a busy machine."""
    assert held["lag_s"] < 2


def test_switch_agent_second_scheme_on_the_same_switches_is_refused_by_name(held):
    assert held["second"]["refused"] is True
    assert "routing of m" in held["second"]["error"]


def test_switch_agent_scheme_ends_with_its_controller(held):
    code, after, stored = held["left by eof"]
    assert (code, after["rules"], after["tables"], stored) == (0, [], {}, [])


def test_switch_agent_scheme_of_a_silent_controller_ends_within_its_lease(held):
    assert held["silent"]["had_rules"]
    assert held["silent"]["after_s"] < 5


def test_switch_agent_killed_holder_is_undone_by_the_stored_revert(held):
    assert held["killed"]["had_rules"]
    assert held["killed"]["code"] == 0
    assert (held["killed"]["after"]["rules"], held["killed"]["after"]["tables"]) == ([], {})
    assert held["killed"]["after"]["groups"] == {}


def test_switch_agent_noop_holder_reads_back_as_not_applied(held):
    assert held["noop"]["readback"]["applied"] is False
    assert held["noop"]["readback"]["whole"] is False
    assert held["noop cleared"]["ok"] is True


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Kill the holder, its controller or a spine at twenty random times, while numbered packets are sent."""
    return in_a_namespace("switch_killed.py", str(tmp_path_factory.mktemp("faults")), "29", "20")


@pytest.mark.slow
def test_no_packet_is_blackholed_when_holder_controller_or_spine_dies_at_a_drawn_time(killed):
    print(
        [
            (point["victim"], point["scheme"], point["delay_ms"], point["sent"], point["lost"])
            for point in killed["points"]
        ]
    )
    assert killed["blackholed on purpose"] > 10, "the count would show it"
    victims = Counter(point["victim"] for point in killed["points"])
    assert victims == {"holder": 7, "controller": 7, "spine": 6}
    assert {point["scheme"] for point in killed["points"]} == set(SCHEMES)
    for one in killed["points"]:
        assert one["sent"] > 0, one
        assert one["lost"] <= killed["lost by BGP alone"] == 0, one


@pytest.mark.slow
def test_next_start_after_a_kill_reaches_the_same_rules_and_the_kill_left_nothing(killed):
    for one in killed["points"]:
        assert one["left"] == [[], {}, {}], one
        assert one["again"] == killed["reference"][one["scheme"]], one


def test_nft_timeout_leaves_the_state_of_the_table_unknown(monkeypatch):
    """After the timeout, the table used to count as absent: it stayed, and the removal was reported as complete."""

    def hangs(*_args, **_options):
        raise subprocess.TimeoutExpired("nft", 1)

    monkeypatch.setattr(marking_rules.netns, "enter", lambda _: None)
    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(TimeoutError, match="did not end within"):
        marking_rules.marked_packets(None)


@pytest.fixture(scope="module")
def placed():
    return in_a_namespace("switch_placed.py")


def test_switch_agent_rule_of_a_source_port_and_prefix_decides_for_them_alone(placed):
    assert placed["refused"] == ""
    assert placed["first"] == {
        "far1 to 10.77.2.1": ["up1", 1001],
        "far1 to 10.77.3.1": ["up2", 1002],
        "far2 to 10.77.2.1": ["up2", 1002],
        "far2 to 10.77.3.1": ["up2", 254],
    }, "the last one has no rule, so BGP decides"
    assert {(rule["in"], rule["to"], rule["table"]) for rule in placed["rules"]} == {
        ("far1", P2, 1001), ("far1", P3, 1002), ("far2", P2, 1002),
    }  # fmt: skip


def test_switch_agent_moved_keys_have_a_rule_at_every_moment(placed):
    """The kernel is asked before each removal: a key has its old or its new uplink, and never BGP's."""
    assert placed["idle"] == 0
    assert placed["changed"] == 4, "two rules added, two removed"
    assert placed["moved"]["far1 to 10.77.2.1"] == ["up2", 1002]
    assert placed["moved"]["far2 to 10.77.2.1"] == ["up1", 1001]
    assert len(placed["between"]) == 2
    for moment in placed["between"]:
        assert all(moment[key][1] in (1001, 1002) for key in moment if key != "far2 to 10.77.3.1")
    assert placed["deviations"] == [], "the agent's own changes are none"


def test_switch_agent_rule_that_an_update_puts_back_is_recorded_as_missing(placed):
    assert placed["put back"] == placed["moved"]
    assert placed["seen"] == ["1 of 3 rules of the scheme were missing"]


def test_switch_agent_rule_of_a_dead_uplink_falls_through_to_bgp(placed):
    assert placed["dead uplink"]["far2 to 10.77.2.1"] == ["up2", 254]


def test_switch_agent_refuses_rules_of_another_switch_and_keeps_its_own(placed):
    assert "no port far9" in placed["no port"]
    assert "no table 1077" in placed["no table"]
    assert len(placed["after refusals"]) == 3
    assert placed["removed"] == []


def test_switch_agent_holder_updates_rules_and_reads_them_back(held):
    assert "cannot update what is prepared" in held["early update"]["error"]
    assert held["unplaced"]["whole"] is True, "tables without a rule: nothing is placed yet"
    assert held["placed"]["event"] == "updated"
    assert (held["placed"]["readback"]["whole"], held["placed"]["readback"]["rules"]) == (True, 2)
    assert sorted(map(tuple, held["placed rules"])) == [(1000, 1001, P2, 0, "far1"), (1000, 1002, P3, 0, "far1")]


def test_switch_agent_holder_refuses_rules_of_another_lab_and_keeps_those_it_has(held):
    assert "no port far9" in held["refused"]["error"]
    assert held["too many"]["error"] == "rules of 2 switches for 1"
    assert held["still there"] == 2
    assert held["placed by eof"] == [0, []]


def test_switch_agent_noop_holder_confirms_no_update(held):
    assert held["idle placed"]["readback"]["whole"] is False
    assert held["idle rules"] == []


def test_switch_agent_holder_killed_while_it_updates_is_undone_and_restarted_has_the_same_rules(held):
    assert held["kills"] == [True, True]
