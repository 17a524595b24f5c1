"""Memory of a GPU: which one a flow takes, and what is asked of the driver.

No GPU here: the driver's side is a stand-in that keeps the calls; what a real one does with them has not been run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os

import pytest

from testbed import inventory, shipped
from testbed.errors import UsageError
from traffic import flow
from traffic.flow import FlowSpec
from traffic.node.cuda import CudaMemory, NoCuda


class Driver:
    """libcuda: writes through the pointers that it is given, and can refuse a call."""

    def __init__(self, refuses="", dma_buf=1):
        self.refuses, self.dma_buf, self.calls = refuses, dma_buf, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == self.refuses:
                return 801
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.dma_buf
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


def test_memory_is_had_read_and_given_back():
    driver = Driver()
    memory = CudaMemory(100_000, pcie="0000:19:00.0", number=0, library=driver)
    assert memory.size == 2 << 20
    assert memory.read(8) == b"12345678"
    memory.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(memory.fd)
    assert driver.calls[:2] == ["cuInit", "cuDeviceGetByPCIBusId"]
    assert driver.calls[-2:] == ["cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_what_the_driver_refuses_is_told_and_nothing_is_kept():
    driver = Driver(refuses="cuMemGetHandleForAddressRange")
    with pytest.raises(NoCuda, match=r"cuMemGetHandleForAddressRange: operation not supported \(801\)"):
        CudaMemory(1, pcie=None, number=1, library=driver)
    assert driver.calls.count("cuMemFree_v2") == 1
    with pytest.raises(NoCuda, match="exports no dma-buf"):
        CudaMemory(1, pcie=None, number=1, library=Driver(dma_buf=0))


def test_a_host_without_a_driver_says_so():
    with pytest.raises(NoCuda, match="no CUDA driver on this host"):
        CudaMemory(1, pcie=None, number=0)


class Lab:
    def __init__(self, name):
        model = inventory.load(shipped.inventories() / name)
        self.topology, self.kind = model.topology, model.kind


def test_each_end_takes_the_gpu_at_the_place_of_its_rnic():
    lab = Lab("rack-h100.example.yml")
    one, two = lab.topology.hosts[0], lab.topology.hosts[-1]
    spec = FlowSpec(
        src=f"{one.name}:{one.rnics[3].name}", dst=f"{two.name}:{two.rnics[0].name}", memory="cuda", messages=1
    )
    sender, receiver = flow._tasks(lab, spec, "")
    assert sender.spec["gpu"] == {"number": 3, "pcie": one.gpus[3].pcie}
    assert receiver.spec["gpu"] == {"number": 0, "pcie": two.gpus[0].pcie}
    assert flow._tasks(lab, dataclasses.replace(spec, memory="host"), "")[0].spec["gpu"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "only a soft GPU at its place"),
        ({"src": "host1:rxe1"}, "no GPU at its place"),
        ({"verb": "send"}, "memory of a GPU is for writes"),
        ({"memory": "hbm"}, 'no memory "hbm"; there is host, cuda'),
    ],
)
def test_a_soft_lab_has_no_such_memory(change, says):
    spec = FlowSpec(**{"src": "host1:rxe0", "dst": "host3:rxe0", "memory": "cuda", "messages": 1, **change})
    with pytest.raises(UsageError, match=says):
        flow._tasks(Lab("soft.yml"), spec, "")
