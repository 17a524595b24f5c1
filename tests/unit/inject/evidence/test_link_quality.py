"""After a fault at a port, its link must have as few errors as before: up is not enough."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_faults import with_mechanism
from rack_actuator_cases import RACK

from faultbed.inject.evidence import link_quality, witnesses
from faultbed.inject.evidence.witnesses import Witnesses
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import FaultError
from faultbed.testbed.observe import counters

DOWN = plan(FaultSpec(kind="link.down", target="host1:mlx5_0", for_s=5.0), RACK, lab_kind="rack")
(PORT,) = DOWN.mechanism.quality
FIXED, BEYOND = link_quality.keys([PORT])
GOOD = {FIXED: 2000.0, BEYOND: 0.0}


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (GOOD, None),
        ({FIXED: 15_000.0, BEYOND: 0.0}, None),
        (
            {FIXED: 25_000.0, BEYOND: 0.0},
            r"rx_corrected_bits_phy grows by 2.5e\+04 a second, before the fault by 2e\+03",
        ),
        ({FIXED: 2000.0, BEYOND: 0.5}, "rx_pcs_symbol_err_phy grows by 0.5"),
        ({FIXED: 2000.0}, "rate of host1/.*rx_pcs_symbol_err_phy after the fault is not known"),
        ({}, "not known"),
    ],
)
def test_link_quality_worse_or_unknown_is_named(after, words):
    sentences = link_quality.worse([PORT], GOOD, after)
    assert bool(sentences) is (words is not None)
    if words:
        assert re.search(words, "; ".join(sentences)), sentences


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0.5, 10))
def test_link_quality_of_a_counter_that_was_reset_is_unknown(first, last, took_s):
    node, _, name = FIXED.partition("/")
    rates = link_quality.rates([PORT], {node: {name: first}}, {node: {name: last}}, took_s)
    assert (FIXED in rates) is (last >= first)
    assert BEYOND in link_quality.unknown([PORT], rates)


class Ports:
    """A rack whose port counts `per_window` corrected bits and `beyond` other errors in the n-th window of a test."""

    def __init__(self, monkeypatch, *windows):
        self.windows, self.reads, self.value, self.beyond = list(windows), 0, 10**6, 3
        self.clock = 0.0
        monkeypatch.setattr(counters, "read", self.read)
        monkeypatch.setattr(witnesses, "time", SimpleNamespace(monotonic=lambda: self.clock, sleep=self.pause))

    def pause(self, seconds):
        self.clock += seconds
        if seconds == link_quality.WINDOW_S and self.windows:
            grown, beyond = self.windows.pop(0) if len(self.windows) > 1 else self.windows[0]
            self.value, self.beyond = (None, None) if grown is None else (self.value + grown, self.beyond + beyond)

    def read(self, lab, nodes=None):
        values = {"kernel.boot": 1}
        if self.value is not None:
            values |= {FIXED.partition("/")[2]: self.value, BEYOND.partition("/")[2]: self.beyond}
        for key, value in DOWN.mechanism.restored:
            values[key.partition("/")[2]] = value
        return {"host1": values, "rtsw1": {}}


def settled(monkeypatch, *windows):
    ports = Ports(monkeypatch, *windows)
    seen = Witnesses(SimpleNamespace(topology=RACK), DOWN)
    seen.baseline(DOWN)
    return seen.settle(DOWN, needs_witness=False, pause=ports.pause), ports


def test_settle_link_as_good_as_before_is_restored(monkeypatch):
    (_, restored, wrong), _ = settled(monkeypatch, (4000, 0), (5000, 0))
    assert wrong is None
    assert restored[f"{FIXED} a second"] == 2500


def test_settle_link_that_trains_for_a_while_is_waited_for(monkeypatch):
    (_, _, wrong), ports = settled(monkeypatch, (4000, 0), (10**9, 7), (10**6, 0), (3000, 0))
    assert wrong is None
    assert ports.clock == 4 * link_quality.WINDOW_S


def test_settle_link_that_is_up_and_stays_worse_is_not_restored(monkeypatch):
    (_, _, wrong), _ = settled(monkeypatch, (4000, 0), (10**7, 0))
    assert "rx_corrected_bits_phy grows by 5e+06 a second, before the fault by 2e+03" in wrong


def test_settle_errors_beyond_fec_after_the_fault_are_not_restored(monkeypatch):
    (_, _, wrong), _ = settled(monkeypatch, (4000, 0), (4000, 1))
    assert "rx_pcs_symbol_err_phy" in wrong


def test_settle_counters_that_are_gone_after_the_fault_are_not_restored(monkeypatch):
    (_, _, wrong), _ = settled(monkeypatch, (4000, 0), (None, 0))
    assert "after the fault is not known" in wrong


def test_baseline_of_a_port_that_counts_no_errors_is_refused(monkeypatch):
    Ports(monkeypatch, (None, 0))
    with pytest.raises(FaultError, match="nothing would show whether the link is as good afterwards"):
        Witnesses(SimpleNamespace(topology=RACK), DOWN).baseline(DOWN)


def test_fault_without_such_a_port_is_read_once(monkeypatch):
    ports = Ports(monkeypatch, (4000, 0))
    plain = with_mechanism(DOWN, quality=())
    Witnesses(SimpleNamespace(topology=RACK), plain).baseline(plain)
    assert ports.clock == 0


@pytest.mark.parametrize(("is_on", "compared"), [(True, ()), (False, (PORT,))])
def test_port_of_another_fault_that_is_still_on_is_compared_by_that_fault(is_on, compared):
    """Of two faults at the ends of one link, the first to end must not find the link worse and the lab DIRTY."""
    other = SimpleNamespace(planned=DOWN, is_on=is_on)
    fault = SimpleNamespace(planned=DOWN, is_on=False)
    fault._injector = SimpleNamespace(active=lambda: (fault, other))
    assert PreparedFault._ports_without_other_faults(fault) == compared
