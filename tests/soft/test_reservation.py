"""Reservations stored on another machine, over real SSH, as on a rack lab's jump host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from faultbed.testbed.tenancy.reservation import Entry, Reserved, release, reserve
from faultbed.testbed.tenancy.reservation_store import FOLDER, node_store

pytestmark = pytest.mark.soft

USERS = 3


def entry(user, now_s):
    return Entry(
        token=user, owner=user, mode="exclusive", covers=("host1",), who=f"{user}@there", why="test",
        since_s=now_s, until_s=now_s + 600,
    )  # fmt: skip


def test_reservation_one_of_several_users_gets_the_lab_and_the_others_get_the_holders_name(lab):
    """All try at once over SSH, on a machine with its own clock. Leftovers are removed."""
    node = lab.node("host1")
    store = node_store(node, lab="test-of-reservations")

    def refusal_of(user):
        try:
            store.change(lambda now: reserve(now.book, entry(user, now.now_s), now_s=now.now_s))
        except Reserved as refused:
            return str(refused)
        return None

    try:
        with ThreadPoolExecutor(max_workers=USERS) as pool:
            output = list(pool.map(refusal_of, [f"user{number}" for number in range(USERS)]))
        (holder,) = store.read().book
        assert output.count(None) == 1
        assert all(holder.who in refusal for refusal in output if refusal is not None)
        store.change(lambda now: release(now.book, holder.token))
        assert store.read().book == ()
        assert refusal_of("latecomer") is None
    finally:
        node.run(["rm", "-rf", FOLDER])
