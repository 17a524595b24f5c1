"""Traffic engineering on the lab's switches: colliding queue pairs, a dead uplink, controllers that are no good.

The numbers of three racks need `pytest -m "" --lab soft-3rack tests/soft/test_flow_placement.py`.
"""

import itertools

import numpy as np
import pytest
from scheme_runs import mmr, rules, run

from faultbed.harness.verdict import Verdict
from faultbed.inject.routing.scheme_lease import SchemeLease
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.traffic.probes.ecmp_entropy import Flow5, paths, udp_sport

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

_LABELS = range(1, 65)
_CUT = """
[[faults]]
id = "cut"
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "25s"
for = "20s"
exposed = "none"
[[expect]]
metric = "te.rebalanced"
max = "20s"
"""


def colliding_label(lab, hosts):
    """Return a flow label with which ECMP sends all that rack 1 sends to other racks over one uplink.

    All queue pairs with a label have one UDP source port, and the kernel of the rack switch is asked for each pair.
    """
    address = {host.name: host.rnics[0].ip for host in lab.topology.hosts}
    pairs = [(src, dst) for src, dst in itertools.product(hosts[:2], hosts[2:])]
    flows = {
        label: [Flow5(src_ip=address[src], dst_ip=address[dst], sport=udp_sport(0, 0, label)) for src, dst in pairs]
        for label in _LABELS
    }
    found = paths(lab, itertools.chain.from_iterable(flows.values()))
    labels = [label for label, each in flows.items() if len({found[flow][2] for flow in each}) == 1]
    print(f"labels whose {len(pairs)} flows collide: {labels}")
    return labels[0]


def test_te_parts_queue_pairs_that_collide_under_ecmp(lab, tmp_path):
    label = colliding_label(lab, ["host1", "host2", "host3", "host4"])
    words = {"qp": f"flow_label = {label}", "workload": "entropy = 1"}
    ratios = {}
    for scheme in ("ecmp", "te"):
        finished = run(lab, tmp_path / scheme, scheme, iterations=20, words=words)
        assert finished.verdict.verdict is Verdict.PASS, finished.verdict.checks
        assert finished.verdict.lab_state == "CLEAN"
        ratios[scheme] = mmr(finished, "rtsw1")
    print({scheme: round(ratio, 3) for scheme, ratio in ratios.items()})
    assert ratios["ecmp"] == pytest.approx(2.0, abs=0.1)
    assert ratios["te"] <= 1.1
    assert not any(rules(lab).values())


@pytest.mark.parametrize("mutate", ["noop", "lie"])
def test_controller_whose_rules_reach_no_switch_is_not_believed(lab, tmp_path, mutate):
    """Only prefixes that it does not place, which BGP's ECMP decides, are as the scheme says."""
    verdict = run(lab, tmp_path, "te", iterations=2, mutate_routing=mutate).verdict

    print(verdict.verdict, verdict.routing.unproven)
    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert verdict.routing.armed.ok is False
    assert 0 < verdict.routing.decisions.agreed < verdict.routing.decisions.queried
    assert verdict.lab_state == "CLEAN"


def test_controller_whose_rules_are_those_of_another_lab_is_not_believed(lab, tmp_path, monkeypatch):
    """It computes and reports as the real one, but what reaches the switches has the two spines exchanged."""
    honest = SchemeLease.update

    def of_another_lab(self, tables):
        spines = {"ctsw1": "ctsw2", "ctsw2": "ctsw1"}
        uplinks = {
            key: f"{rack}:{spines[spine]}"
            for key, name in tables.routing.uplinks.items()
            for rack, _, spine in [name.partition(":")]
        }
        honest(self, scheme_tables(lab.topology, "te", Routing(uplinks=uplinks)))

    monkeypatch.setattr(SchemeLease, "update", of_another_lab)
    verdict = run(lab, tmp_path, "te", iterations=4).verdict

    print(verdict.verdict, verdict.routing.unproven)
    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert any("its rules are not those that the controller sent" in one for one in verdict.routing.unproven)
    assert verdict.lab_state == "CLEAN"


@pytest.mark.needs("hosts >= 6")
def test_backdoor_balances_the_uplinks_of_another_rack_before_the_next_cycle(lab, tmp_path):
    """Rack 1 loses an uplink, so that rack 2 sends to it by one spine, and has to send to rack 3 by the other one."""
    times_s = {}
    for backdoor in ("true", "false"):
        words = {"fabric": f"backdoor = {backdoor}", "length": 'duration = "60s"', "size": "96KiB"}
        finished = run(lab, tmp_path / backdoor, "te", (1, 2, 3, 4, 5, 6), more=_CUT, words=words)
        verdict = finished.verdict
        print(backdoor, verdict.verdict, verdict.routing.unproven, verdict.routing.placements)
        assert verdict.lab_state == "CLEAN"
        check = next(check for check in verdict.checks if check.name == "te.rebalanced")
        print(backdoor, check.observed, check.detail, "even after", even_after_s(finished), "s")
        times_s[backdoor] = check.observed
    print(f"backdoor {times_s['true']:.2f} s, without {times_s['false']:.2f} s")
    assert times_s["true"] < times_s["false"]


def even_after_s(finished, switch="rtsw2", most=1.1):
    """Return how long after the fault fired the switch's uplinks carried no more than `most` times their mean.

    It is the begin of the first second from which on this held while the fault was on, in s; None: it never did.
    """
    (receipt,) = finished.verdict.faults
    first_ns, cleared_ns = receipt.fired.first_ns, receipt.cleared.at_ns
    if first_ns is None:
        return None
    sent: dict[str, list[tuple[int, int]]] = {}
    for sample in finished.run_dir.read_telemetry().samples:
        if sample.node == switch:
            for port in ("ctsw1", "ctsw2"):
                if f"{port}.tx_bytes" in sample.values:
                    sent.setdefault(port, []).append((sample.at_ns, sample.values[f"{port}.tx_bytes"]))
    ratios = []
    for at_ns in range(first_ns, cleared_ns - 10**9, 10**8):
        carried = [
            float(np.diff(np.interp((at_ns, at_ns + 10**9), *np.array(samples, dtype=np.float64).T))[0])
            for samples in sent.values()
        ]
        ratios.append(((at_ns - first_ns) / 1e9, max(carried) * len(carried) / max(sum(carried), 1)))
    print(switch, [(round(at, 1), round(float(ratio), 2)) for at, ratio in ratios[::5]])
    uneven = [number for number, (_, ratio) in enumerate(ratios) if ratio > most]
    after = uneven[-1] + 1 if uneven else 0
    return ratios[after][0] if after < len(ratios) else None
