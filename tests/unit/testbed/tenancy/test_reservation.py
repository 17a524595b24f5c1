"""Reservations: the conflict rule, a store that several users change without a server, and never two owners."""

import getpass
import json
import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from house import HOUSE

from faultbed.testbed import shipped
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.tenancy import dirty, reservation_store
from faultbed.testbed.tenancy import lab_lease as lease_module
from faultbed.testbed.tenancy.lab_lease import LabLease, hold, hold_if_recorded, is_dead, reserve_by_hand, this_process
from faultbed.testbed.tenancy.reservation import (
    WHOLE_LAB,
    Entry,
    ReservationLost,
    Reserved,
    conflicts,
    covered,
    outside,
    refresh,
    release,
    reserve,
)
from faultbed.testbed.tenancy.reservation_store import Reading, ReservationStore, local_store

INVENTORY = inventory_module.load(shipped.inventories() / "soft.yml")


def entry(token="a", owner="me", mode="exclusive", covers=("host1",), since_s=0.0, until_s=100.0, process=None):
    return Entry(
        token=token, owner=owner, mode=mode, covers=covers, who=f"{owner}@x", why="w", since_s=since_s,
        until_s=until_s, process=process,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (entry("a", "me"), entry("b", "you"), True),
        (entry("a", "me"), entry("b", "you", covers=("host2",)), False),
        (entry("a", "me"), entry("b", "you", covers=(WHOLE_LAB,)), True),
        (entry("a", "me", "booking"), entry("b", "me", "exclusive"), False),
        (entry("a", "me", "booking"), entry("b", "you", "shared"), True),
        (entry("a", "me", "shared"), entry("b", "me", "shared"), False),
        (entry("a", "me", "shared"), entry("b", "you", "shared"), True),
        (entry("a", "me", "shared"), entry("b", "me", "exclusive"), True),
        (entry("a", "me", "exclusive"), entry("b", "me", "exclusive"), True),
        (entry("a", "me", "booking"), entry("b", "me", "booking"), True),
        (entry("a", "me"), entry("a", "me"), False),
    ],
)
def test_conflicts_is_symmetric_and_follows_the_rule(one, other, expected):
    assert conflicts(one, other) == conflicts(other, one) == expected


def test_reserved_error_names_holder_reason_and_end():
    book = reserve((), entry(owner="ada", since_s=0, until_s=7200), now_s=0)
    with pytest.raises(Reserved) as error:
        reserve(book, entry("b", "bob"), now_s=1800)
    for word in ("host1 is reserved", "ada@x", "since 30 min", "another 90 min"):
        assert word in str(error.value)


UPLINKS = {"rtsw1": frozenset({"rtsw1:ctsw1", "rtsw1:ctsw2"}), "rtsw2": frozenset({"rtsw2:ctsw1", "rtsw2:ctsw2"})}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (entry("a", "ada", covers=("rtsw1:ctsw1",)), entry("b", "bob", covers=("rtsw1:ctsw2",))),
        (
            entry("a", "ada", covers=covered(INVENTORY.topology, ["ctsw1"])),
            entry("b", "bob", covers=("host1", "rtsw2:ctsw2")),
        ),
        (entry("a", "ada", "shared", covers=("rtsw1:ctsw1",)), entry("b", "ada", "shared", covers=("rtsw1:ctsw2",))),
    ],
)
def test_claims_that_together_leave_a_rack_no_uplink_conflict(first, second):
    """Each fault alone leaves its rack an uplink, but both together leave none."""
    book = reserve((), first, now_s=0, never_all=UPLINKS)
    with pytest.raises(Reserved, match=r"the other uplinks of rtsw[12] may be down \(ada@x, w"):
        reserve(book, second, now_s=0, never_all=UPLINKS)
    assert reserve(book, second, now_s=0), "a lab that allows it"
    assert reserve(book, second, now_s=100.0, never_all=UPLINKS), "the first one has run out"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (entry("a", "ada", covers=("rtsw1:ctsw1",)), entry("b", "bob", covers=("rtsw2:ctsw2",))),
        (entry("a", "ada", covers=("rtsw1:ctsw1",)), entry("b", "bob", covers=("host1", "rtsw1:host1:rxe0"))),
        (entry("a", "ada", "booking", covers=("rtsw1:ctsw1",)), entry("b", "bob", covers=("rtsw1:ctsw2",))),
        (entry("a", "ada", covers=("host1",)), entry("b", "bob", covers=("rtsw1:ctsw1", "rtsw1:ctsw2"))),
        (entry("a", "ada", covers=("rtsw1:ctsw1",)), entry("a", "ada", covers=("rtsw1:ctsw2",))),
    ],
)
def test_claims_that_leave_each_rack_an_uplink_coexist(first, second):
    """A booking by itself cuts no uplink. If a single claim has all uplinks of a rack, the policy of faults decides."""
    assert reserve(reserve((), first, now_s=0, never_all=UPLINKS), second, now_s=0, never_all=UPLINKS)


