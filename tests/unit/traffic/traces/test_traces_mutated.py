"""Mutated traces: loaded or refused in one sentence, bounded in time and memory."""

import gzip
import json
import shutil
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from house import DATA
from mutations import mutated, mutations

from faultbed.testbed.errors import UsageError
from faultbed.traffic.traces.trace_files import load

MOST_S, MOST_BYTES = 2.0, 8 << 20
TRACES = DATA / "traces"
ATTRIBUTES = {
    "collective_name": "allreduce",
    "dtype": "Float",
    "in_msg_nelems": 1024,
    "out_msg_nelems": 1024,
    "group_size": 4,
    "pg_name": "0",
}
EXECUTION = {
    "schema": "1.1.1-chakra.0.0.4",
    "pid": 7,
    "nodes": [
        {
            "id": 2,
            "name": "record_param_comms",
            "ctrl_deps": 1,
            "inputs": {"values": [], "shapes": [], "types": []},
            "outputs": {"values": [], "shapes": [], "types": []},
            "attrs": [{"name": key, "type": "string", "value": value} for key, value in ATTRIBUTES.items()],
        }
    ],
}
FILES = {
    "PARAM": (TRACES / "ranking.json").read_bytes(),
    "PARAM of a rank": (TRACES / "pipeline" / "1.json").read_bytes(),
    "PARAM _v": (DATA / "captures" / "param-v.json").read_bytes(),
    "Chakra": (TRACES / "tensor-parallel" / "layer.1.et").read_bytes(),
    "execution trace": json.dumps(EXECUTION).encode(),
    "compressed": gzip.compress((TRACES / "ranking.json").read_bytes(), mtime=0),
}


def place(name, tmp_path):
    """Return the trace that has the mutated file, and the file."""
    if name in ("PARAM of a rank", "Chakra"):
        source = "pipeline" if name.startswith("PARAM") else "tensor-parallel"
        folder = tmp_path / source
        shutil.copytree(TRACES / source, folder)
        return folder, next(path for path in folder.iterdir() if path.name.split(".")[-2] == "1")
    file = tmp_path / ("a.json.gz" if name == "compressed" else "a.json")
    return file, file


def read(path, *, is_single):
    try:
        load(path, ranks=4 if is_single else None)
    except UsageError as error:
        assert str(error)


@pytest.mark.parametrize("name", sorted(FILES))
def test_mutated_trace_is_loaded_or_refused(name, tmp_path):
    path, file = place(name, tmp_path)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    file.write_bytes(FILES[name])
    read(path, is_single=path == file)
    for number in range(mutations(10_000, 300)):
        content = mutated(FILES[name], rng)
        file.write_bytes(content)
        begin = time.process_time()
        if number % 10 == 0:
            tracemalloc.start()
            try:
                read(path, is_single=path == file)
                assert tracemalloc.get_traced_memory()[1] < MOST_BYTES + 20 * len(content)
            finally:
                tracemalloc.stop()
        else:
            read(path, is_single=path == file)
        assert time.process_time() - begin < MOST_S


@pytest.mark.parametrize("name", sorted(set(FILES) - {"Chakra"}))
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[" + b"9" * 5000 + b"]", b'[{"comms": NaN}]', b"\xff\xfe"],
    ids=["lists", "objects", "digits", "nan", "utf-16"],
)
def test_hostile_trace_is_refused(name, content, tmp_path):
    path, file = place(name, tmp_path)
    file.write_bytes(gzip.compress(content) if name == "compressed" else content)
    with pytest.raises(UsageError):
        load(path, ranks=4 if path == file else None)


def test_trace_compressed_a_thousandfold_is_refused_or_loaded_in_bounds(tmp_path):
    """64 KB that unpack to 64 MB of spaces."""
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(UsageError):
        load(tmp_path / "a.json.gz", ranks=4)
