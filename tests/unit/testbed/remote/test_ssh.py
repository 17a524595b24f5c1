"""SSH connections: the error for a machine that does not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from faultbed.testbed.errors import Unreachable
from faultbed.testbed.remote.ssh import Address, SshConnection


def test_connection_to_a_machine_that_cannot_answer_is_not_opened():
    """QEMU accepts connections for a VM whose kernel has panicked, and each used to wait 15 s for a banner."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = Address(
            host="127.0.0.1", port=server.getsockname()[1], user="root", identity=Path("key"),
            host_key="ssh-ed25519 AAAA", cannot_answer=lambda: "its kernel panicked",
        )  # fmt: skip
        with pytest.raises(Unreachable, match=r"^host1 \(root@127.0.0.1:\d+\) does not answer: its kernel panicked$"):
            SshConnection("host1", address).session()
        with pytest.raises(BlockingIOError):
            server.accept()
