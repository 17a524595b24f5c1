"""A simulation of users who share a lab: the real reservation code over a simulated jump host.

Real: `hold`, `LabLease`, `reserve_by_hand`, `change` of the store, and the contents of its file. Simulated: clocks,
processes that die, and the jump host. Its shell executes the two scripts step by step, and `test_reservation_model.py`
compares it with the scripts. Between two steps another user may continue, a process may be killed, the jump host may
lose its power, its clock may be set, or a laptop may sleep.
"""

import contextlib
import hashlib
import random
import threading
from types import SimpleNamespace

import msgspec

from faultbed.testbed import shipped
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.tenancy import lab_lease, reservation_store
from faultbed.testbed.tenancy.reservation import conflicts, live, release
from faultbed.testbed.tenancy.reservation_store import ReservationStore

INVENTORY = inventory_module.load(shipped.inventories() / "soft-mini.yml")
LINK = INVENTORY.topology.links[0].name
NAMES = ((), ("host1",), ("host2",), (LINK,), ("host1:rxe0",), ("rtsw1",), ("host1", "rtsw1"))
MODES = ("shared", "exclusive", "exclusive")
TTL_S = 300.0


class Killed(BaseException):
    """SIGKILL of the process of a user."""


class JumpHost:
    """A jump host: a disk, a lock, a wall clock that users set, and an uptime."""

    def __init__(self, world):
        self.world = world
        self.boots, self.booted_s, self.day_ahead_s = 1, 0.0, 0.0
        self.json = self.new = None
        self.kept = None  # of the book, what is on the disk
        self.locked_by = None

    def lose_power(self):
        """Reboot at once with the contents of the disk. Commands in progress are cut off."""
        self.boots, self.booted_s, self.locked_by, self.new = self.boots + 1, self.world.true_s, None, None
        self.json = self.kept

    def shell_of(self, user):
        def shell(argv, stdin):
            if user.dying:
                raise Killed
            boot = self.boots
            self.world.pause(user, remote=True)
            status, out = self.read(user) if argv[3] == "read" else self.write(user, boot, stdin, *argv[6:])
            if user.dying:
                raise Killed
            self.world.pause(user)
            return (255, "", "connection lost") if self.boots != boot else (status, out, "")

        return shell

    def read(self, user):
        up_s = self.world.true_s - self.booted_s
        day_s = self.world.true_s + self.day_ahead_s
        stamps = f"boot{self.boots}\n{up_s:.2f}\n{day_s:.3f}\n"
        if self.world.broken == "clock":  # as in earlier versions: the time of day, which any user may set
            stamps = f"boot{self.boots}\n{day_s:.3f}\n{day_s:.3f}\n"
        self.world.pause(user, remote=True)
        return 0, stamps + ("none\n" if self.json is None else f"book\n{self.json}")

    def write(self, user, boot, stdin, have, digest):  # noqa: PLR0911 (as the script ends, so does it)
        def step():
            self.world.pause(user, remote=True)
            return self.boots == boot

        if user.dying:  # killed before all of it was sent
            stdin = stdin[: self.world.chance.randrange(len(stdin))]
        if hashlib.sha256(stdin.encode()).hexdigest() != digest and self.world.broken != "torn":
            return 6, ""
        begun_s = self.world.true_s
        while self.locked_by is not None and self.world.broken != "lock":
            if not step() or self.world.true_s > begun_s + 20:
                return 5, ""
        self.locked_by = user
        try:
            if not step():
                return 255, ""
            result = hashlib.sha256(self.json.encode()).hexdigest() if self.json is not None else ""
            if not step():
                return 255, ""
            if result != have and self.world.broken != "digest":
                return 3, ""
            self.new = stdin
            if user.dying and self.world.chance.random() < 0.5:
                return 255, ""  # its shell was killed as well, in the middle
            if not step():
                return 255, ""
            self.json = self.new
            if not step():
                return 255, ""
            self.kept = self.kept if self.world.broken == "sync" else self.json
            return 0, ""
        finally:
            if self.boots == boot and self.locked_by is user:
                self.locked_by = None


