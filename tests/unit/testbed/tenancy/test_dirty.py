"""A DIRTY lab refuses work until it is healed or reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
    monkeypatch.setattr(fingerprint.settle, "__kwdefaults__", {"within_s": 0.0})
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
