"""Checked flows of the engine between two buffers on a GPU: the driver copies in place of the RNICs."""

from __future__ import annotations

import random

import memory_fabric
from engine_flows import flow_on, run_checked

SIZE = 70_001
"""Bytes of a message."""
_SPOILT_AT = 60_000


class GpuFabric(memory_fabric.Fabric):
    """A fabric between two buffers on a GPU: a copy by the driver takes the place of the RNICs.

    For verbs each dma-buf begins at address 0. Here each begins at an address of its own, because both ends are in one
    process.
    """

    EACH = 1 << 40

    def __init__(self, monkeypatch, pcie, **rest):
        super().__init__(random.Random(7), delay_ns=200_000, **rest)
        self.pcie, self.memories = pcie, []
        monkeypatch.setattr(memory_fabric, "ctypes", self)
        monkeypatch.setattr(memory_fabric.Rnic, "register_dmabuf", self.register, raising=False)

    def register(self, fd, size):
        return memory_fabric.SimpleNamespace(
            rkey=1, lkey=1, buf=self.EACH * (1 + len(self.memories)), close=lambda: None
        )

    def adopt(self, task):
        self.memories.append(task.buffer._memory)
        task.buffer.address = task.buffer.mr.buf

    def at(self, address):
        return self.memories[address // self.EACH - 1], address % self.EACH

    def string_at(self, address, size):
        memory, offset = self.at(address)
        return memory.read(size, offset)

    def memmove(self, target, source, size):
        data = source if isinstance(source, bytes) else self.string_at(source, size)
        memory, offset = self.at(target)
        memory.write(offset, data[:size])


def run_flow(monkeypatch, pcie, *, verb, is_spoilt, messages):
    """Run a checked flow in GPU memory, and return the final event of the end that checks."""
    fabric = GpuFabric(monkeypatch, pcie, rnr_retry=0)
    gpu = {"pcie": pcie, "number": 0}
    fields = {"verb": verb, "check": True, "message_bytes": SIZE, "messages": messages, "qps": 2, "depth": 4}
    flow_on(monkeypatch, fabric, gpu=gpu, on_task=fabric.adopt, **fields)
    if is_spoilt:
        spoil_one(fabric, verb)
    done = run_checked(fabric, verb)["tx" if verb == "read" else "rx"]
    for task in fabric.tasks.values():
        task.close()
    return done


def spoil_one(fabric, verb):
    """Flip a bit of one message: on its way (a write), or before it is read."""
    if verb == "read":
        held = fabric.tasks["rx"].buffer
        before = fabric.tasks["rx"].buffer.read(1, _SPOILT_AT)
        restore = iter([True])

        def spoilt(*message):
            if message[0] == memory_fabric.VERBS["read"] and message[2]:
                flipped = next(restore, False)
                held.write(_SPOILT_AT, bytes([before[0] ^ 1]) if flipped else before)
            return message

    else:
        left = [20]

        def spoilt(opcode, remote, data, *rest):
            left[0] -= bool(data)
            if data and left[0] == 0:
                data = data[:_SPOILT_AT] + bytes([data[_SPOILT_AT] ^ 1]) + data[_SPOILT_AT + 1 :]
            return opcode, remote, data, *rest

    fabric.spoilt = spoilt
