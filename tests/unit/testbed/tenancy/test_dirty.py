"""A DIRTY lab refuses work until it is healed or reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from synthetic_run import soft_topology

from faultbed.testbed import stopping
from faultbed.testbed.errors import DirtyLab, LabError
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy import dirty

BEFORE = Fingerprint(nodes={"rtsw1": {"link ctsw1": "UP"}})
AFTER = Fingerprint(nodes={"rtsw1": {"link ctsw1": "down"}})


def lab_with_fingerprint(monkeypatch, folder, now):
    """Return a lab whose present fingerprint is `now`. It is read only once, without waiting for the lab to settle."""
    monkeypatch.setattr(fingerprint, "capture", lambda _: now)
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint, "QUIET_S", 0.0)
    return SimpleNamespace(name="soft", state_dir=folder)


def test_dirty_unmarked_lab_accepts_work(tmp_path):
    dirty.refuse(tmp_path, "soft")
    assert not dirty.is_marked(tmp_path)


def test_dirty_marked_lab_refuses_work_with_the_remedy(tmp_path):
    """The error has the first reason, the number of others, and both remedies; the exit code is 5."""
    dirty.mark(tmp_path, ["rtsw1: link ctsw1 was UP, is down", "host1: unit x is new"], BEFORE)
    with pytest.raises(DirtyLab) as caught:
        dirty.refuse(tmp_path, "soft")
    assert caught.value.exit_code == 5
    assert all(word in str(caught.value) for word in ("link ctsw1", "1 more", "faultbed heal", "faultbed reset"))


def test_dirty_mark_is_removed_when_the_lab_equals_its_baseline(tmp_path, monkeypatch):
    """While the lab differs from its baseline, the mark stays and `settle` returns the differences."""
    dirty.mark(tmp_path, ["x"], BEFORE)
    assert dirty.settle(lab_with_fingerprint(monkeypatch, tmp_path, AFTER)) != []
    assert dirty.is_marked(tmp_path)
    assert dirty.settle(lab_with_fingerprint(monkeypatch, tmp_path, BEFORE)) == []
    assert not dirty.is_marked(tmp_path)


def test_dirty_lab_whose_state_cannot_be_read_is_not_changed(tmp_path, monkeypatch):
    """Two unknown states never count as equal, so that a command is refused before it begins."""
    unread = Fingerprint(nodes={"rtsw1": {"config_db": "unknown: sonic-cfggen ended with 1"}})
    assert fingerprint.diff(unread, unread) == ["rtsw1: config_db is unknown: sonic-cfggen ended with 1"]
    with pytest.raises(LabError, match=r"config_db is unknown.*nothing was changed"):
        dirty.begin(lab_with_fingerprint(monkeypatch, tmp_path, unread), "run")
    assert not dirty.is_marked(tmp_path)


def test_dirty_first_mark_is_kept(tmp_path, monkeypatch):
    """The first mark has the lab's state before the first fault. `heal` must restore that state."""
    dirty.mark(tmp_path, ["first"], BEFORE)
    dirty.mark(tmp_path, ["second"], AFTER)
    assert dirty.settle(lab_with_fingerprint(monkeypatch, tmp_path, AFTER)) != []
    with pytest.raises(DirtyLab, match="first"):
        dirty.refuse(tmp_path, "soft")


def test_dirty_lab_without_a_baseline_needs_a_reset(tmp_path, monkeypatch):
    """Without a baseline, and with a truncated mark, `heal` has no known state to restore."""
    lab = lab_with_fingerprint(monkeypatch, tmp_path, BEFORE)
    dirty.mark(tmp_path, ["x"], None)
    assert "reset" in dirty.settle(lab)[0]
    (tmp_path / "dirty.json").write_text('{"rea')
    with pytest.raises(DirtyLab, match="its state is unknown"):
        dirty.refuse(tmp_path, "soft")
    dirty.clean(tmp_path)
    assert dirty.settle(lab) == []


class Clock:
    """Time that passes only in `sleep`, and during a look."""

    def __init__(self, look_s=0.1):
        self.now_s, self.look_s = 1000.0, look_s

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def seconds_since_a_change(is_up, at_s):
    """Return for how many seconds a link has been as it is, as its kernel knows it; a lab is watched from -60 s on."""
    return next((step / 100 for step in range(1, 1000) if is_up(at_s - step / 100) != is_up(at_s)), 60.0)


def look_at(is_up, at_s):
    """Return what one look at a link shows."""
    now = Fingerprint(nodes={}, heard_s=60.0 + at_s, moved={"host1": {"link be0": seconds_since_a_change(is_up, at_s)}})
    return fingerprint.look_of([] if is_up(at_s) else ["host1: link be0 was UP, is DOWN"], now)


