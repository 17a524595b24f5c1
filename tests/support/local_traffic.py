"""A lab whose hosts are folders of processes on this machine: real engines and a real storage, without RDMA or VMs.

`kill` ends all processes of a host, as a reboot does. `freeze` stops them, so that the host becomes silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
from dataclasses import replace

import local_engine

from faultbed.testbed.errors import CommandFailed, Unreachable
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.remote.jsonlines import next_message
from faultbed.testbed.remote.remote_node import Completed
from faultbed.testbed.shipped import inventories
from faultbed.traffic.engine import engine_client


class LocalChannel:
    def __init__(self, what, process):
        self.what, self.process, self.lines = what, process, queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with self.process.stdout as out:
            for line in out:
                self.lines.put(line)
        self.lines.put(None)

    def send(self, message):
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self.what} is gone") from error

    def receive(self, *, timeout_s):
        return next_message(self.lines, program=self.what, stderr_note="", timeout_s=timeout_s)

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class LocalNode:
    def __init__(self, lab, name):
        self.lab, self.name = lab, name

    def run(self, argv, *, timeout_s=60.0, stdin=None, check=True):
        del timeout_s, stdin, check
        if self.name in self.lab.dead:
            raise CommandFailed(f"{self.name}: no answer")
        if argv[0] == "pkill":
            self.lab.kill(self.name, is_dead=False)
        stdout = self._gids(argv[-2]) if argv[0] == "grep" and self.name not in self.lab.bare else ""
        return Completed(argv=tuple(argv), rc=0, stdout=stdout, stderr="")

    def _gids(self, folder):
        """Return the GID of an RNIC as sysfs shows it; `folder` is the one of its GIDs."""
        rnics = self.lab.topology.host_by_name[self.name].rnics
        (octets,) = (bytes(map(int, rnic.ip.split("."))) for rnic in rnics if f"/{rnic.name}/" in folder)
        gid = f"{'0000:' * 5}ffff:{octets[:2].hex()}:{octets[2:].hex()}"
        types = folder.removesuffix("gids") + "gid_attrs/types"
        return f"{folder}/1:{gid}\n{types}/1:RoCE v2\n"

    def open(self, argv):
        if self.name in self.lab.dead:
            raise Unreachable(f"{self.name} does not answer")
        if argv == [engine_client.MODULE]:
            process = local_engine.start(self.lab.folder)
        else:
            process = local_engine.start_program(*argv)
        self.lab.processes.setdefault(self.name, []).append(process)
        channel = LocalChannel(f"{self.name}: {argv[-1]}", process)
        self.lab.channels.append(channel)
        return channel


class LocalLab:
    name, kind, accelerator = "local", "soft", None

    def __init__(self, folder, inventory="soft-3rack.yml"):
        topology = load(inventories() / inventory).topology
        hosts = tuple(replace(host, front_end_address="127.0.0.1/8") for host in topology.hosts)
        self.topology = replace(topology, hosts=hosts)
        self.folder, self.processes, self.channels, self.dead = folder, {}, [], set()
        self.cut = frozenset()  # links that are down
        self.bare = set()  # hosts whose RNICs have no address

    def node(self, name):
        return LocalNode(self, name)

    def open_module(self, name, module, *words):
        if name in self.dead:
            raise Unreachable(f"{name} does not answer")
        return self.node(name).open([module, *words])

    def forget(self, name):
        pass

    def down_links(self, nodes, *, timeout_s):
        del nodes, timeout_s
        return self.cut

    def engines_of(self, host):
        return [one for one in self.processes.get(host, ()) if one.poll() is None]

    def kill(self, host, *, is_dead=True):
        """End the processes of a host. It answers again after `revive`, or at once if the host itself is alive."""
        if is_dead:
            self.dead.add(host)
        for process in self.engines_of(host):
            process.kill()

    def freeze(self, host):
        self.dead.add(host)
        for process in self.engines_of(host):
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self, host):
        self.dead.discard(host)
        for process in self.engines_of(host):
            os.kill(process.pid, signal.SIGCONT)

    def revive(self, host):
        for process in self.engines_of(host):
            process.kill()
        self.dead.discard(host)

    def close(self):
        for channel in self.channels:
            channel.process.kill()
            channel.process.wait(timeout=10)
            channel.close()
            channel.reader.join(timeout=10)
