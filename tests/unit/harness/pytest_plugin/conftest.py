"""Fixtures of the tests of sessions inside a session."""

from __future__ import annotations

import pytest

from testbed.directories import cache_dir

CACHE = str(cache_dir())


@pytest.fixture(autouse=True)
def ansible_cache(monkeypatch):
    """Keep what Ansible said of inventories: pytester's home is empty, and asking again takes half a second."""
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)
