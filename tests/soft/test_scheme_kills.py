"""A routing scheme whose holder, controller or spine dies at a drawn time: packets blackholed, and the next start.

Numbered datagrams cross the fabric all the time. The loss when a spine dies without a scheme is that of BGP's
convergence. `tests/unit/testbed/node/test_switch_agent.py` has twenty more kills, in one namespace.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading

import pytest
from waiting import until, wait_s

from faultbed.inject.journal import Journal
from faultbed.inject.routing.scheme_lease import SchemeLease
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.observe import switch_routing
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

SCHEME, SEED = "static-parity", 29
ROUNDS = 3
"""Of each of the three that die."""
PLACED_ROUNDS = int(os.environ.get("FAULTBED_KILLS", "8"))
"""Deaths of te's controller and holder, in turn: the first two of four after the rules are on, the others before."""
PORT = 40000
EVERY_S = 0.004
DOWN_S = 3.0
SPREAD_S = 0.2
"""Two deaths without a scheme differed by 0.11 s (264 and 152 ms)."""

_SENDER = """
import json, socket, sys, threading, time
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.bind((sys.argv[1], int(sys.argv[5])))
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
number = 0
print(json.dumps({"event": "sending"}), flush=True)
while not over.wait(float(sys.argv[4])):
    out.sendto(number.to_bytes(8, "big"), (sys.argv[2], int(sys.argv[3])))
    number += 1
"""
_RECEIVER = """
import json, socket, sys, threading
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
end.bind((sys.argv[1], int(sys.argv[2])))
numbers = set()
def receive():
    while True:
        numbers.add(int.from_bytes(end.recv(64), "big"))
threading.Thread(target=receive, daemon=True).start()
print(json.dumps({"event": "receiving"}), flush=True)
first = 0
for line in sys.stdin:
    had = set(numbers)
    last = max(had, default=first)
    print(json.dumps({"sent": last - first, "lost": sum(one not in had for one in range(first, last))}), flush=True)
    first = last
"""
_KILL = """
for turn in $(seq 400); do
    unit=$(systemctl list-units --plain --no-legend 'faultbed-fault-routing*' | cut -d' ' -f1)
    [ -n "$unit" ] && sleep "$1" && exec systemctl kill --signal=KILL --kill-whom=main $unit
    sleep 0.05
done
exit 1
"""
_CONTROLLER = """
import sys, time
from pathlib import Path
from faultbed.inject.journal import Journal
from faultbed.inject.routing.scheme_lease import SchemeLease
from faultbed.testbed.lab import open_lab
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
with open_lab(Path(sys.argv[1])) as lab, Journal(Path(sys.argv[2])) as journal:
    machine = lab.carrier("rtsw1").name
    lease = SchemeLease(lab, scheme_tables(lab.topology, sys.argv[3], Routing()), machine, journal)
    print("begins", flush=True)
    lease.apply()
    time.sleep(300)
"""
_PLACER = """
import sys, time
from pathlib import Path
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.routing_scheme import scheme_of
from faultbed.inject.journal import Journal
from faultbed.testbed.lab import open_lab
with open_lab(Path(sys.argv[1])) as lab, Journal(Path(sys.argv[2])) as journal:
    scheme = scheme_of(lab, Fabric(routing="te", cycle=1.0), journal)
    print("begins", flush=True)
    with scheme.applied(journal):
        print("applied", flush=True)
        time.sleep(300)
"""


def spine_of(lab, src, dst, sport):
    """Return the ECMP next hop that the rack switch's kernel chooses for datagrams from a source port."""
    port = lab.topology.rnic_link("host1", "rxe0").a.netdev
    words = f"route get {dst} from {src} iif {port} ipproto udp sport {sport} dport {PORT}".split()
    return lab.node("rtsw1").run(["ip", *words]).stdout.split(" dev ")[1].split()[0]


@contextlib.contextmanager
def stream(lab):
    """Send datagrams from rack 1 to rack 2, over ctsw1 both by ECMP and by the scheme.

    Yield a function that returns {"sent", "lost"} since its last call.
    """
    src, dst = lab.topology.hosts[0], lab.topology.hosts[2]
    here, there = (host.rnics[0].address.split("/")[0] for host in (src, dst))
    sport = next(port for port in range(PORT + 1, PORT + 65) if spine_of(lab, here, there, port) == "ctsw1")
    receiver = lab.node(dst.name).open(["python3", "-c", _RECEIVER, there, str(PORT)])
    sender = lab.node(src.name).open(["python3", "-c", _SENDER, here, there, str(PORT), str(EVERY_S), str(sport)])
    try:
        for end in (receiver, sender):
            assert end.receive(timeout_s=30.0)

        def since():
            wait_s(0.5)
            receiver.send({"do": "count"})
            return receiver.receive(timeout_s=30.0)

        until(lambda: since()["sent"] > 10, within_s=30.0)
        yield since
    finally:
        sender.close()
        receiver.close()


def on_switches(lab):
    """Return the rules and tables of routing schemes, by switch."""
    switches = switch_routing.read(lab, lab.topology.switch_by_name).switches
    return {
        name: (one["rules"], {table: routes for table, routes in one["tables"].items() if table != "main"})
        for name, one in switches.items()
    }


def is_clear(lab):
    return all(state == ([], {}) for state in on_switches(lab).values())


def lease_on(lab, journal):
    return SchemeLease(lab, scheme_tables(lab.topology, SCHEME, Routing()), lab.carrier("rtsw1").name, journal)


