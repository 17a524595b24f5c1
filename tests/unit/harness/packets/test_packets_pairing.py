"""Queue pairs are distinguished by their PSNs; where these are ambiguous, no rule about responses is checked."""

import struct

import numpy as np
import pytest
from gbn_model import ACK, SPACE, WRITE_ONLY, A, B, Wire, frame
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.harness.packets.analysis import analyse
from faultbed.traffic.engine.connections import first_psn

US = 1000


def several(firsts, *, sports, rounds=60, window=1, order=None, first_round=0, lag=0):
    """Healthy queue pairs between two addresses: each sends `window` requests a round, and gets one ACK for them.

    ACKs come `lag` rounds later. Queue pair i has responder QPN 0x200 + i and requester QPN 0x100 + i. ACKs come in
    `order`. Rounds before `first_round` are not captured.
    """
    wire, now = Wire(), 0
    order = list(range(len(firsts))) if order is None else order
    for turn in range(rounds):
        for index, first in enumerate(firsts):
            for each in range(window):
                now += 2 * US
                if turn >= first_round:
                    psn, sport = first + turn * window + each, sports[index]
                    request = frame(
                        A, B, opcode=WRITE_ONLY, dqpn=0x200 + index, psn=psn, extended=bytes(16), sport=sport
                    )
                    wire.put(now, request, outbound=True)
        for index in order:
            now += US
            if turn >= first_round + lag:
                psn = firsts[index] + (turn + 1 - lag) * window - 1
                response = frame(
                    B, A, opcode=ACK, dqpn=0x100 + index, psn=psn, extended=struct.pack(">I", 0), sport=sports[index]
                )
                wire.put(now, response, outbound=False)
    return wire


def pairs(analysis):
    return {flow.dqpn: flow.reply_qpn for flow in analysis.flows}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_pairing_equal_source_ports_4096_psns_apart_is_right(order):
    analysis = analyse(several((0x100, 0x1100), sports=(0xD081, 0xD081), rounds=400, order=order).frames())
    assert pairs(analysis) == {0x200: 0x100, 0x201: 0x101}
    assert (analysis.violations, analysis.doubts) == (0, ())


@settings(max_examples=samples(60), deadline=None)
@given(
    firsts=st.lists(st.one_of(st.integers(0, SPACE - 1), st.integers(0, 60)), min_size=2, max_size=6, unique=True),
    window=st.integers(1, 8),
    first_round=st.integers(0, 3),
    seed=st.integers(0, 1000),
    lag=st.integers(0, 2),
)
def test_pairing_any_psns_and_equal_source_ports_is_right_or_ambiguous(firsts, window, first_round, seed, lag):
    order = np.random.default_rng(seed).permutation(len(firsts)).tolist()
    wire = several(
        firsts,
        sports=[0xD081] * len(firsts),
        window=window,
        order=order,
        rounds=20,
        first_round=first_round,
        lag=lag,
    )
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    for flow in analysis.flows:
        if flow.is_ambiguous:
            assert analysis.doubts
        else:
            assert flow.reply_qpn == flow.dqpn - 0x100


@settings(max_examples=samples(30), deadline=None)
@given(count=st.integers(1, 40), start=st.integers(1, 100_000), seed=st.integers(0, 1000))
def test_pairing_psns_as_faultbed_gives_them_is_never_ambiguous(count, start, seed):
    firsts = [first_psn(start + 2 * index) for index in range(count)]
    order = np.random.default_rng(seed).permutation(count).tolist()
    analysis = analyse(several(firsts, sports=[0xC000] * count, order=order, rounds=12, window=4).frames())
    assert pairs(analysis) == {0x200 + index: 0x100 + index for index in range(count)}
    assert (analysis.violations, analysis.doubts) == (0, ())


def test_pairing_within_one_window_and_equal_source_ports_is_ambiguous():
    """PSNs one apart, 16 outstanding: both pairings explain every packet."""
    analysis = analyse(several((100, 101), sports=(7, 7), window=8, lag=1).frames())
    assert [flow.is_ambiguous for flow in analysis.flows] == [True, True]
    assert [(flow.reply_qpn, flow.causes, flow.broken) for flow in analysis.flows] == [(None, {}, {})] * 2
    (doubt,) = analysis.doubts
    assert "512, 513" in doubt


def test_pairing_is_correct_within_one_window_with_distinct_source_ports():
    analysis = analyse(several((100, 101), sports=(7, 8), window=8, lag=1).frames())
    assert pairs(analysis) == {0x200: 0x100, 0x201: 0x101}
    assert analysis.doubts == ()


def test_pairing_of_two_ambiguous_and_one_clear_queue_pair_leaves_the_clear_one():
    analysis = analyse(several((100, 101, 1 << 20), sports=(7, 7, 7), window=8, lag=1).frames())
    assert [flow.is_ambiguous for flow in analysis.flows] == [True, True, False]
    assert pairs(analysis)[0x202] == 0x102


def test_pairing_unmatched_responses_at_a_host_port_are_a_doubt():
    wire = several((100,), sports=(7,))
    other = frame(B, A, opcode=ACK, dqpn=0x999, psn=9_000_000, extended=struct.pack(">I", 0), sport=9)
    wire.put(wire.packets[-1][0] + 1, other, outbound=False)
    (doubt,) = analyse(wire.frames()).doubts
    assert "QP 2457" in doubt
    wire.name = "rtsw1:ctsw1"  # between switches, requests may take another link than their responses
    assert analyse(wire.frames()).doubts == ()


def test_first_psns_of_connections_and_rebuilds_never_repeat():
    """300 connections are made four times, at both ends. An earlier scheme repeated from the 256th connection on."""
    psns = [first_psn(made) for made in range(1, 300 * 2 * 4 + 1)]
    assert len(set(psns)) == len(psns)
    assert 0 not in psns
    assert np.diff(np.sort(psns)).min() > (1 << 23) / (2.7 * len(psns))
