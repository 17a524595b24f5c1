"""What the pytest plugin does when its lab does not do what it should."""

from types import SimpleNamespace

import pytest

from harness import pytest_plugin as plugin
from testbed.errors import Unreachable

pytest_plugins = ["pytester"]


def test_a_fixture_that_is_only_called_lab_brings_no_lab_up(pytester):
    """Unit tests with a stand-in named `lab` had five VMs booted, for nobody."""
    pytester.makepyfile(test_own="import pytest\n@pytest.fixture\ndef lab(): ...\ndef test_own(lab): ...\n")
    pytester.makepyfile(test_ours="def test_ours(lab): ...\ndef test_injects(inject): ...\ndef test_pure(): ...\n")
    items, _ = pytester.inline_genitems()
    takes = {item.name: plugin._takes_lab(item) for item in items}
    assert takes == {"test_own": False, "test_ours": True, "test_injects": True, "test_pure": False}


def test_a_lab_that_is_lost_is_opened_anew_by_the_next_test(monkeypatch):
    """A lab that went down came back on other ports, and 29 tests were run against the old ones."""
    opened = []

    def open_lab(inventory):
        opened.append(SimpleNamespace(closed=False, close=lambda: None))
        return opened[-1]

    monkeypatch.setattr(plugin, "_bring_up", lambda config: None)
    monkeypatch.setattr(plugin, "_hold", lambda config: None)
    monkeypatch.setattr(plugin, "open_lab", open_lab)
    config = SimpleNamespace(stash=pytest.Stash())
    assert plugin._keeper(config).lab is plugin._keeper(config).lab is opened[0]
    with pytest.raises(Unreachable), plugin._or_give_up(config):
        raise Unreachable("host1 does not answer")
    assert plugin._keeper(config).lab is opened[1]
    with plugin._or_give_up(config):
        pass
    assert plugin._keeper(config).lab is opened[1]
