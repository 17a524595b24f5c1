"""The code that runs on nodes, as one content-addressed archive.

It holds `traffic.node`, `inject.node` and `testbed.node` with the package files above them, and nvidia-ml-py, whose
one file talks to NVML. It is unpacked to `/var/lib/faultbed/node/DIGEST/`: a node that has the folder has the code.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import CommandFailed, LabError
from testbed.remote.remote_node import Node

__all__ = ["NODE_ROOT", "Archive", "archive", "ensure"]

NODE_ROOT = "/var/lib/faultbed/node"
_PACKAGES = {"inject": "node", "testbed": "node", "traffic": "node"}
_NVML = "pynvml.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar archive and the digest of what is in it."""

    digest: str
    content: bytes

    @property
    def folder(self) -> str:
        """Where the archive is unpacked on a node."""
        return f"{NODE_ROOT}/{self.digest}"


@functools.cache
def archive() -> Archive:
    """The archive of the node code of this version of faultbed; the same bytes for the same code.

    Raises:
        LabError: nvidia-ml-py is not installed.
    """
    house = Path(__file__).resolve().parents[2]
    files = sorted(
        (str(path.relative_to(house)), path)
        for package, inner in _PACKAGES.items()
        for path in [house / package / "__init__.py", *(house / package / inner).rglob("*.py")]
    )
    files.append((_NVML, _installed(_NVML)))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in files:
            member = tarfile.TarInfo(name)
            content = path.read_bytes()
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:16]
    return Archive(digest=digest, content=gzip.compress(buffer.getvalue(), mtime=0))


def _installed(file: str) -> Path:
    found = importlib.util.find_spec(file.removesuffix(".py"))
    if found is None or found.origin is None:
        raise LabError(f"{file} is not installed: faultbed's environment is not whole (`make setup` makes it anew)")
    return Path(found.origin)


def ensure(node: Node) -> str:
    """Make sure that a node has the code, and give back the folder it is in.

    Byte code is compiled on the node, once: starting a program under emulation would otherwise cost seconds. That of
    NVML's reader only where it is used, for it is long, and most machines have no such GPU.
    """
    wanted = archive()
    if node.run(["test", "-e", f"{wanted.folder}/.complete"], check=False).rc == 0:
        return wanted.folder
    incoming = f"{wanted.folder}.tar"
    node.put(wanted.content, incoming, mode=0o600)
    script = (
        'set -e; mkdir -p "$1"; tar -xf "$2" -C "$1"; rm "$2"; '
        'python3 -m compileall -q -x "$3" "$1"; touch "$1/.complete"'
    )
    done = node.run(["sh", "-c", script, "unpack", wanted.folder, incoming, _NVML], check=False, timeout_s=120)
    if done.rc:
        raise CommandFailed(f"{node.name}: could not unpack the node code into {wanted.folder}: {done.stderr.strip()}")
    return wanted.folder
