"""Fixtures of tests that run pytest inside pytest."""

from __future__ import annotations

import pytest

from faultbed.testbed.directories import cache_dir

CACHE = str(cache_dir())


@pytest.fixture(autouse=True)
def ansible_cache(monkeypatch):
    """Keep Ansible's cached inventories: pytester's home is empty, and reading one again takes half a second."""
    monkeypatch.setenv("FAULTBED_CACHE", CACHE)
