"""What the pytest plugin does when its lab does not do what it should."""

from types import SimpleNamespace

import pytest

from harness.plugin import hooks as plugin
from harness.plugin import session_lab as pytest_lab
from testbed.errors import Unreachable

pytest_plugins = ["pytester"]


def test_a_fixture_that_is_only_called_lab_brings_no_lab_up(pytester):
    """Unit tests with a stand-in named `lab` had five VMs booted, for nobody."""
    pytester.makepyfile(test_own="import pytest\n@pytest.fixture\ndef lab(): ...\ndef test_own(lab): ...\n")
    pytester.makepyfile(test_ours="def test_ours(lab): ...\ndef test_injects(inject): ...\ndef test_pure(): ...\n")
    items, _ = pytester.inline_genitems()
    takes = {item.name: plugin._takes_lab(item) for item in items}
    assert takes == {"test_own": False, "test_ours": True, "test_injects": True, "test_pure": False}


SLOW = """
import pytest

@pytest.mark.slow
def test_slow(lab): ...

@pytest.mark.parametrize("name", ["easy", pytest.param("hard", marks=pytest.mark.slow)])
def test_both(lab, name): ...

@pytest.mark.slow
def test_pure(): ...
"""


@pytest.mark.parametrize(
    ("options", "slow", "quick", "pure"),
    [((), 1, 1, 1), (("--repeat=3",), 3, 3, 1), (("--repeat=3", "--repeat-slow=1"), 1, 3, 1)],
    ids=["once", "repeated", "slow-ones-once"],
)
def test_what_takes_the_lab_is_repeated_and_what_is_slow_less_often(pytester, options, slow, quick, pure):
    pytester.makepyfile(test_slow=SLOW)
    told = pytester.runpytest_inprocess("-q", "--collect-only", "-m", "", *options).outlines
    names = [line.partition("::")[2] for line in told if "::" in line]
    found = {
        "slow": sum(name.startswith("test_slow") for name in names),
        "hard": sum("hard" in name for name in names),
        "quick": sum("easy" in name for name in names),
        "pure": names.count("test_pure"),
    }
    assert found == {"slow": slow, "hard": slow, "quick": quick, "pure": pure}


def test_a_lab_that_is_lost_is_opened_anew_by_the_next_test(monkeypatch):
    """A lab that went down came back on other ports, and 29 tests were run against the old ones."""
    opened = []

    def open_lab(inventory):
        opened.append(SimpleNamespace(closed=False, close=lambda: None))
        return opened[-1]

    monkeypatch.setattr(pytest_lab, "bring_up", lambda config: None)
    monkeypatch.setattr(pytest_lab, "held", lambda config: None)
    monkeypatch.setattr(pytest_lab, "open_lab", open_lab)
    config = SimpleNamespace(stash=pytest.Stash())
    assert pytest_lab.keeper_of(config).lab is pytest_lab.keeper_of(config).lab is opened[0]
    with pytest.raises(Unreachable), pytest_lab.or_give_up(config):
        raise Unreachable("host1 does not answer")
    assert pytest_lab.keeper_of(config).lab is opened[1]
    with pytest_lab.or_give_up(config):
        pass
    assert pytest_lab.keeper_of(config).lab is opened[1]


THROTTLES = """
import pytest
from types import SimpleNamespace
from harness.plugin import hooks as plugin
from testbed import inventory
from testbed.errors import UsageError
from testbed.shipped import inventories


class Stand:
    def __init__(self, lab, journal, *, mutate=None):
        self.open = []

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def active(self):
        return tuple(self.open)

    def prepare(self, planned):
        receipt = SimpleNamespace(id=planned.id, to_json=dict)
        prepared = SimpleNamespace(planned=planned)
        prepared.clear = lambda: prepared in self.open and self.open.remove(prepared) or receipt
        self.open.append(prepared)
        return prepared


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setattr(plugin, "Injector", Stand)
    return SimpleNamespace(topology=inventory.load(inventories() / "soft.yml").topology, kind="soft")


def test_two(inject):
    one, two = (inject("gpu.throttle", f"host{n}:gpu0", percent=50) for n in (1, 2))
    others = ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")
    assert one.planned.must_not_move == two.planned.must_not_move == others
    with pytest.raises(UsageError, match="gpu.thermal on host2:gpu0 beside gpu.throttle on host2:gpu0"):
        inject("gpu.thermal", "host2:gpu0")
    two.clear()
    assert "host2/gpu0.nr_throttled" not in one.planned.must_not_move
    three = inject("gpu.thermal", "host2:gpu0")
    assert three.planned.must_not_move == others
"""


def test_faults_of_one_test_are_planned_together(pytester):
    """Two throttled GPUs spoke against each other, and neither was proved."""
    pytester.makepyfile(test_throttles=THROTTLES)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
