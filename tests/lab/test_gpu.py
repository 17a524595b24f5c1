"""On a machine with an NVIDIA GPU: what we read of it, and its noisy neighbours, against the driver itself.

    python -m pytest tests/lab/test_gpu.py

It needs no lab, and sets nothing: clocks, limits and modes are read, GPU time and memory are taken. Elsewhere it is
skipped, with that reason. On an H100 with driver 580.159.04 it passed, and skipped no test.
"""

import functools
import json
import os
import random
import socket
import stat
import subprocess
import sys

import gpu_fabric
import pytest
from gpu_contract import PROMISES
from gpu_rank import WARM, Rank
from waiting import until

from faultbed.inject.node.actuator import make
from faultbed.inject.node.machine.hog import busy_processes
from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.node.gpu.cuda import NoCuda
from faultbed.testbed.preflight.rack_formats import gpus
from faultbed.traffic.node.gpu_memory import CudaMemory

pytestmark = pytest.mark.gpu

if not os.path.exists(nvml._DRIVER):  # noqa: PTH110 (as the reader asks)
    pytest.skip("needs a machine with an NVIDIA GPU: no NVIDIA driver is loaded here", allow_module_level=True)


@pytest.fixture
def reported():
    """What our reader says, decoded as preflight does."""
    output = gpus(json.dumps(nvml.look()))
    assert output.why is None
    assert output.gpus
    return output


@pytest.fixture
def pcie(reported):
    """The first GPU, as an inventory names it: nvidia-smi and NVML write the domain with eight digits."""
    return reported.gpus[0].bus_id[-12:]


def smi(fields):
    """Return the fields from nvidia-smi, one dictionary per GPU."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [dict(zip(fields, line.split(", "), strict=True)) for line in lines]


def test_nvml_reader_agrees_with_nvidia_smi(reported):
    fields = (
        *("index", "pci.bus_id", "vbios_version", "driver_version", "persistence_mode", "ecc.mode.current"),
        *("clocks.max.sm", "power.limit", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
    )
    lines = smi(fields)
    assert len(lines) == len(reported.gpus)
    for gpu, line in zip(reported.gpus, lines, strict=True):
        assert gpu.why is None
        assert (str(gpu.index), gpu.bus_id, gpu.vbios, reported.driver) == (
            line["index"],
            line["pci.bus_id"].lower(),
            line["vbios_version"],
            line["driver_version"],
        )
        assert {True: "Enabled", False: "Disabled", None: None}[gpu.persistence] == line["persistence_mode"]
        assert {True: "Enabled", False: "Disabled"}.get(gpu.ecc, "[N/A]") == line["ecc.mode.current"]
        assert str(gpu.sm_max_mhz) == line["clocks.max.sm"]
        assert gpu.power_limit_w == round(float(line["power.limit"]))
        assert list(map(str, (gpu.pcie[1], *gpu.pcie_max))) == [
            line["pcie.link.width.current"],
            line["pcie.link.gen.max"],
            line["pcie.link.width.max"],
        ]


def test_watcher_counts_everything_of_a_data_centre_gpu():
    """The newest data centre GPUs have all of these; on an older one missing values are left out."""
    counted = dict(nvml.counts(None))
    lacking = {"clocks_set", "power_capped", "sm_mhz", "ecc_uncorrected", "pcie_replays", "power_capped_us"} - {
        name.partition(".")[2] for name in counted
    }
    assert not lacking
    again = dict(nvml.counts(None))
    assert all(again[name] >= value for name, value in counted.items() if name.endswith("_us"))


def test_clocks_without_a_lock_are_not_reported_as_set(rank):
    """The GPU's owner has locked no clocks. No call reports a lock, so it is derived from clock and reasons."""
    rank.took_s(WARM)
    assert dict(nvml.counts(None))["gpu0.clocks_set"] == 0, smi(("clocks.sm", "clocks.max.sm"))


def test_nvml_leaves_no_file_open():
    """A GPU that we hold open cannot leave the bus."""
    before = open_files()
    nvml.look()
    list(nvml.counts(lambda _pid: True))
    assert open_files() == before


def open_files():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH118, PTH208
    return sorted(target for link in links if (target := read_link(link)) and "nvidia" in target)


def read_link(path):
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return None


@pytest.fixture
def rank(pcie):
    """One whose GPU's clocks are up."""
    one = Rank(pcie)
    try:
        one.took_s(WARM)
        yield one
    finally:
        one.close()


