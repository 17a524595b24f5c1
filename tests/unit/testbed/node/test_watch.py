"""The watcher as a real program on this machine, with requests over its pipes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from house import HOUSE

from faultbed.testbed.node import watch


class Program:
    def __init__(self, *inside):
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "faultbed.testbed.node.watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HOUSE,
            text=True,
        )

    def ask(self, **request):
        self.send(json.dumps(request))
        return self.next()

    def send(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next(self):
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def program():
    one = Program()
    yield one
    one.process.stdin.close()
    assert one.process.wait(timeout=10) == 0
    one.process.stdout.close()


def test_watcher_answers_each_request_with_its_number(program):
    """The answer to each request carries its sequence number."""
    assert program.ask(do="clock", seq=1)["monotonic_ns"] > 0
    counted = program.ask(do="counters", nodes={"here": None}, seq=2)
    assert (counted["seq"], counted["event"]) == (2, "counters")
    assert "lo.rx_bytes" in counted["nodes"]["here"]
    looked = program.ask(do="state", nodes={"here": None}, seq=3)
    assert "link lo" in looked["nodes"]["here"]


@pytest.mark.parametrize("line", ["no json", "[]", "{}", '{"do":"dance"}', '{"do":"counters","nodes":{"x":"no-such"}}'])
def test_watcher_invalid_request_is_an_error_and_not_its_end(program, line):
    """The reply is one clear error, and the next request is answered as usual."""
    program.send(line)
    assert program.next()["event"] == "error"
    assert program.ask(do="clock")["event"] == "clock"


def test_watcher_reports_a_kernel_log_that_it_cannot_follow(monkeypatch):
    """A log that could not be opened must not look like an empty log."""

    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(watch, "KernelLog", refuse)
    one = watch.Watch()
    assert "not permitted" in one.follow({"nodes": {}, "every_ms": 100, "report_ms": 4000})["no_log"]


@pytest.mark.skipif(os.geteuid() != 0, reason="packet sockets need root")
def test_watcher_notices_packets_beside_other_requests_and_keeps_no_tap(program):
    assert program.ask(do="tap", id="one", ports={"here": [None, "lo"]})["event"] == "tapping"
    assert program.ask(do="tap", id="other", ports={"here": [None, "lo"]})["event"] == "tapping"
    assert program.ask(do="untap", id="other")["seen"] == {"here": False}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(40), ("127.0.0.1", 4791))
    assert program.ask(do="clock")["event"] == "clock"
    assert program.ask(do="untap", id="one", seq=5) == {"event": "untapped", "seq": 5, "seen": {"here": True}}
    assert program.ask(do="untap", id="one")["seen"] == {}
    assert "No such device" in program.ask(do="tap", id="one", ports={"here": [None, "no-such-port"]})["error"]


def test_watcher_samples_until_stopped(program):
    """Samples arrive unprompted at increasing times with their cost; none arrive after the stop."""
    assert program.ask(do="follow", nodes={"here": None}, every_ms=10, report_ms=1000)["event"] == "following"
    batch = program.next()
    assert batch["event"] == "samples"
    assert batch["busy_ns"] > 0
    assert [at_ns for at_ns, _ in batch["samples"]] == sorted(at_ns for at_ns, _ in batch["samples"])
    program.send('{"do":"unfollow"}')
    while (event := program.next())["event"] == "samples":
        pass
    assert event["event"] == "unfollowed"
    assert program.ask(do="clock")["event"] == "clock"


def test_watcher_knows_how_long_links_routes_and_queues_have_not_changed():
    """`moved` names what the kernel reported since the first request, whether or not somebody follows."""
    program = Program("unshare", "-rn")
    ip = ["nsenter", "-U", "-n", "--preserve-credentials", "-t", str(program.process.pid)]
    try:
        first = program.ask(do="state", nodes={"here": None})
        assert (first["moved"], first["heard_s"] < 5) == ({}, True)
        program.ask(do="follow", nodes={"here": None}, every_ms=10_000, report_ms=100_000)
        subprocess.run([*ip, "ip", "link", "set", "lo", "up"], check=True)
        assert program.next()["event"] == "change"
        program.send('{"do":"unfollow"}')
        while program.next()["event"] != "unfollowed":
            pass
        subprocess.run([*ip, "ip", "route", "add", "10.9.0.0/24", "dev", "lo"], check=True)
        later = program.ask(do="state", nodes={"here": None})
        assert later["heard_s"] > first["heard_s"]
        ago_s = later["moved"]["here"]
        subprocess.run([*ip, "sh", "-c", "ip addr add 10.8.0.1/32 dev lo; ip addr del 10.8.0.1/32 dev lo"], check=True)
        subprocess.run([*ip, "sh", "-c", "ip rule add pref 99 table 7; ip rule del pref 99"], check=True)
        back = program.ask(do="state", nodes={"here": None})["moved"]["here"]
        assert {"address lo 10.8.0.1/32", "rule 99 lookup 7"} <= back.keys(), "gone again, and not unseen"
        (route,) = (subject for subject in ago_s if "10.9.0.0" in subject)
        assert 0 <= ago_s[route] <= ago_s["link lo"] <= later["heard_s"]
    finally:
        program.process.stdin.close()
        assert program.process.wait(timeout=10) == 0
        program.process.stdout.close()
