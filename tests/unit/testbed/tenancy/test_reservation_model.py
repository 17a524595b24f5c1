"""Never two owners: the reservation code in ten thousand interleavings of killed, sleeping and overtaken users.

Then the two real scripts, which the model's jump host simulates: killed at each of their commands, with truncated
input, and compared with the model on the same requests.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import reservation_world
from reservation_world import JumpHost, World
from samples import some_of

from faultbed.testbed.errors import LabError
from faultbed.testbed.tenancy import lab_lease, reservation
from faultbed.testbed.tenancy.reservation import Entry
from faultbed.testbed.tenancy.reservation_store import _WRITE, local_store

STEPS = 60


@pytest.fixture
def world(monkeypatch):
    reservation_world.install(monkeypatch)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("worlds", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_interleaving_has_two_holders(worlds):
    acquired = lost = boots = 0
    for seed in range(worlds):
        done = World(seed).run(STEPS)
        assert done.doubles == [], f"seed {seed}"
        acquired += sum(user.got for user in done.users)
        lost += sum(user.lost for user in done.users)
        boots += done.jump.boots - 1
    # The simulation did acquire and lose reservations, and the jump host did lose power.
    assert acquired > worlds / 2
    assert lost > worlds / 10
    assert boots > worlds


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("broken", some_of(["lock", "digest", "torn", "clock", "sleep", "sync", "dead"], 4))
def test_model_each_exclusion_mechanism_is_needed(broken):
    """Without any one of the mechanisms, some interleaving has two owners. Two of these first appear after seed 200."""
    assert any(World(seed, broken).run(100).doubles for seed in range(200, 3_000))


@pytest.mark.usefixtures("world")
def test_model_conflict_rule_is_needed(monkeypatch):
    monkeypatch.setattr(reservation, "conflicts", lambda *_: False)
    assert any(World(seed).run(100).doubles for seed in range(200))


@pytest.mark.usefixtures("world")
def test_model_safety_margin_of_the_lease_is_needed(monkeypatch):
    """Without the margin, one interleaving in six hundred has two owners. The search begins shortly before it."""
    monkeypatch.setattr(lab_lease, "_SURE", 1.0)
    assert any(World(seed).run(100).doubles for seed in range(590, 3_000))


def entry(token, until_s=1e12):
    return Entry(
        token=token, owner="me", mode="exclusive", covers=("host1",), who="w", why="y", since_s=0.0, until_s=until_s
    )


KILLER = """\
#!/bin/sh
exec 8>>"$KILL/one_by_one"; %s 8
n=$(($(%s "$KILL/n") + 1)); echo $n >"$KILL/n"
exec 8>&-
[ $n -ne "$KILL_BEFORE" ] || kill -KILL 0
"%s" "$@"; status=$?
[ $n -ne "$KILL_AFTER" ] || kill -KILL 0
exit $status
"""
COMMANDS = ("cat", "sha256sum", "cut", "mkdir", "flock", "sync", "mv")


@pytest.mark.parametrize("side", ["KILL_BEFORE", "KILL_AFTER"])
def test_store_write_killed_at_any_command_leaves_the_old_or_the_new_book(tmp_path, side):
    """SIGKILL of the group before or after each command of the real script; the next write succeeds."""
    for name in COMMANDS:
        (tmp_path / name).write_text(KILLER % (shutil.which("flock"), shutil.which("cat"), shutil.which(name)))
        (tmp_path / name).chmod(0o755)
    outcomes, number, killed = set(), 0, True
    while killed:
        number += 1
        store = local_store(tmp_path / f"lab{number}", lab="x")
        assert store.write((entry("old"),), after=store.read())
        (tmp_path / "n").write_text("0")
        environment = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KILL": str(tmp_path), "KILL_BEFORE": "0",
            "KILL_AFTER": "0", side: str(number),
        }  # fmt: skip

        def shell(argv, stdin, environment=environment):
            done = subprocess.run(
                argv, input=stdin, capture_output=True, text=True, check=False, env=environment, start_new_session=True
            )
            return done.returncode, done.stdout, done.stderr

        under = type(store)(where="here", folder=store.folder, lab="x", shell=shell)
        try:
            assert under.write((entry("new"),), after=store.read())
            killed = False
        except LabError:
            killed = True
        now = store.read()
        assert [reservation.token for reservation in now.book] in (["old"], ["new"]), f"killed at command {number}"
        outcomes |= {(killed, now.book[0].token)}
        assert store.write((entry("next"),), after=now)
    assert outcomes == {(True, "old"), (True, "new"), (False, "new")}
    assert number > len(COMMANDS)


def test_store_write_with_truncated_input_changes_nothing(tmp_path):
    """If the writer dies before all input is sent, an empty book would release everything."""
    store = local_store(tmp_path, lab="x")
    assert store.write((entry("old"),), after=store.read())
    real = store.shell
    for keep in (0, 1, 40):
        cut = type(store)(
            where="here", folder=store.folder, lab="x",
            shell=lambda argv, stdin, keep=keep: real(argv, stdin and stdin[:keep]),
        )  # fmt: skip
        with pytest.raises(LabError, match="it arrived incomplete"):
            cut.write((), after=store.read())
        assert [reservation.token for reservation in store.read().book] == ["old"]


def test_store_write_that_hangs_does_not_block_others(tmp_path):
    store = local_store(tmp_path, lab="x")
    reading = store.read()
    argv = ["sh", "-c", _WRITE, "write", store.folder, "x", reading.digest, "0" * 64]
    asleep = subprocess.Popen(argv, stdin=subprocess.PIPE)  # its stdin stays open, as when a laptop is suspended
    try:
        began = time.monotonic()
        assert store.write((entry("mine"),), after=reading)
        assert time.monotonic() - began < 15  # the refusal does not come from waiting for the lock, which takes 20 s
        assert asleep.poll() is None
    finally:
        asleep.send_signal(signal.SIGKILL)
        asleep.communicate()


def test_store_unreadable_book_is_not_an_empty_one(tmp_path):
    store = local_store(tmp_path, lab="x")
    empty = store.read()
    book = tmp_path / "reservations" / "x.json"
    book.mkdir(parents=True)  # reading this existing file is an error even for root
    with pytest.raises(LabError, match="cannot be read"):
        store.read()
    with pytest.raises(LabError, match="cannot be written"):
        store.write((), after=empty)
    book.rmdir()
    book.write_text("")
    with pytest.raises(LabError, match="not a reservation file of this version"):
        store.read()


def test_model_jump_host_answers_as_the_scripts_do(tmp_path):
    """Equal writes, some overtaken and some truncated, go to the real scripts and to the model's steps."""
    real = local_store(tmp_path, lab="x")
    world = World(0)
    world.pause = lambda *_, **__: None
    model = type(real)(where="jump", folder="/x", lab="x", shell=JumpHost(world).shell_of(world.users[0]))
    chance, readings = random.Random(1), [(real.read(), model.read())]
    for number in range(40):
        after = chance.choice(readings[-3:])
        texts = tuple(entry(f"{number}.{n}") for n in range(chance.randrange(1, 4)))
        actual = [store.write(texts, after=reading) for store, reading in zip((real, model), after, strict=True)]
        assert actual[0] == actual[1]
        readings.append((real.read(), model.read()))
        assert readings[-1][0].book == readings[-1][1].book
        torn = ["sh", "-c", _WRITE, "write", real.folder, "x", readings[-1][0].digest, hashlib.sha256(b"x").hexdigest()]
        assert [store.shell(torn, "{")[0] for store in (real, model)] == [6, 6]