def test_work_unit_takes_gpu_time_in_proportion(rank):
    """Twice the units take about twice the time: the kernel is bound by the clock alone."""
    assert 1.6 < min(rank.took_s(400) for _ in range(3)) / min(rank.took_s(200) for _ in range(3)) < 2.4


def test_gpu_neighbours_compute_are_counted_and_end(rank, pcie):
    assert nvml.compute_mode(pcie) == "Default"
    neighbours = make("gpu_neighbour", {"pcie": pcie, "count": 2})
    assert neighbours.prepare()["applied"] is False
    alone_s = min(rank.took_s(200) for _ in range(3))
    try:
        neighbours.on()
        done = neighbours.hits()
        until(lambda: neighbours.hits() > done)
        reading = neighbours.read()
        print("neighbours:", reading, "own process is listed:", rank.pid in nvml.computing(pcie))
        assert (reading["applied"], reading["processes"]) == (True, 2)
        # In a container NVML reports process ids of the host: then no process is found, and the fault is not proved.
        if rank.pid in nvml.computing(pcie):
            assert reading["computing"] == 2
        assert min(rank.took_s(200) for _ in range(3)) / alone_s > 1.5, "time slices among three processes"
    finally:
        neighbours.off()
    assert not busy_processes()
    assert neighbours.read()["applied"] is False
    assert min(rank.took_s(200) for _ in range(3)) / alone_s < 1.5, "alone again"


def connect(pcie):
    """Start the compute process of a GPU, as an engine does, and return the client's end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        words = [sys.executable, "-m", "faultbed.traffic.node.cudagpu", str(theirs.fileno()), "0", pcie]
        subprocess.Popen(words, pass_fds=(theirs.fileno(),))
    return ours


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the process ends by itself once its client is gone
def test_gpu_process_keeps_the_contract_of_a_soft_gpu(pcie, promise):
    promise(functools.partial(connect, pcie))


@pytest.fixture
def memory(pcie):
    """Memory that is not exported: an RNIC is not needed to check its elements."""
    one = CudaMemory(64 << 20, pcie=pcie, number=0, export=False)
    yield one
    one.close()


def test_gpu_memory_holds_every_byte_by_host_and_by_gpu(memory):
    data = random.Random(7).randbytes(memory.size)
    memory.write(0, data)
    assert memory.read(memory.size) == data
    assert memory.count_differing(0, data) == 0
    for offset in (0, 1, 4097, memory.size - 1):
        memory.write(offset, bytes([data[offset] ^ 1]))
    assert memory.count_differing(0, data) == 4
    back = memory.read(memory.size)
    assert [at for at in range(0, memory.size, 1 << 20) if back[at : at + (1 << 20)] != data[at : at + (1 << 20)]] == [
        0,
        memory.size - (1 << 20),
    ]
    assert memory.count_differing(5, data[5:4097]) == 0
    with pytest.raises(ValueError, match="are not within"):
        memory.read(2, memory.size - 1)


def test_gpu_memory_is_exported_as_a_dma_buf(pcie):
    """What a machine without an RNIC shows: the driver exports the memory, in its whole size, and frees it."""
    try:
        memory = CudaMemory(3 << 20, pcie=pcie, number=0)
    except NoCuda as why:
        pytest.skip(f"needs a driver that exports dma-buf: {why}")
    try:
        info = os.fstat(memory.fd)
        print("dma-buf:", os.readlink(f"/proc/self/fd/{memory.fd}"), oct(info.st_mode))  # noqa: PTH115
        with open(f"/proc/self/fdinfo/{memory.fd}", encoding="ascii") as lines:  # noqa: PTH123
            print(lines.read())
        assert not stat.S_ISDIR(info.st_mode)
        assert os.lseek(memory.fd, 0, os.SEEK_END) == memory.size == 4 << 20
    finally:
        memory.close()


@pytest.mark.parametrize("verb", ["write-imm", "read"])
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_engine_checks_every_byte_in_gpu_memory(verb, is_spoilt, pcie, monkeypatch):
    """The engine's flow runs as on a rack, but for its RNICs; one flipped byte is counted by host and GPU."""
    try:
        done = gpu_fabric.run_flow(monkeypatch, pcie, verb=verb, is_spoilt=is_spoilt, messages=64)
    except NoCuda as why:
        pytest.skip(f"needs a driver that exports dma-buf: {why}")
    assert (done["checked_bytes"], done["recounted_bytes"]) == (64 * gpu_fabric.SIZE, 64 * gpu_fabric.SIZE)
    assert done["wrong_bytes"] == is_spoilt