def test_claim_of_a_racks_last_uplink_is_refused(monkeypatch, tmp_path):
    """`hold` checks the stored reservations. A soft lab has a single user, so the rule does not apply there."""
    rack = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
    store = local_store(tmp_path, lab=rack.name)
    monkeypatch.setattr(lease_module, "store_of", lambda _inventory: store)
    first, *others = (link.name for link in rack.topology.links_of("rtsw1") if link.is_uplink)
    with hold(rack, [first], why="link.down", mode="shared"):
        last = hold(rack, others, why="link.down", mode="shared")
        with pytest.raises(Reserved, match="the other uplinks of rtsw1 may be down"), last:
            pass
    with hold(rack, [first], why="link.down", mode="shared"):
        pass
    assert not INVENTORY.safety
    assert INVENTORY.may_lose_all_uplinks
    assert not rack.may_lose_all_uplinks


def test_store_on_a_disk_that_hangs_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("faultbed.testbed.tenancy.reservation_store.SHELL_S", 0.01)
    monkeypatch.setattr("faultbed.testbed.tenancy.reservation_store._READ", "sleep 5")
    with pytest.raises(LabError, match=r"has not answered for 0\.01 s"):
        local_store(tmp_path, lab="soft").read()


def test_dirty_part_of_a_rack_stays_reserved_until_healed(monkeypatch, tmp_path):
    """The dirty mark is on its owner's machine, so only the reservation can refuse other users."""
    rack = inventory_module.load(shipped.inventories() / "rack-h100.example.yml")
    store, homes = local_store(tmp_path, lab=rack.name), {name: tmp_path / name for name in ("ada", "bob")}
    monkeypatch.setattr(lease_module, "store_of", lambda _inventory: store)

    def working(name, *things):
        monkeypatch.setenv("FAULTBED_HOME", str(homes[name]))
        return hold(rack, things, why=f"{name}'s", mode="exclusive")

    with working("ada", "host1"):
        dirty.mark(lab_dir(rack.name), ["host1: a rule stayed"], None)
    with pytest.raises(Reserved, match=r"host1.* left DIRTY by .*, ada's, \d+ s ago; run `faultbed heal` as that user"):
        working("bob", "host1").__enter__()
    with working("bob", "host2"):
        pass
    with working("ada"), pytest.raises(Reserved):  # for example preflight, which uses the whole lab and leaves it clean
        working("bob", "host2").__enter__()
    with working("bob", "host2"):
        pass
    with working("ada", "host1"):  # heal, which finds no difference any more
        dirty.clean(lab_dir(rack.name))
    with working("bob", "host1"):
        pass
    assert store.read().book == ()


