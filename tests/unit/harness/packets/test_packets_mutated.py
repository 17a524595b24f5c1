"""Mutations of recorded captures: read and analysed, or refused in one sentence; bounded in time and memory."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.csgraph  # noqa: F401 - both are imported late by the product, and must not count as time of a file
from mutations import mutated, mutations

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.explain import explain

CAPTURES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("*.pcap*"))
MOST_S, MOST_TIMES_SIZE = 3.0, 20
"""CPU time of a file of less than a megabyte. Small files need some memory, too."""
BASE_BYTES = 8 << 20


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_mutated_capture_is_analysed_or_refused(path, tmp_path):
    content = path.read_bytes()
    explain(read(path), 1)  # imports, caches
    analyse(read(path))
    rng = np.random.default_rng(len(content))
    file = tmp_path / "a"
    # 100,000 over the files of the folder in `make nightly`.
    for number in range(mutations(7_200, 25)):
        file.write_bytes(mutated(content, rng))
        begin, is_measured = time.process_time(), number % 10 == 0
        if is_measured:
            tracemalloc.start()
        try:
            frames = read(file)
            analysis = analyse(frames)
            assert analysis.violations >= 0
            if is_measured and len(frames):
                explain(frames, int(rng.integers(1, len(frames) + 1)))
        except UsageError as error:
            assert str(error)
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert time.process_time() - begin < MOST_S
        assert not is_measured or most < MOST_TIMES_SIZE * len(content) + BASE_BYTES
