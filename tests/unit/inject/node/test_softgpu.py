"""The soft GPU answers each request with its time, and survives invalid requests and clients that disconnect."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from gpu_contract import PROMISES, request


@pytest.fixture
def gpu(tmp_path):
    path = str(tmp_path / "gpu.sock")
    process = subprocess.Popen([sys.executable, "-m", "faultbed.traffic.node.softgpu", path])
    deadline = time.monotonic() + 60
    client = None
    while client is None:
        assert time.monotonic() < deadline and process.poll() is None
        client = connect(path)
    client.close()
    yield path
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert not (tmp_path / "gpu.sock").exists()


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    try:
        client.connect(path)
    except OSError:
        client.close()
        return None
    return client


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_softgpu_keeps_the_contract_of_a_gpu(gpu, promise):
    promise(lambda: connect(gpu))


def test_softgpu_serves_clients_in_turn(gpu):
    """The GPU used to serve only its first client, and two ranks of one host waited for each other for ever."""
    with connect(gpu) as first, connect(gpu) as second:
        for _ in range(3):
            assert request(first, '{"units": 1}')["units"] == 1
            assert request(second, '{"units": 2}')["units"] == 2
