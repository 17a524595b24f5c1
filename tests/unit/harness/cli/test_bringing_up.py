"""What a run does to a soft lab that is down."""

from __future__ import annotations

import pytest

from faultbed.harness.cli.lab import bringing_up
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventory_named


@pytest.fixture
def soft(monkeypatch):
    """A soft lab whose state the test sets; what is done to it is recorded."""
    world = {"state": "down", "done": [], "said": []}
    monkeypatch.setattr(
        lifecycle,
        "status",
        lambda inventory: lifecycle.Status(
            name=inventory.name, state=world["state"], accelerator=None, snapshot=False, vms=()
        ),
    )
    monkeypatch.setattr(lifecycle, "up", lambda *_, **__: world["done"].append("up") or "up")
    monkeypatch.setattr(lifecycle, "down", lambda _: world["done"].append("down") or True)
    return world


def use(world, name="soft", **options):
    inventory = lab_inventory.load(inventory_named(name))
    given = {"no_up": False, "end_lab": False, **options}
    with bringing_up.brought_up(inventory, world["said"].append, **given):
        world["done"].append("run")


@pytest.mark.parametrize(("state", "word"), [("down", "minutes the first time"), ("down, snapshot kept", "seconds")])
def test_lab_that_is_down_is_brought_up_and_the_line_says_so(soft, state, word):
    soft["state"] = state
    use(soft)
    assert soft["done"] == ["up", "run"]
    assert "soft is down: bringing it up" in soft["said"][0]
    assert word in soft["said"][0]
    assert "--lab soft down" in soft["said"][0]


def test_lab_that_is_up_needs_no_line(soft):
    soft["state"] = "up"
    use(soft)
    assert soft["said"] == []


def test_no_up_refuses_a_lab_that_is_down_and_starts_nothing(soft):
    with pytest.raises(LabError, match="`faultbed --lab soft up` starts it"):
        use(soft, no_up=True)
    assert soft["done"] == []


def test_no_up_uses_a_lab_that_is_up(soft):
    soft["state"] = "up"
    use(soft, no_up=True)
    assert soft["done"] == ["up", "run"]  # which verifies that it is the present one


def test_down_ends_the_lab_whatever_happens(soft, monkeypatch):
    use(soft, end_lab=True)
    assert soft["done"] == ["up", "run", "down"]
    monkeypatch.setattr(lifecycle, "up", lambda *_, **__: (_ for _ in ()).throw(LabError("no disk")))
    soft["done"].clear()
    with pytest.raises(LabError, match="no disk"):
        use(soft, end_lab=True)
    assert soft["done"] == ["down"]


def test_down_is_refused_on_a_rack_lab(soft):
    with pytest.raises(UsageError, match="--down"):
        use(soft, "rack-h100.example", end_lab=True)
    assert soft["done"] == []
