"""A watcher that runs on this machine."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

from house import HOUSE

from faultbed.testbed.errors import Unreachable
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.kernel_messages import KernelMessages
from faultbed.testbed.remote.jsonlines import next_message


class Pipe:
    """A program on this machine behind the interface of `faultbed.testbed.remote.remote_node.Channel`."""

    def __init__(self, argv):
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HOUSE)
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send(self, message):
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Unreachable("gone") from error

    def receive(self, *, timeout_s):
        return next_message(self.lines, program="here", stderr_note="", timeout_s=timeout_s)

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(timeout=10)
        self.reader.join(timeout=10)
        self.process.stdout.close()


class Here(Lab):
    """A lab of one machine: this one. Its watchers are started, queried and replaced as in any lab."""

    topology = SimpleNamespace(host_by_name={"here": None}, switch_by_name={})

    def __init__(self):
        self._watchers, self._started_ahead, self._lock = {}, {}, threading.Lock()
        self.kernel_messages = KernelMessages()
        self.channels = []

    def _fork(self, *_):
        return None

    def ensure_code(self, name):
        pass

    def python(self, module):
        return [sys.executable, "-m", module]

    def node(self, name):
        return self

    def open(self, argv):
        self.channels.append(Pipe(argv))
        return self.channels[-1]

    def carried(self, nodes):
        return {"here": dict.fromkeys(nodes)}
