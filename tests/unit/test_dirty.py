"""A lab that is not as it was refuses work until it has been healed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from testbed.errors import DirtyLab
from testbed.observe import fingerprint
from testbed.observe.fingerprint import Fingerprint
from testbed.tenancy import dirty

BEFORE = Fingerprint(nodes={"rtsw1": {"link ctsw1": "UP"}})
AFTER = Fingerprint(nodes={"rtsw1": {"link ctsw1": "down"}})


def lab_that_looks(monkeypatch, folder, now):
    monkeypatch.setattr(fingerprint, "capture", lambda _: now)
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint.settle, "__kwdefaults__", {"within_s": 0.0})
    return SimpleNamespace(name="soft", state_dir=folder)


def test_a_clean_lab_takes_work(tmp_path):
    """Nothing is marked, nothing is refused."""
    dirty.refuse(tmp_path, "soft")
    assert not dirty.is_marked(tmp_path)


def test_a_marked_lab_refuses_work_with_the_way_out(tmp_path):
    """One sentence: what is wrong first, how much more, and both ways out; exit code 5."""
    dirty.mark(tmp_path, ["rtsw1: link ctsw1 was UP, is down", "host1: unit x is new"], BEFORE)
    with pytest.raises(DirtyLab) as caught:
        dirty.refuse(tmp_path, "soft")
    assert caught.value.exit_code == 5
    assert all(word in str(caught.value) for word in ("link ctsw1", "1 more", "faultbed heal", "faultbed reset"))


def test_healing_brings_back_what_was_before(tmp_path, monkeypatch):
    """The mark goes when the lab looks as it did before, and stays, with the difference, when it does not."""
    dirty.mark(tmp_path, ["x"], BEFORE)
    assert dirty.settle(lab_that_looks(monkeypatch, tmp_path, AFTER)) != []
    assert dirty.is_marked(tmp_path)
    assert dirty.settle(lab_that_looks(monkeypatch, tmp_path, BEFORE)) == []
    assert not dirty.is_marked(tmp_path)


def test_the_first_mark_stays(tmp_path, monkeypatch):
    """What the lab looked like before the first fault is what it has to look like again."""
    dirty.mark(tmp_path, ["first"], BEFORE)
    dirty.mark(tmp_path, ["second"], AFTER)
    assert dirty.settle(lab_that_looks(monkeypatch, tmp_path, AFTER)) != []
    with pytest.raises(DirtyLab, match="first"):
        dirty.refuse(tmp_path, "soft")


def test_without_knowledge_only_a_reset_helps(tmp_path, monkeypatch):
    """A lab that nobody had looked at before cannot be healed into a known state; neither can a torn mark."""
    lab = lab_that_looks(monkeypatch, tmp_path, BEFORE)
    dirty.mark(tmp_path, ["x"], None)
    assert "reset" in dirty.settle(lab)[0]
    (tmp_path / "dirty.json").write_text('{"rea')
    with pytest.raises(DirtyLab, match="its state is unknown"):
        dirty.refuse(tmp_path, "soft")
    dirty.clean(tmp_path)
    assert dirty.settle(lab) == []
