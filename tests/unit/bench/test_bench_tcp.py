"""The two programs that measure TCP for the bench, on this machine: everything that is sent is counted."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.throughput import tcp_goodput


def test_tcp_sink_counts_what_the_source_sends():
    here = "127.0.0.1"
    sink = subprocess.Popen(
        [sys.executable, "-c", tcp_goodput._SINK, here, "18593", "20"], stdout=subprocess.PIPE, text=True
    )
    subprocess.run(
        [sys.executable, "-c", tcp_goodput._SOURCE, here, "18593", here, "0.2", "65536"], check=True, timeout=30
    )
    decoded = json.loads(sink.communicate(timeout=30)[0])
    assert decoded["bytes"] > 0
    assert decoded["bytes"] % 65536 == 0
    assert decoded["seconds"] > 0.1
