"""States of the fabric over time: what was wrong at each moment, and how the report draws it."""

from __future__ import annotations

import re

from finished_run import finished, parsed
from recorded import DOWN, UP, change
from state_windows import window
from synthetic_run import T0, S, changed, soft_topology, synthetic_run

from faultbed.harness.report import run_page as report
from faultbed.harness.report.fabric.drawing import Mark
from faultbed.harness.report.fabric.drawing_states import moments_svg, plain_svg
from faultbed.harness.report.fabric.fabric_states import MOST, moments

ROUTE = "route main unicast 10.77.2.0/31 metric 20 bgp"
TWO, ONE = "via 169.254.0.1 dev ctsw1, via 169.254.0.1 dev ctsw2", "via 169.254.0.1 dev ctsw2"
FLAP = (
    change(10.1, "rtsw1", "link ctsw1", DOWN),
    change(10.4, "rtsw1", ROUTE, ONE),
    change(13.1, "rtsw1", "link ctsw1", UP),
    change(15.0, "rtsw1", ROUTE, TWO),
)


def at(windows, changes):
    states = moments(soft_topology(), windows, changes, t0_ns=T0, end_ns=T0 + 20 * S)
    return {state.title: state for state in states}


def test_fabric_states_link_down_reroutes_its_switch():
    states = at([window()], FLAP)

    assert [(state.title, state.at_s) for state in states.values()] == [
        ("before", 9.999999999),
        ("1 on", 11),
        ("1 cleared", 13),
        ("end", 20),
    ]
    assert (states["before"].links, states["before"].nodes, states["before"].summary) == (
        {},
        {},
        "all links and nodes are healthy",
    )
    assert states["1 on"].links == {"rtsw1:ctsw1": ("fault", "down")}
    assert states["1 on"].nodes == {"rtsw1": ("routes",)}
    assert states["1 on"].faults == (1,)
    assert states["1 cleared"].links == {"rtsw1:ctsw1": ("down",)}
    assert states["1 cleared"].summary == "no carrier: rtsw1:ctsw1; changed routes: 1 on rtsw1"
    assert states["end"].links == {"rtsw1:ctsw1": ("recovered",)}
    assert states["end"].nodes == {"rtsw1": ("recovered",)}


def test_fabric_states_changed_route_is_never_recovered():
    for text in (None, ONE):
        assert at([window()], [change(11, "rtsw1", ROUTE, text)])["end"].nodes == {"rtsw1": ("routes",)}
    again = [change(11, "rtsw1", ROUTE, ONE), change(12, "rtsw1", ROUTE, TWO), change(14, "rtsw1", ROUTE, ONE)]
    states = at([window()], again)
    assert [states[title].nodes for title in ("1 on", "1 cleared", "end")] == [
        {"rtsw1": ("routes",)},
        {"rtsw1": ("recovered",)},
        {"rtsw1": ("routes",)},
    ]


def test_fabric_states_route_added_and_removed_by_a_fault_is_recovered():
    states = at([window()], [change(10.5, "rtsw1", ROUTE, ONE), change(13, "rtsw1", ROUTE, None)])

    assert states["1 on"].nodes == {"rtsw1": ("routes",)}
    assert states["end"].nodes == {"rtsw1": ("recovered",)}


def test_fabric_states_fault_is_marked_at_its_target():
    """An RNIC, a GPU and a host are marked themselves, an uplink by either of its names."""
    targets = ["host3:rxe0", "host2:gpu0", "host4", "ctsw2", "ctsw1:rtsw2"]
    final = at([window(number, target) for number, target in enumerate(targets, 1)], ())["end"]
    on = at([window(number, target) for number, target in enumerate(targets, 1)], ())["1 on"]

    assert set(on.nodes) == {"host3:rxe0", "host2:gpu0", "host4", "ctsw2"}
    assert on.links == {"rtsw2:ctsw1": ("fault",)}
    assert on.faults == (1, 2, 3, 4, 5)
    assert set(final.nodes.values()) == {("recovered",)}


def test_fabric_states_many_faults_are_a_few_moments_in_time_order():
    windows = [window(number, start_s=number, end_s=number + 1) for number in range(1, 16)]
    states = moments(soft_topology(), windows, (), t0_ns=T0, end_ns=T0 + 40 * S)

    assert len(states) == MOST
    assert [state.at_s for state in states] == sorted(state.at_s for state in states)
    assert moments(soft_topology(), [], FLAP, t0_ns=T0, end_ns=T0 + 40 * S) == ()


def test_fabric_states_are_drawn_over_the_plain_fabric():
    topology = soft_topology()
    states = moments(topology, [window()], FLAP, t0_ns=T0, end_ns=T0 + 20 * S)
    before, on, cleared, end = moments_svg(topology, states, [Mark(number=1, colour="#d1495b", target="rtsw1:ctsw1")])

    parsed(plain_svg(topology) + on)
    assert 'id="fabric-plain"' in plain_svg(topology)
    assert all(one.count('href="#fabric-plain"') == 1 for one in (before, on, cleared, end))
    assert "state" not in before
    assert "s-fault" in on
    assert "stroke:#d1495b" in on
    assert "s-down" in on
    assert "s-routes" in on
    assert 'class="badge"' in on
    assert "s-fault" not in cleared
    assert 'class="badge"' not in cleared
    assert end.count("s-recovered") == 2


def test_report_switches_fabric_states_without_a_script(tmp_path):
    run = changed(synthetic_run(), changes=FLAP)
    page = report.render(finished(tmp_path, run).path).read_text(encoding="utf-8")

    radios = re.findall(r'<input class="sr" type="radio" name="moment" id="(moment-\d+)"', page)
    # Three faults: the moments before, during and after each, the end, and the whole run, which is selected first.
    assert radios == [f"moment-{number}" for number in range(9)]
    assert page.count(" checked>") == 1
    assert 'id="moment-0" checked>' in page
    assert (
        len(
            re.findall(
                r"<figure>.*?</figure>", page[page.index('class="frames"') : page.index('class="faults"')], re.DOTALL
            )
        )
        == 9
    )
    for number in range(MOST + 1):
        assert f"#moment-{number}:checked" in page
    assert "no carrier: rtsw1:ctsw1" in page


def test_report_without_faults_has_one_fabric_drawing(tmp_path):
    run = changed(synthetic_run(), faults=())
    page = report.render(finished(tmp_path, run).path).read_text(encoding="utf-8")

    assert 'type="radio"' not in page
    assert page.count('class="fabric"') == 1