@pytest.fixture
def quiet_time(monkeypatch):
    """Set the times that other tests shorten."""
    for name, value in (("QUIET_S", 2.0), ("MOVING_S", 5.0), ("SETTLE_S", 30.0)):
        monkeypatch.setattr(fingerprint, name, value)


@pytest.mark.usefixtures("quiet_time")
@pytest.mark.parametrize(
    ("is_up", "is_clean", "ends_s"),
    [
        (lambda _: True, True, 0.1),
        (lambda at_s: at_s > -1, True, 1.1),  # the fault has ended just now
        (lambda _: False, False, 30),
        (lambda at_s: at_s > 10, True, 15.4),  # BGP converges
        (lambda at_s: at_s > 28, True, 33.4),  # the quiet time may end after the limit
        (lambda at_s: at_s % 3.7 < 0.7, False, 30.7),  # up 0.7 s, down 3 s: the first equal look won
        (lambda at_s: at_s % 2.5 < 1.8, False, 42),
        (lambda at_s: (at_s + 5) % 6 < 4.5, False, 32),  # differs at the first look, and is up 4.5 s
        (
            lambda at_s: (at_s - 0.05) % 0.5 > 0.02,
            False,
            41,
        ),  # up at nearly every look, down ten times between two of them
    ],
    ids=("quiet", "just now", "broken", "converges", "late", "mostly down", "mostly up", "slow", "at every look"),
)
def test_lab_that_flaps_is_never_as_it_was(monkeypatch, is_up, is_clean, ends_s):
    clock = Clock()
    for module in (fingerprint, stopping):
        monkeypatch.setattr(module, "time", clock)

    def look():
        clock.now_s += clock.look_s
        return look_at(is_up, clock.now_s - 1000.0)

    assert (fingerprint.wait_for_quiet(look, within_s=30.0) == []) is is_clean
    assert ends_s - 2 <= clock.now_s - 1000.0 <= ends_s + 2


@pytest.mark.usefixtures("quiet_time")
def test_lab_that_is_up_at_every_look_and_flaps_between_them_is_named(monkeypatch):
    clock = Clock()
    for module in (fingerprint, stopping):
        monkeypatch.setattr(module, "time", clock)
    now = Fingerprint(nodes={}, heard_s=60.0, moved={"rtsw1": {"link ctsw1": 0.3, "route 10.0.0.0/24": 50.0}})
    left = fingerprint.wait_for_quiet(lambda: fingerprint.look_of([], now), within_s=30.0)
    assert left == ["rtsw1: link ctsw1 does not stay as it was: it changed 0.3 s before the last look"]


@pytest.mark.usefixtures("quiet_time")
def test_lab_whose_watchers_are_new_is_looked_at_again(monkeypatch):
    """What has changed before a watcher listens is unknown: a lab is quiet once it was watched for two seconds."""
    clock, looks = Clock(), []
    for module in (fingerprint, stopping):
        monkeypatch.setattr(module, "time", clock)

    def look():
        looks.append(clock.now_s)
        return fingerprint.look_of([], Fingerprint(nodes={}, heard_s=clock.now_s - 1000.0))

    assert fingerprint.wait_for_quiet(look, within_s=30.0) == []
    assert looks == [1000.0, 1002.0]


@pytest.mark.usefixtures("quiet_time")
@pytest.mark.parametrize("others", [(), ("host2",)])
def test_link_that_flaps_at_the_end_of_a_command_makes_the_lab_dirty(tmp_path, monkeypatch, others):
    """Three seconds down and 0.7 s up, for ever: CLEAN, because the first look without a difference won."""
    lab, clock = SimpleNamespace(name="x", state_dir=tmp_path, reserved=("*",), topology=soft_topology()), Clock()
    is_flapping = []

    def capture(_):
        clock.now_s += clock.look_s
        is_up = (lambda at_s: at_s % 3.7 <= 0.7) if is_flapping else lambda _: True
        return Fingerprint(
            nodes={"host1": {"link be0": "UP" if is_up(clock.now_s) else "DOWN"}, "host2": {"link be0": "UP"}},
            heard_s=60.0,
            moved={"host1": {"link be0": seconds_since_a_change(is_up, clock.now_s)}},
        )

    monkeypatch.setattr(fingerprint, "capture", capture)
    work = dirty.begin(lab, "run x")
    is_flapping.append(True)
    for module in (fingerprint, stopping):
        monkeypatch.setattr(module, "time", clock)
    running = [SimpleNamespace(covers=(name,), name=f"inject at {name}") for name in others]
    monkeypatch.setattr(dirty, "_others_running", lambda *_: tuple(running))
    assert dirty.end(lab, work).state == "DIRTY"
    assert dirty.is_marked(tmp_path)
