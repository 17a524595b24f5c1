"""Loss of a few packets: gaps and NAKs at a few RNICs locate it, and too few give no finding."""

from __future__ import annotations

import random

import pytest
from labelled_run import Network
from synthetic_run import changed

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.gaps import match_gaps
from faultbed.harness.attribution.signatures import Signs, crosses
from faultbed.harness.findings import NOTHING

RUN = Network(3).run().measured(None, "")


def signs_of(pairs):
    """Return the signs of one lost packet for each of the queue pairs."""
    counts = {}
    for src, dst in pairs:
        counts["gap", dst] = counts.get(("gap", dst), 0) + 1
        counts["nak", src] = counts.get(("nak", src), 0) + 1
    return Signs(counts=counts)


def directed():
    for link in RUN.lab.topology.links:
        for near, far in ((link.a.node, link.b.node), (link.b.node, link.a.node)):
            pairs = [
                (connection.src, connection.dst)
                for connection in RUN.workload.connections
                if crosses(connection, near, far, rnic=link.rnic)
            ]
            if pairs:
                yield link, pairs


@pytest.mark.parametrize("seed", range(20))
def test_gaps_few_losses_name_a_possible_link_and_the_host_link(seed):
    rng = random.Random(seed)
    for link, pairs in directed():
        drawn = [rng.choice(pairs) for _ in range(5)]
        if link.rnic is None or len({end for pair in drawn for end in pair}) < 4:
            continue
        result = match_gaps(RUN, signs_of(drawn), among=RUN.lab.topology.links, other=None)
        assert result.link == link, drawn
        assert "likely this one" in result.evidence[-1]


def test_gaps_single_or_unexplained_gaps_are_no_finding():
    pair = (RUN.workload.connections[0].src, RUN.workload.connections[0].dst)
    assert match_gaps(RUN, signs_of([pair]), among=RUN.lab.topology.links, other=None) is None
    assert match_gaps(RUN, Signs(counts={("gap", "host9:rxe0"): 4}), among=RUN.lab.topology.links, other=None) is None
    assert match_gaps(RUN, Signs(counts={("nak", pair[0]): 4}), among=RUN.lab.topology.links, other=None) is None


def counting(**more):
    """Return the run with increments of RNIC counters, by host and counter."""
    after = {node: dict(values) for node, values in RUN.telemetry.counters_after.items()}
    for name, count in more.items():
        host, _, counter = name.partition("_")
        after[host][f"rxe0.{counter}"] = after[host].get(f"rxe0.{counter}", 0) + count
    return changed(RUN, counters_after=after)


def test_gaps_at_one_host_are_a_loss_despite_timeouts_everywhere():
    """The counts of a shallow queue: two NAKs, and fewer timers and duplicates than elsewhere."""
    assert attribute(counting(host4_out_of_seq_request=1)) == (NOTHING,)
    (finding,) = attribute(counting(host4_out_of_seq_request=3, host1_rcvd_seq_err=1, host3_rcvd_seq_err=1))
    assert (finding.cause, finding.name) == ("loss", "rtsw2:host4:rxe0")


def test_gaps_one_gap_and_one_nak_are_one_lost_packet_with_its_paths():
    """The finding is neither "nothing out of the ordinary" nor certain: its confidence is below one half."""
    (finding,) = attribute(counting(host3_out_of_seq_request=1, host1_rcvd_seq_err=1))
    (one,) = (each for each in RUN.workload.connections if (each.src, each.dst) == ("host1:rxe0", "host3:rxe0"))
    assert (finding.cause, finding.name) == ("loss", "rtsw2:host3:rxe0")
    assert finding.confidence < 0.5
    assert "one packet was lost: host3:rxe0 saw one gap" in finding.evidence[0]
    assert finding.evidence[1].endswith(f"to QP {one.rqpn}, whose data takes host1 -> rtsw1 -> ctsw1 -> rtsw2 -> host3")


def test_gaps_one_gap_and_one_nak_without_a_queue_pair_are_no_finding():
    """host4 sends to host1 and host2 only: the gap at host3 and the NAK at host4 are not one packet."""
    assert attribute(counting(host3_out_of_seq_request=1, host4_rcvd_seq_err=1)) == (NOTHING,)