def test_reservation_that_expired_or_whose_process_died_is_free():
    book = reserve((), entry(until_s=10), now_s=0)
    assert reserve(book, entry("b", "you"), now_s=10.0) == (entry("b", "you"),)
    book = reserve((), entry(process="p1"), now_s=0)
    with pytest.raises(Reserved):
        reserve(book, entry("b", "you"), now_s=1)
    assert reserve(book, entry("b", "you"), now_s=1, is_dead=lambda process: process == "p1") == (entry("b", "you"),)


def test_refresh_never_revives_or_shortens_a_reservation():
    book = reserve((), entry(until_s=100), now_s=0)
    assert refresh(book, "a", until_s=50)[0].until_s == 100
    assert refresh(book, "a", until_s=150)[0].until_s == 150
    with pytest.raises(ReservationLost):
        refresh(release(book, "a"), "a", until_s=150)


def test_covered_resolves_each_kind_of_name():
    topology = INVENTORY.topology
    assert covered(topology, ()) == (WHOLE_LAB,)
    assert covered(topology, ["rtsw1:ctsw1"]) == ("rtsw1:ctsw1",)
    assert covered(topology, ["host1"]) == ("host1", "rtsw1:host1:rxe0", "rtsw1:host1:rxe1")
    assert covered(topology, ["host1:rxe0"]) == ("rtsw1:host1:rxe0",)
    assert covered(topology, ["host1:gpu0"]) == covered(topology, ["host1"])
    assert set(covered(topology, ["rtsw1"])) > {"rtsw1", "rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw1:host2:rxe1"}
    with pytest.raises(UsageError, match="did you mean host1"):
        covered(topology, ["hots1"])


def test_booking_limits_what_its_owner_touches():
    book = reserve((), entry(mode="booking", covers=("host1", "link1")), now_s=0)
    assert outside(book, "me", ("host1", "host2"), now_s=1) == ("host2",)
    assert outside(book, "me", (WHOLE_LAB,), now_s=1) == (WHOLE_LAB,)
    assert outside(book, "you", ("host2",), now_s=1) == ()
    assert outside(book, "me", ("host2",), now_s=101) == ()


_HAMMER = """
import sys
import time
from pathlib import Path
from faultbed.testbed.tenancy.reservation import Entry, Reserved, release, reserve
from faultbed.testbed.tenancy.reservation_store import local_store
store, got, number = local_store(Path(sys.argv[1]), lab="x"), 0, 0
while got < int(sys.argv[3]):
    number += 1
    def wanted(now):
        return Entry(token=f"{sys.argv[2]}-{number}", owner=sys.argv[2], mode="exclusive", covers=("host1",),
                     who="w", why="y", since_s=now.now_s, until_s=now.now_s + 600)
    try:
        store.change(lambda now: reserve(now.book, wanted(now), now_s=now.now_s))
    except Reserved:
        continue
    inside = Path(sys.argv[1]) / "inside"
    inside.mkdir()        # fails when another one is inside
    inside.rmdir()
    store.change(lambda now: release(now.book, f"{sys.argv[2]}-{number}"))
    got += 1
print(got)
"""


