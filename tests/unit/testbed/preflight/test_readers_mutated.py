"""Mutated outputs of tools through their readers: an answer or one sentence, bounded in time and memory."""

import subprocess
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from house import DATA
from mutations import mutated, mutations

from faultbed.testbed.discover import answers, facts
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.node.gpu import xid
from faultbed.testbed.preflight import busbw, collect, fec, rack_formats

MOST_S, MOST_BYTES = 2.0, 8 << 20
RECORDED = DATA / "recorded"
SECTIONS = {
    "ip": '[{"ifname": "eth1", "address": "02:fb:00:00:00:01", "mtu": 9000, "operstate": "UP", "addr_info": '
    '[{"family": "inet", "local": "10.77.1.1", "prefixlen": 24}]}]',
    "rdma": (RECORDED / "rdma/connectx6dx.json").read_text(),
    "gid": "/sys/class/infiniband/mlx5_0/ports/1/gids/3:0000:0000:0000:0000:0000:ffff:0a4d:0101\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gids/0:fe80:0000:0000:0000:0200:00ff:fe00:0001",
    "gid-type": "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3:RoCE v2\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0:IB/RoCE v1",
}
XIDS = """\
[ 12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 12.4] NVRM: Xid (PCI:0000:c8:00 GPU-I:05): 94, Contained: CE User Channel (0x9). RST: No, D-RST: No
[ 12.5] NVRM: Xid (PCI:0000:c8:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
[ 12.6] NVRM: Xid (PCI:0000:c8:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 17 (0x00000001 0x0)
"""


def preflight():
    for section in collect._READERS:
        SECTIONS.setdefault(section, "a: 1\nb 2\n")
    mark = collect._MARK
    return (
        f"{mark}node host1\n" + "".join(f"{mark}{name}\n{body}\n" for name, body in SECTIONS.items()) + f"{mark}end\n"
    )


def discovery():
    """Return the answer of this machine."""
    done = subprocess.run(["sh", "-c", answers.SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def read_discovery(text):
    facts.machine_of("host1", answers.split("host1", text))


def read_xids(text):
    for line in text.splitlines():
        assert xid.event(line) is None or xid.event(line)[1] >= 0


def read_rack(text):
    rack_formats.link_wrong(rack_formats.key_values(text))
    rack_formats.pcie_wrong(rack_formats.key_values(text))
    rack_formats.qos(text)
    rack_formats.gpus(text)
    rack_formats.keeps_up(text)
    rack_formats.chrony_offset_s(text)
    rack_formats.chrony_uses_own_clock(text)
    fec.read(text)


NCCL = [*sorted((RECORDED / "nccl-tests").iterdir()), *sorted((DATA / "captures").glob("nccl-*.txt"))]
RACK = [
    path
    for folder in ("mlxlink", "mlnx_qos", "mlxconfig", "ethtool", "nvidia-smi", "dcgmi")
    for path in sorted((RECORDED / folder).iterdir())
]
READERS = {
    "preflight and GID tables": (collect.parse, lambda: [preflight()]),
    "discovery": (read_discovery, lambda: [discovery()]),
    "XIDs": (read_xids, lambda: [XIDS]),
    "nccl-tests": (busbw.read, lambda: [path.read_text() for path in NCCL]),
    "tools of a rack": (read_rack, lambda: [path.read_text() for path in RACK]),
}


def read(reader, text):
    try:
        reader(text)
    except FaultbedError as error:
        assert str(error)


@pytest.mark.parametrize("name", sorted(READERS))
def test_reader_of_mutated_output_answers_or_refuses(name):
    reader, recorded = READERS[name]
    texts = [text.encode() for text in recorded()]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for text in texts:
        read(reader, text.decode())
    for number in range(mutations(10_000, 300)):
        text = mutated(texts[number % len(texts)], rng).decode(errors="replace")
        begin = time.process_time()
        if number % 10 == 0:
            tracemalloc.start()
            try:
                read(reader, text)
                assert tracemalloc.get_traced_memory()[1] < MOST_BYTES + 20 * len(text)
            finally:
                tracemalloc.stop()
        else:
            read(reader, text)
        assert time.process_time() - begin < MOST_S


@pytest.mark.parametrize("name", sorted(READERS))
@pytest.mark.parametrize(
    "inside",
    ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\n" * 50_000, "\0", "# " * 50_000],
    ids=["lists", "objects", "digits", "lines", "zero", "comments"],
)
def test_reader_of_hostile_output_answers_or_refuses(name, inside):
    reader, recorded = READERS[name]
    for text in recorded()[:2]:
        middle = len(text) // 2
        begin = time.process_time()
        for hostile in (inside, text[:middle] + inside + text[middle:], text.replace("[", "[" + inside, 1)):
            read(reader, hostile)
        assert time.process_time() - begin < 3 * MOST_S
