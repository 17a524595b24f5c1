"""The GPU that a flow or a rank uses, and the calls to the CUDA driver.

The driver is a stand-in that records calls, or one with memory. tests/lab/test_gpu.py checks a real one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import selectors
import socket
import threading
import time

import cuda_library
import gpu_fabric
import pytest

from faultbed.testbed import shipped
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.node.gpu import cuda
from faultbed.testbed.node.gpu.cuda import CudaWork, NoCuda
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.node import cudagpu
from faultbed.traffic.node.flows.content import Content, Verifier
from faultbed.traffic.node.gpu_client import GpuClient
from faultbed.traffic.node.gpu_memory import CudaMemory
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.ranks import gpus_of, place


class Driver:
    """Stand-in for libcuda: it writes through the given pointers, and can refuse a call."""

    def __init__(self, refuses="", dma_buf=1, processors=1):
        self.refuses, self.attributes, self.calls = refuses, {124: dma_buf, 16: processors}, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == self.refuses:
                return 801
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.attributes[arguments[1]]
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = 0x7F0000000000
            if name == "cuMemGetHandleForAddressRange":
                assert arguments[2].value % 4096 == 0
                arguments[0]._obj.value = os.open(os.devnull, os.O_RDONLY)
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"operation not supported"
            if name == "cuMemcpyDtoH_v2":
                ctypes.memmove(arguments[0], b"12345678", 8)
            return 0

        return call


def test_cuda_memory_is_allocated_read_and_freed():
    driver = Driver()
    memory = CudaMemory(100_000, pcie="0000:19:00.0", number=0, library=driver)
    assert memory.size == 2 << 20
    assert memory.read(8) == b"12345678"
    memory.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(memory.fd)
    assert driver.calls[:2] == ["cuInit", "cuDeviceGetByPCIBusId"]
    assert driver.calls[-2:] == ["cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_cuda_refused_call_is_an_error_and_frees_the_memory():
    driver = Driver(refuses="cuMemGetHandleForAddressRange")
    with pytest.raises(NoCuda, match=r"cuMemGetHandleForAddressRange: operation not supported \(801\)"):
        CudaMemory(1, pcie=None, number=1, library=driver)
    assert driver.calls.count("cuMemFree_v2") == 1
    with pytest.raises(NoCuda, match="exports no dma-buf"):
        CudaMemory(1, pcie=None, number=1, library=Driver(dma_buf=0))


def test_cuda_memory_is_compared_on_the_gpu_and_by_the_host():
    driver = cuda_library.Library()
    memory = CudaMemory(100_000, pcie=None, number=0, library=driver, export=False)
    assert memory.fd == -1
    data = bytes(range(1, 252)) * 400
    memory.write(3, data[3:])
    assert memory.read(3) == bytes(3), "it was set to zero"
    assert memory.read(1000, 3) == data[3:1003]
    assert memory.count_differing(3, data[3:]) == 0
    assert memory.count_differing(0, data) == 3
    assert memory.count_differing(4, data[3:203]) == 200
    for offset, size in ((-1, 1), (memory.size, 1), (memory.size - 1, 2)):
        with pytest.raises(ValueError, match="are not within 2097152 bytes of GPU memory"):
            memory.read(size, offset)
    memory.close()
    assert not driver.blocks, "everything is freed"


@pytest.mark.parametrize("verb", ["write-imm", "read"])
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_cuda_memory_of_a_checked_flow_is_verified_by_host_and_gpu(verb, is_spoilt, monkeypatch):
    driver = cuda_library.Library()
    monkeypatch.setattr(cuda, "_load", lambda: driver)
    done = gpu_fabric.run_flow(monkeypatch, "0000:19:00.0", verb=verb, is_spoilt=is_spoilt, messages=24)
    assert (done["checked_bytes"], done["recounted_bytes"]) == (24 * gpu_fabric.SIZE, 24 * gpu_fabric.SIZE)
    assert done["wrong_bytes"] == is_spoilt
    assert driver.calls.count("cuLaunchKernel") == 24


def test_verifier_counts_what_only_the_gpu_sees():
    """The host reads what an RNIC has written, while the GPU still has an older value."""
    verifier = Verifier(Content(64), 0)
    verifier.verify(verifier.content.of(0, 0), lambda _expected: 3)
    assert (verifier.checked, verifier.recounted, verifier.wrong) == (64, 64, 3)


def test_cuda_reports_a_host_without_a_driver():
    with pytest.raises(NoCuda, match="no CUDA driver on this host"):
        CudaMemory(1, pcie=None, number=0)


class Lab:
    def __init__(self, name):
        model = lab_inventory.load(shipped.inventories() / name)
        self.topology, self.kind = model.topology, model.kind


def test_cuda_work_launches_one_kernel_per_unit_and_waits():
    driver = Driver(processors=132)
    launched = []
    driver.cuLaunchKernel = lambda *arguments: launched.append(arguments) or 0
    work = CudaWork(pcie="0000:19:00.0", number=0, library=driver)
    work.compute(3)
    assert len(launched) == 3
    _kernel, *shape, shared, stream, arguments, extra = launched[0]
    assert (shape, shared, stream, extra) == ([8 * 132, 1, 1, 256, 1, 1], 0, None, None)
    out, rounds = (
        ctypes.cast(arguments[at], ctypes.POINTER(kind))[0]
        for at, kind in enumerate((ctypes.c_uint64, ctypes.c_uint32))
    )
    assert (out, rounds) == (0x7F0000000000, 1 << 15)
    assert driver.calls[-1] == "cuCtxSynchronize"
    work.close()
    assert driver.calls[-3:] == ["cuMemFree_v2", "cuModuleUnload", "cuDevicePrimaryCtxRelease_v2"]


def test_cuda_work_refused_by_the_driver_keeps_nothing():
    driver = Driver(refuses="cuModuleLoadData")
    with pytest.raises(NoCuda, match="cuModuleLoadData: operation not supported"):
        CudaWork(pcie=None, number=0, library=driver)
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_gpu_process_answers_as_a_soft_gpu_does():
    driver = Driver()
    ours, theirs = socket.socketpair()
    with ours:
        work = CudaWork(pcie=None, number=0, library=driver)
        serving = threading.Thread(target=cudagpu.serve, args=(theirs, work))
        serving.start()
        with ours.makefile("rwb", buffering=0) as lines:
            for request, reply_key in (('{"units": 2}', "units"), ("nonsense", "error"), ('{"units": -1}', "error")):
                lines.write(request.encode() + b"\n")
                assert reply_key in json.loads(lines.readline())
        ours.shutdown(socket.SHUT_WR)
        serving.join(10)
        assert not serving.is_alive()
    theirs.close()
    assert driver.calls.count("cuLaunchKernel") == 2


def test_gpu_client_reports_a_missing_driver_and_leaves_no_process():
    """The real process starts and finds no driver here."""
    collected = []
    with selectors.DefaultSelector() as selector:
        client = GpuClient({"pcie": "0000:19:00.0", "number": 0}, selector)
        client.compute(1, collected.append)
        deadline = time.monotonic() + 60
        while not collected and time.monotonic() < deadline:
            for key, _ in selector.select(1.0):
                key.data()
        assert collected == [None]
        assert (client.name, "no CUDA driver on this host" in client.error) == ("GPU 0000:19:00.0", True)
        client.close()
    assert client.process.returncode == 0


def test_rank_computes_on_the_gpu_beside_its_rnic():
    lab = Lab("rack-h100.example.yml")
    host = lab.topology.hosts[0]
    names = (f"{host.name}:{host.rnics[0].name}", f"{host.name}:{host.rnics[3].name}")
    spec = CollectiveSpec(ranks=names, compute_units=1)
    assert gpus_of(lab, spec, place(lab, spec)) == (
        {"pcie": host.gpus[0].pcie, "number": 0},
        {"pcie": host.gpus[3].pcie, "number": 3},
    )
    assert gpus_of(lab, dataclasses.replace(spec, compute_units=0), ()) is None
    soft = Lab("soft.yml")
    assert gpus_of(soft, CollectiveSpec(compute_units=1), place(soft, CollectiveSpec()))[0] == {
        "socket": "/run/faultbed/gpu0.sock"
    }
    with pytest.raises(UsageError, match="has no GPU gpu7"):
        place(soft, CollectiveSpec(compute_units=1, gpu="gpu7"))


def test_flow_ends_use_the_gpu_beside_their_rnic():
    lab = Lab("rack-h100.example.yml")
    one, two = lab.topology.hosts[0], lab.topology.hosts[-1]
    spec = FlowSpec(
        src=f"{one.name}:{one.rnics[3].name}", dst=f"{two.name}:{two.rnics[0].name}", memory="cuda", messages=1
    )
    sender, receiver = flow_run._tasks(lab, spec, "")
    assert sender.spec["gpu"] == {"number": 3, "pcie": one.gpus[3].pcie}
    assert receiver.spec["gpu"] == {"number": 0, "pcie": two.gpus[0].pcie}
    assert flow_run._tasks(lab, dataclasses.replace(spec, memory="host"), "")[0].spec["gpu"] is None
    checked = dataclasses.replace(spec, verb="write-imm", check=True, messages=None, duration_s=1.0)
    assert [task.kind for task in flow_run._tasks(lab, checked, "")] == ["checked_tx", "checked_rx"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "only a soft GPU at its position"),
        ({"src": "host1:rxe1"}, "no GPU at its position"),
        ({"verb": "send"}, "GPU memory supports writes"),
        ({"memory": "hbm"}, 'no memory "hbm"; choose one of host, cuda'),
    ],
)
def test_soft_lab_rejects_cuda_memory(change, message):
    spec = FlowSpec(**{"src": "host1:rxe0", "dst": "host3:rxe0", "memory": "cuda", "messages": 1, **change})
    with pytest.raises(UsageError, match=message):
        flow_run._tasks(Lab("soft.yml"), spec, "")