@pytest.mark.process
def test_real_processes_on_a_real_file_exclude_each_other(tmp_path):
    """The real shell scripts run in several processes at once; creating a directory detects two owners."""
    argv = [sys.executable, "-c", _HAMMER, str(tmp_path)]
    running = [
        subprocess.Popen([*argv, f"user{number}", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    output = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], output
    assert [int(out) for out, _ in output] == [5, 5, 5]
    assert local_store(tmp_path, lab="x").read().book == ()


def test_store_of_another_version_is_reported_and_not_overwritten(tmp_path):
    store = local_store(tmp_path, lab="x")
    assert store.write((entry(),), after=store.read())
    path = tmp_path / "reservations" / "x.json"
    path.write_text('{"schema": 1, "entries": [], "colour": "blue"}')
    with pytest.raises(LabError, match="not a reservation file of this version"):
        store.read()


def test_store_write_after_a_concurrent_write_is_rejected(tmp_path):
    store = local_store(tmp_path, lab="x")
    stale = store.read()
    assert store.write((entry(),), after=stale)
    assert not store.write((), after=stale)
    assert store.read().book == (entry(),)


def test_store_folder_that_is_not_writable_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "reservations").write_text("a file where the folder should be")
    store = local_store(tmp_path, lab="x")
    with pytest.raises(LabError, match="install -d -m 2775"):
        store.write((), after=Reading(book=(), now_s=0.0, digest="0" * 64))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(lease_module.INHERITED, raising=False)
    return tmp_path / "home"


@pytest.fixture
def other_user(home, monkeypatch):
    """Act as another user of the same lab."""

    def become(name):
        monkeypatch.setattr(lease_module, "owner", lambda: name)
        monkeypatch.setattr(lease_module, "who", lambda: f"{name}@there")

    return become


def test_lease_ends_with_its_block_and_excludes_others_meanwhile(home, other_user):
    with hold(INVENTORY, ["host1"], why="test", mode="exclusive") as mine:
        mine.refresh()
        other_user("bob")
        with pytest.raises(Reserved, match=r"rtsw1:host1:rxe0 is reserved: .*, test, since"):
            hold(INVENTORY, ["host1:rxe0"], why="inject", mode="shared").__enter__()
        with hold(INVENTORY, ["host2"], why="disjoint", mode="exclusive"):
            pass
    with hold(INVENTORY, ["host1"], why="later", mode="exclusive"):
        pass


@pytest.fixture
def full_disk(monkeypatch):
    """No reservation can be written any more."""
    return lambda: monkeypatch.setattr(reservation_store, "_WRITE", "echo No space left on device >&2; exit 4")


def test_full_disk_keeps_no_lab_up_and_no_fault_in_place(home, full_disk, other_user):
    """`down --purge` frees the disk, and was refused because it was full. What others hold still refuses it."""
    with hold(INVENTORY, ["host1"], why="test", mode="exclusive"):
        full_disk()
        with pytest.raises(LabError, match=r"No space left.*free disk space"):
            hold(INVENTORY, ["host2"], why="run", mode="exclusive").__enter__()
        with hold_if_recorded(INVENTORY, ["host2"], why="heal"):
            pass
        other_user("bob")
        with pytest.raises(Reserved, match="test"):
            hold_if_recorded(INVENTORY, why="down").__enter__()


def test_command_whose_disk_fills_up_reports_its_result_and_not_its_lease(home, full_disk):
    """The receipt of a fault was lost, because the lease could not be taken off the list; it ends with the process."""
    with hold(INVENTORY, ["host1"], why="inject", mode="exclusive"):
        full_disk()


@pytest.mark.process
def test_lease_of_a_dead_process_on_this_machine_is_free(home):
    code = (
        "import os, sys\nfrom faultbed.testbed import shipped\n"
        "from faultbed.testbed.inventory.lab_inventory import load\n"
        "from faultbed.testbed.tenancy.lab_lease import hold\n"
        "hold(load(shipped.inventories() / 'soft.yml'), why='killed', mode='exclusive').__enter__()\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with hold(INVENTORY, why="next", mode="exclusive"):
        pass


def test_is_dead_is_false_for_living_and_unknown_processes():
    assert not is_dead(this_process())
    machine, pid, start = this_process().rsplit(":", 2)
    assert is_dead(f"{machine}:{pid}:{int(start) + 1}")
    assert not is_dead(f"another-boot:pid:[1]:{pid}:1")
    assert not is_dead("x")
    assert not is_dead(f"{machine}:pid:{start}")


def test_lease_that_was_removed_raises_reservation_lost(home):
    with pytest.raises(ReservationLost, match="must not change"), hold(INVENTORY, why="x", mode="exclusive") as mine:
        mine.store.change(lambda _now: ())
        mine._sure_until = 0.0
        mine.heartbeat()
    assert mine._lost is not None


def test_lease_that_another_user_took_over_after_the_last_refresh_is_reported_at_the_end(home, other_user):
    """After its last refresh, the process was stopped (SIGSTOP, or suspend) for longer than the lease."""
    with (
        pytest.raises(ReservationLost, match="not refreshed in time"),
        hold(INVENTORY, ["host1"], why="x", mode="exclusive") as mine,
    ):
        theirs = entry(token="b", owner="they")
        mine.store.change(lambda _now: (theirs,))
    assert mine.store.read().book == (theirs,)


def test_store_whose_machine_tells_no_time_is_an_error():
    store = ReservationStore(where="jump1", folder="/x", lab="x", shell=lambda *_: (0, "boot\nup\n%s\nnone\n", ""))
    with pytest.raises(LabError, match="jump1: the reservations cannot be read: unexpected clock readings"):
        store.read()


def test_lease_interrupted_during_acquisition_does_not_block_the_owner(tmp_path, monkeypatch):
    """The write succeeds, but its reply is lost. The next attempt must not wait for the owner's own lease."""
    store = local_store(tmp_path, lab="x")
    real, cuts = store.shell, []

    def shell(argv, stdin):
        done = real(argv, stdin)
        if argv[3] == "write" and cuts:
            raise cuts.pop()
        return done

    cut = ReservationStore(where="jump1", folder=store.folder, lab="x", shell=shell)
    monkeypatch.setattr(lease_module, "store_of", lambda _: cut)
    for error in (LabError, KeyboardInterrupt):
        cuts.append(error("connection lost"))
        with pytest.raises(error), hold(INVENTORY, ["host1"], why="cut", mode="exclusive"):
            pass
        assert store.read().book == ()


def test_user_without_a_name_holds_a_lease_and_is_named_by_number(home, monkeypatch):
    """A container that runs under a number without an entry in /etc/passwd could reserve nothing: KeyError."""

    def no_name():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", no_name)
    assert lease_module.who() == f"user {os.getuid()}@{socket.gethostname()}"
    with hold(INVENTORY, ["host1"], why="test", mode="exclusive") as lease:
        (entry,) = lease.store.read().book
    assert entry.who.startswith(f"user {os.getuid()}@")


def test_lease_expires_while_the_machine_sleeps():
    """CLOCK_MONOTONIC stops during suspend (clock_gettime(2)), so the lease uses another clock."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= lease_module.now_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_lease_tolerates_an_unreachable_jump_host_until_it_expires(monkeypatch):
    def shell(argv, stdin):
        return 255, "", "connection refused"

    clock = [0.0]
    monkeypatch.setattr(lease_module, "now_s", lambda: clock[0])
    store = ReservationStore(where="jump1", folder="/x", lab="x", shell=shell)
    holding = LabLease(store=store, token="t", covers=("host1",), ttl_s=100.0, _sure_until=100.0)
    clock[0] = 50.0
    holding.refresh()
    clock[0] = 101.0
    with pytest.raises(LabError, match="connection refused"):
        holding.refresh()


def test_reservation_of_no_time_is_refused(home):
    """It used to be reported as reserved, and was over before the next command."""
    with pytest.raises(UsageError, match="more than 0 s"):
        reserve_by_hand(INVENTORY, ["host1"], for_s=0, why="mine")
    assert lease_module.store_of(INVENTORY).read().book == ()


def test_booking_admits_its_owner_and_keeps_him_inside(home, other_user):
    reserve_by_hand(INVENTORY, ["host1", "host2"], for_s=60, why="mine")
    with hold(INVENTORY, ["host1"], why="flow", mode="shared"):
        pass
    with pytest.raises(UsageError, match=r"flow would touch host3.*outside your reservation"):
        hold(INVENTORY, ["host3"], why="flow", mode="shared").__enter__()
    reserve_by_hand(INVENTORY, ["host3"], for_s=60, why="mine now")
    with hold(INVENTORY, ["host3"], why="flow", mode="shared"):
        pass
    other_user("bob")
    with pytest.raises(Reserved, match="mine now"):
        reserve_by_hand(INVENTORY, [], for_s=60, why="all of it")


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_lease_of_a_dead_holder_is_taken_over_by_the_program_that_it_started(home, monkeypatch, other_user, dies):
    """The session was killed and the run that it had started went on: others could reserve the lab under it."""
    parent = subprocess.Popen(["sleep", "600"])
    process = f"{lease_module.boot_and_pid_namespace()}:{parent.pid}:{lease_module._start_of(parent.pid)}"
    store = lease_module.store_of(INVENTORY)
    above = entry(token="above", owner=lease_module.owner(), covers=("*",), process=process)
    store.change(lambda now: (msgspec.structs.replace(above, until_s=now.now_s + 900),))
    monkeypatch.setenv(lease_module.INHERITED, "above")

    def end():
        parent.kill()
        parent.wait(timeout=10)

    if dies == "before":
        end()
    below = hold(INVENTORY, ["host1"], why="run", mode="exclusive")
    lease = below.__enter__()
    if dies == "meanwhile":
        end()
        lease.refresh()
    other_user("bob")
    monkeypatch.delenv(lease_module.INHERITED)
    with pytest.raises(Reserved, match="w, since"):
        hold(INVENTORY, why="bob's", mode="exclusive").__enter__()
    below.__exit__(None, None, None)
    assert store.read().book == ()


def test_lease_is_inherited_by_programs_of_its_holder(home, monkeypatch):
    with hold(INVENTORY, why="pytest", mode="exclusive") as above:
        monkeypatch.setenv(lease_module.INHERITED, above.token)
        with hold(INVENTORY, ["host1"], why="inject", mode="shared") as below:
            assert below.token == above.token
        assert [reservation.token for reservation in above.store.read().book] == [above.token]


@pytest.fixture
def faultbed(home, forked):
    def call(*argv, who="me"):
        environment = {**os.environ, "FAULTBED_HOME": str(home), "COLUMNS": "160"}
        done = forked.faultbed([*argv], env=environment, cwd=HOUSE)
        assert "Traceback" not in done.stderr
        return done

    return call


def test_purge_does_not_report_its_own_reservation_as_lost(faultbed, home):
    """The purge removes the reservation with the lab's folder. The command ended with "another user released it"."""
    done = faultbed("--lab", "soft-mini", "down", "--purge")
    removed = f"removing {home / 'labs' / 'soft-mini'} with its files\n"
    assert (done.returncode, done.stderr) == (0, f"{removed}soft-mini was not up\n")
    assert not list((home / "labs").iterdir())


def test_reserve_status_and_release_commands_work_together(faultbed, home, other_user):
    assert faultbed("reserve", "host1", "--for", "2h", "--why", "incast study").returncode == 0
    shown = json.loads(faultbed("status", "--json").stdout)["reservations"]
    assert [(one["why"], one["covers"][0], one["mode"]) for one in shown] == [("incast study", "host1", "booking")]
    assert 7100 < shown[0]["left_s"] <= 7200
    assert "incast study" in faultbed("status").stdout
    refused = faultbed("down")
    assert refused.returncode == 4
    assert "outside your reservation" in refused.stderr
    (home / "owner").write_text("somebody-else")
    for argv in (["reserve"], ["down"], ["run", "tests/experiments/demo.toml"]):
        refused = faultbed(*argv)
        assert refused.returncode == 3
        assert "incast study" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
    assert "nothing was reserved by you" in faultbed("release").stderr
    assert "nothing was reserved by you" in faultbed("release", "--force", "host2").stderr  # does not release host1
    assert "faultbed release --force host1" in refused.stderr
    assert "incast study" in faultbed("release", "--force", "host1").stderr
    (line,) = json.loads(faultbed("audit", "--json").stdout)
    assert (line["event"], "incast study" in line["detail"]) == ("released by force", True)
    assert json.loads(faultbed("status", "--json").stdout)["reservations"] == []
