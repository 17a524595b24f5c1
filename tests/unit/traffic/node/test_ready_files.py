"""Files that become ready together: a file that the handler of another one has closed has no event any more."""

from __future__ import annotations

import selectors
import socket

import pytest

from faultbed.traffic.node.front_end.storage_client import StorageClient
from faultbed.traffic.node.gpu_client import GpuClient
from faultbed.traffic.node.ready_files import handle_ready


@pytest.mark.parametrize("kind", ["gpu", "storage"])
def test_socket_that_another_handler_closed_causes_no_error(tmp_path, kind):
    """The engine ended with a ValueError (GPU), or reported an error of a storage server that was well."""
    family, address = (socket.AF_UNIX, str(tmp_path / "gpu")) if kind == "gpu" else (socket.AF_INET, ("127.0.0.1", 0))
    errors = []
    ours, other = socket.socketpair()
    with ours, other, socket.socket(family) as server, selectors.DefaultSelector() as selector:
        server.bind(address)
        server.listen()
        if kind == "gpu":
            client = GpuClient({"socket": server.getsockname()}, selector)
        else:
            client = StorageClient(*server.getsockname(), selector, errors.append)
        server.accept()[0].close()  # the client's socket becomes ready: its peer is gone
        selector.register(ours, selectors.EVENT_READ, client.close)
        other.send(b"forget")
        ready = sorted(selector.select(5), key=lambda event: event[0].fileobj is not ours)
        assert len(ready) == 2
        handle_ready(selector, ready)
    assert errors == []