@contextlib.contextmanager
def applied(lab, journal):
    lease = lease_on(lab, journal)
    lease.apply()
    try:
        assert lease.readback["whole"], lease.readback
        yield lease
    finally:
        assert lease.release().ok


def spine_dies(lab, inject, is_whole):
    """Reboot the spine that carries the datagrams, and wait until every switch has its earlier routes."""
    fault = inject("switch.reboot", "ctsw1")
    assert fault.arm().ok
    wait_s(DOWN_S)
    assert fault.clear().cleared.ok
    until(lambda: is_whole(lab), within_s=90.0)


def main_routes(lab):
    return {
        name: {prefix: sorted(hops) for prefix, hops in one["tables"].get("main", {}).items()}
        for name, one in switch_routing.read(lab, lab.topology.switch_by_name).switches.items()
    }


def test_kills_of_holder_controller_and_spine_blackhole_no_more_than_bgp_alone(lab, inject, tmp_path):
    choice, machine = random.Random(SEED), lab.node(lab.carrier("rtsw1").name)
    routes = main_routes(lab)
    lost = {"holder": [], "controller": [], "spine": [], "spine, BGP alone": []}

    def kill_holder(after_s):
        """Kill the holder this long after its unit appeared; it may already have ended."""
        machine.run(["sh", "-c", _KILL, "kill", f"{after_s:.2f}"], check=False, timeout_s=60.0)

    with Journal(tmp_path / "journal.jsonl") as journal, stream(lab) as since:
        with applied(lab, journal):
            reference = on_switches(lab)
        assert any(rules for rules, _ in reference.values())
        since()
        for number in range(ROUNDS):
            spine_dies(lab, inject, lambda lab: main_routes(lab) == routes)
            lost["spine, BGP alone"].append(since()["lost"])
            print(lost)

            with applied(lab, journal):
                assert on_switches(lab) == reference
                since()
                spine_dies(lab, inject, lambda lab: main_routes(lab) == routes and on_switches(lab) == reference)
                lost["spine"].append(since()["lost"])
                print(lost)

            since()
            killer = threading.Thread(target=kill_holder, args=(choice.uniform(0.0, 3.0),))
            killer.start()
            lease = lease_on(lab, journal)
            with contextlib.suppress(FaultbedError):
                lease.apply()
            killer.join()
            until(lambda: is_clear(lab), within_s=30.0)
            lost["holder"].append(since()["lost"])
            lease.release()

            with applied(lab, journal):
                assert on_switches(lab) == reference
            since()
            argv = [sys.executable, "-c", _CONTROLLER, str(lab.inventory), str(tmp_path / f"killed{number}"), SCHEME]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as controller:
                assert controller.stdout.readline() == b"begins\n"
                wait_s(choice.uniform(0.0, 6.0))
                os.kill(controller.pid, signal.SIGKILL)
            until(lambda: is_clear(lab), within_s=30.0)
            lost["controller"].append(since()["lost"])
            with applied(lab, journal):
                assert on_switches(lab) == reference
            since()
    print(f"datagrams lost, one each {EVERY_S * 1e3:g} ms:", lost)
    assert (lost["holder"], lost["controller"]) == ([0] * ROUNDS, [0] * ROUNDS)
    assert max(lost["spine, BGP alone"]) > 0, "the datagrams cross the spine that dies"
    assert max(lost["spine"]) <= max(lost["spine, BGP alone"]) + SPREAD_S / EVERY_S


def test_placed_scheme_whose_controller_or_holder_dies_loses_nothing_and_comes_back_equal(lab, tmp_path):
    """A controller's death ends its channel, so the rules go at once; the next one writes the same, byte for byte."""
    choice, machine = random.Random(SEED), lab.node(lab.carrier("rtsw1").name)
    lost, reference, compared = {"controller": [], "holder": []}, None, 0
    with stream(lab) as since:
        for number in range(PLACED_ROUNDS):
            victim, waits = ("controller", "holder")[number % 2], number % 4 < 2
            since()
            argv = [sys.executable, "-c", _PLACER, str(lab.inventory), str(tmp_path / f"placer{number}")]
            with dying(argv) as controller:
                assert controller.stdout.readline() == b"begins\n"
                if waits:
                    assert controller.stdout.readline() == b"applied\n"
                    rules = {name: sorted(map(str, rules)) for name, (rules, _) in on_switches(lab).items()}
                    assert any(rules.values())
                    reference, compared = reference or rules, compared + 1
                    assert rules == reference
                moment_s = choice.uniform(0.0, 3.0)
                if victim == "controller":
                    wait_s(moment_s)
                else:
                    machine.run(["sh", "-c", _KILL, "kill", f"{moment_s:.2f}"], check=False, timeout_s=60.0)
                    print(f"holder: rules gone after {until(lambda: is_clear(lab), within_s=90.0):.1f} s")
            print(f"{victim}: clear after {until(lambda: is_clear(lab), within_s=90.0):.1f} s")
            lost[victim].append(since()["lost"])
    print(f"{lost}; rules equal {compared} of {compared}")
    assert not any(lost["controller"] + lost["holder"])
    assert compared > 1


@contextlib.contextmanager
def dying(argv):
    """Start a controller, and kill it at the end of the block, also after an error."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as controller:
        try:
            yield controller
        finally:
            os.kill(controller.pid, signal.SIGKILL)
