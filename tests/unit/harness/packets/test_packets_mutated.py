"""Mutations of recorded captures: read and analysed, or refused in one sentence; bounded in time and memory."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.csgraph  # noqa: F401 - both are imported late by the product, and must not count as time of a file
from samples import samples

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.explain import explain

CAPTURES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("*.pcap*"))
MOST_S, MOST_TIMES_SIZE = 3.0, 20
"""CPU time of a file of less than a megabyte. Small files need some memory, too."""
BASE_BYTES = 8 << 20


def mutated(content, rng):
    """Return a file with some bytes changed, a part removed, or a part twice."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 8))):
        at, size = int(rng.integers(len(data))), int(rng.integers(1, 64))
        kind = int(rng.integers(4))
        if kind == 0:
            data[at] = int(rng.integers(256))
        elif kind == 1:
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"])
        elif kind == 2:
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size]
        if not data:
            return bytes(content[:1])
    return bytes(data)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_mutated_capture_is_analysed_or_refused(path, tmp_path):
    content = path.read_bytes()
    explain(read(path), 1)  # imports, caches
    analyse(read(path))
    rng = np.random.default_rng(len(content))
    file = tmp_path / "a"
    for number in range(samples(100)):
        file.write_bytes(mutated(content, rng))
        begin = time.process_time()
        tracemalloc.start()
        try:
            frames = read(file)
            analysis = analyse(frames)
            assert analysis.violations >= 0
            if number % 10 == 0 and len(frames):
                explain(frames, int(rng.integers(1, len(frames) + 1)))
        except UsageError as error:
            assert str(error)
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert time.process_time() - begin < MOST_S
        assert most < MOST_TIMES_SIZE * len(content) + BASE_BYTES