def test_store_clock_change_ends_no_lease_and_a_boot_keeps_the_remaining_time(tmp_path):
    stamps = {"boot": "b1", "up": 100.0, "day": 5000.0}
    real = local_store(tmp_path, lab="x")

    def shell(argv, stdin):
        status, out, err = real.shell(argv, stdin)
        if argv[3] == "read":
            out = f"{stamps['boot']}\n{stamps['up']}\n{stamps['day']}\n" + out.split("\n", 3)[3]
        return status, out, err

    store = type(real)(where="jump", folder=real.folder, lab="x", shell=shell)
    booked = Entry(
        token="b", owner="me", mode="booking", covers=("host2",), who="w", why="y", since_s=5000.0, until_s=9000.0
    )
    store.change(lambda now: (entry("lease", until_s=now.now_s + 300), booked))
    stamps |= {"up": 110.0, "day": 12000.0}
    assert store.read().now_s == 5010.0
    stamps |= {"up": 120.0, "day": 0.0}
    assert store.read().now_s == 5020.0
    stamps |= {"boot": "b2", "up": 5.0, "day": 8000.0}
    store.change(lambda now: now.book)
    stamps |= {"up": 15.0, "day": 99000.0}
    result = store.read()
    assert (result.now_s, [reservation.until_s for reservation in result.book]) == (8010.0, [8300.0, 9000.0])
    stamps |= {"boot": "b3", "up": 1.0, "day": 0.0}  # no battery
    assert store.read().now_s == 8000.0
