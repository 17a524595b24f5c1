"""Goodput of TCP on the RNICs' interfaces, to compare with that of RoCE on the same links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from faultbed.testbed.errors import LabError
from faultbed.traffic.engine.engine_client import TrafficLab, endpoint

__all__ = ["tcp_goodput"]

PORT = 18516
WRITE_BYTES = 1 << 20
GRACE_S = 30.0
_SINK = """
import json, socket, sys, time
address, port, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
listener = socket.create_server((address, port)); listener.settimeout(limit_s)
connection, _ = listener.accept(); connection.settimeout(limit_s)
space, received, started = bytearray(1 << 20), 0, time.monotonic()
while size := connection.recv_into(space):
    received += size
print(json.dumps({"bytes": received, "seconds": time.monotonic() - started}))
"""
_SOURCE = """
import socket, sys, time
peer, port, own, seconds, size = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5])
deadline = time.monotonic() + 10
while True:
    try:
        connection = socket.create_connection((peer, port), source_address=(own, 0)); break
    except ConnectionRefusedError:
        if time.monotonic() > deadline: raise
        time.sleep(0.05)
data, end = bytes(size), time.monotonic() + seconds
while time.monotonic() < end:
    connection.sendall(data)
"""


def tcp_goodput(lab: TrafficLab, pairs: Sequence[tuple[str, str]], *, seconds: float) -> float:
    """Return the total goodput in bits/s of one TCP connection per pair of RNICs, all at once.

    Raises:
        LabError: a connection carried nothing.
    """
    places = [(endpoint(lab.topology, src), endpoint(lab.topology, dst)) for src, dst in pairs]
    limit_s = seconds + GRACE_S
    with ThreadPoolExecutor(max_workers=2 * len(places)) as pool:
        sinks = [
            pool.submit(
                lab.node(dst.host).run,
                ["python3", "-c", _SINK, dst.address, str(PORT + number), str(limit_s)],
                timeout_s=2 * limit_s,
            )
            for number, (_, dst) in enumerate(places)
        ]
        sources = [
            pool.submit(
                lab.node(src.host).run,
                [
                    "python3",
                    "-c",
                    _SOURCE,
                    dst.address,
                    str(PORT + number),
                    src.address,
                    str(seconds),
                    str(WRITE_BYTES),
                ],
                timeout_s=2 * limit_s,
            )
            for number, (src, dst) in enumerate(places)
        ]
        for source in sources:
            source.result()
        reports = [json.loads(sink.result().stdout) for sink in sinks]
    if not all(report["bytes"] for report in reports):
        raise LabError("bench: a TCP connection over the back end carried nothing")
    return float(sum(report["bytes"] * 8 / report["seconds"] for report in reports))