class User:
    """A user's process, on a machine whose clock is fast or slow, and which may sleep."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.owner = f"person{min(number, 1)}"  # two of the three are one person in two terminals
        self.machine = f"machine{max(number, 1)}"
        self.rate = world.chance.choice((1.0, 1.0, 1 - 0.083, 1 + 0.083))
        self.offset_s = world.chance.uniform(0, 1e6)
        self.slept_s = 0.0
        self.lives, self.dying, self.over = 0, False, False
        self.holding = self.mode = None
        self.got = self.lost = 0
        self.turn = threading.Semaphore(0)
        self.store = ReservationStore(where="jump", folder="/x", lab="x", shell=world.jump.shell_of(self))

    def clock_s(self):
        passed_s = self.world.true_s - (self.slept_s if self.world.broken == "sleep" else 0.0)
        return self.offset_s + passed_s * self.rate

    @property
    def process(self):
        return f"{self.machine}:{self.number}:{self.lives}"

    def believes(self):
        """Return the parts of the lab that the user believes to hold now."""
        lease = self.holding
        return lease is not None and lease._lost is None and self.clock_s() < lease._sure_until

    def live(self):
        """Run one process after the other until the simulation ends. This is the thread of a user."""
        LOCAL.user = self
        self.turn.acquire()
        while not self.world.over:
            with contextlib.suppress(FaultbedError, Killed):
                self.once()
            self.holding = None
            self.lives, self.dying = self.lives + 1, False
            self.world.pause(self, may_die=False)
        self.over = True
        self.world.back.release()

    def once(self):
        chance = self.world.chance
        if chance.random() < 0.1:
            lab_lease.reserve_by_hand(
                INVENTORY, chance.choice(self.world.names), for_s=chance.choice((50, 5000)), why="model"
            )
            return
        if chance.random() < 0.1:
            self.store.change(lambda now: release(now.book, f"booking-{self.owner}"))
            return
        names, mode = chance.choice(self.world.names), chance.choice(MODES)
        with lab_lease.hold(INVENTORY, names, why="model", mode=mode, ttl_s=TTL_S) as lease:
            self.holding, self.mode, self.got = lease, mode, self.got + 1
            for _ in range(chance.randrange(12)):
                self.world.pause(self)
                try:
                    chance.choice((lease.refresh, lease.heartbeat))()
                except FaultbedError:
                    self.lost += 1
                    raise
            self.holding = None


class World:
    """Three users, a jump host and a random generator. `broken` disables a mechanism that separates holders."""

    def __init__(self, seed, broken=None):
        self.chance, self.broken = random.Random(seed), broken
        # In some worlds all happens at once, in others a lease is over in no time.
        self.hurry = self.chance.choice((0.02, 0.2, 0.6))
        self.names = self.chance.sample(NAMES, 3)
        self.trouble = self.chance.choice((0.01, 0.05))
        # Whether users take turns at every step, or one does many before another one goes on.
        self.stays = self.chance.choice((0.0, 0.9))
        self.true_s, self.over = 1e9, False
        self.back = threading.Semaphore(0)
        self.jump = JumpHost(self)
        self.users = [User(self, number) for number in range(3)]
        self.doubles = []

    def pause(self, user, *, may_die=True, remote=False):
        """Let other users continue, and perhaps kill this one. Half of the commands on the jump host then continue."""
        self.back.release()
        user.turn.acquire()
        if not may_die:
            return
        if self.over:
            raise Killed
        if not user.dying and self.chance.random() < 0.005:
            user.dying, user.holding = True, None
            if not remote or self.chance.random() < 0.5:
                raise Killed

    def run(self, steps):
        threads = [threading.Thread(target=user.live, daemon=True) for user in self.users]
        for thread in threads:
            thread.start()
        user = self.users[0]
        for _ in range(steps):
            self.happen()
            user = user if self.chance.random() < self.stays else self.chance.choice(self.users)
            self.go(user)
            self.look()
        self.over = True
        for user in self.users:
            while not user.over:
                self.go(user)
        for thread in threads:
            thread.join()
        return self

    def go(self, user):
        user.turn.release()
        self.back.acquire()

    def happen(self):
        """Advance the time, and sometimes cause a rare event."""
        later = self.chance.random() < self.hurry
        self.true_s += self.chance.choice((5.0, 50.0, 100.0, TTL_S - 10, TTL_S + 10) if later else (0.0, 0.01, 0.5))
        odd = self.chance.random() / self.trouble
        if odd < 1:
            self.jump.day_ahead_s += self.chance.choice((-7200.0, -30.0, 30.0, 7200.0))
        elif odd < 2:
            self.jump.lose_power()
        elif odd < 3:
            slept_s = self.chance.choice((60.0, 290.0, 3600.0))
            self.true_s += slept_s
            self.chance.choice(self.users).slept_s += slept_s

    def look(self):
        sure = [user for user in self.users if user.believes()]
        for index, one in enumerate(sure):
            for other in sure[index + 1 :]:
                mine, theirs = (
                    SimpleNamespace(token=x.holding.token, covers=x.holding.covers, owner=x.owner, mode=x.mode)
                    for x in (one, other)
                )
                if conflicts(mine, theirs):
                    self.doubles.append((one.number, other.number))
        if self.jump.json is not None:
            try:
                book = msgspec.json.decode(self.jump.json, type=reservation_store._File)
            except msgspec.DecodeError:
                self.doubles.append("the book cannot be read")
                return
            known = live(book.entries, now_s=book.clock.written_s)
            self.doubles += [(a.token, b.token) for a in known for b in known if a is not b and conflicts(a, b)]


LOCAL = threading.local()


def install(monkeypatch):
    """Make the reservation code use the clock and processes of the user whose thread it runs in."""
    monkeypatch.setattr(lab_lease, "store_of", lambda _: LOCAL.user.store)
    monkeypatch.setattr(lab_lease, "owner", lambda: LOCAL.user.owner)
    monkeypatch.setattr(lab_lease, "who", lambda: LOCAL.user.process)
    monkeypatch.setattr(lab_lease, "now_s", lambda: LOCAL.user.clock_s())  # noqa: PLW0108 (asked in each thread)
    monkeypatch.setattr(lab_lease, "this_process", lambda: LOCAL.user.process)
    monkeypatch.setattr(lab_lease, "is_dead", is_dead)
    monkeypatch.delenv(lab_lease.INHERITED, raising=False)


def is_dead(process):
    """Return whether a process is dead, as `lab_lease.is_dead`: known only on the process's own machine."""
    machine, number, life = process.split(":")
    me = LOCAL.user
    if machine != me.machine and me.world.broken != "dead":
        return False
    other = me.world.users[int(number)]
    return other.lives != int(life) or other.dying or me.world.broken == "dead"
