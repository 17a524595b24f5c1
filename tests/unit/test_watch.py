"""The watcher as a program: asked over its pipes, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house import HOUSE


class Program:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "testbed.node.watch"],
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


def test_it_answers_what_it_is_asked_for(program):
    """The answer to each question carries its number."""
    assert program.ask(do="clock", seq=1)["monotonic_ns"] > 0
    counted = program.ask(do="counters", nodes={"here": None}, seq=2)
    assert (counted["seq"], counted["event"]) == (2, "counters")
    assert "lo.rx_bytes" in counted["nodes"]["here"]
    looked = program.ask(do="state", nodes={"here": None}, seq=3)
    assert "link lo" in looked["nodes"]["here"]


@pytest.mark.parametrize("line", ["no json", "[]", "{}", '{"do":"dance"}', '{"do":"counters","nodes":{"x":"no-such"}}'])
def test_what_it_cannot_do_is_an_error_and_not_its_end(program, line):
    """One clear answer, and the next question is answered as ever."""
    program.send(line)
    assert program.next()["event"] == "error"
    assert program.ask(do="clock")["event"] == "clock"


def test_it_samples_until_told_to_stop(program):
    """Samples come by themselves, at growing times, with what they cost; after the end none come."""
    assert program.ask(do="follow", nodes={"here": None}, every_ms=10, tell_ms=1000)["event"] == "following"
    batch = program.next()
    assert batch["event"] == "samples"
    assert batch["busy_ns"] > 0
    assert [at_ns for at_ns, _ in batch["samples"]] == sorted(at_ns for at_ns, _ in batch["samples"])
    program.send('{"do":"unfollow"}')
    while (said := program.next())["event"] == "samples":
        pass
    assert said["event"] == "unfollowed"
    assert program.ask(do="clock")["event"] == "clock"
