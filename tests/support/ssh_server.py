"""An SSH server of this machine for one test, on 127.0.0.1 with its own keys; Debian's package openssh-server."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
_CONF = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/.ssh/id_ed25519.pub
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""


@contextlib.contextmanager
def ssh_server(home: Path) -> Iterator[str]:
    """Start a server that the keys in `home/.ssh` open and pin, and yield `USER@127.0.0.1:PORT`."""
    (home / ".ssh").mkdir(parents=True)
    for path in (home / "host_key", home / ".ssh" / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kind, key, *_ = (home / "host_key.pub").read_text().split()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (home / "sshd_config").write_text(_CONF.format(port=port, folder=home))
    Path("/run/sshd").mkdir(exist_ok=True)  # its privilege separation needs it, and a service would make it
    with (home / "sshd.log").open("wb") as log:
        server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(home / "sshd_config")], stderr=log)
    try:
        end_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=10):
                break
            if time.monotonic() > end_s or server.poll() is not None:
                raise TimeoutError((home / "sshd.log").read_text())
            time.sleep(0.1)
        yield f"{getpass.getuser()}@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
