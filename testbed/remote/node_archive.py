"""The code that runs on nodes, as one content-addressed archive.

It contains `faultbed.traffic.node`, `faultbed.inject.node` and `faultbed.testbed.node` with the package files above
them, and nvidia-ml-py, a single file for NVML. It is unpacked to `/var/lib/faultbed/node/DIGEST/`, where the file
`.complete` is created last.
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

from faultbed.testbed import shipped
from faultbed.testbed.errors import CommandFailed, LabError
from faultbed.testbed.remote.remote_node import Node

__all__ = ["NODE_ROOT", "Archive", "archive", "ensure"]

NODE_ROOT = "/var/lib/faultbed/node"
_PARTS = ("inject", "testbed", "traffic")
_NVML = "pynvml.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar archive, and the digest of its content."""

    digest: str
    tar: bytes

    @property
    def content(self) -> bytes:
        """The archive as it is pushed: compressed. Most commands only need the digest."""
        return _compressed(self.tar)

    @property
    def folder(self) -> str:
        """The folder on a node into which the archive is unpacked."""
        return f"{NODE_ROOT}/{self.digest}"


@functools.cache
def archive() -> Archive:
    """Return the archive of this version's node code; the same code gives the same bytes.

    Raises:
        LabError: nvidia-ml-py is not installed.
    """
    packages = {"faultbed/__init__.py", *(f"faultbed/{part}/__init__.py" for part in _PARTS)}
    files = [(name, path) for name, path in shipped.sources() if name in packages]
    files += shipped.sources(*(f"{part}/node" for part in _PARTS))
    files = [*sorted(files), (_NVML, _installed(_NVML))]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in files:
            member = tarfile.TarInfo(name)
            content = path.read_bytes()
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:16]
    return Archive(digest=digest, tar=buffer.getvalue())


@functools.cache
def _compressed(tar: bytes) -> bytes:
    return gzip.compress(tar, mtime=0)


def _installed(file: str) -> Path:
    spec = importlib.util.find_spec(file.removesuffix(".py"))
    if spec is None or spec.origin is None:
        raise LabError(f"{file} is not installed, so that faultbed's environment is incomplete; run `make setup`")
    return Path(spec.origin)


def ensure(node: Node) -> str:
    """Install the code on a node, unless it is there, and return its folder.

    Byte code is compiled once, on the node: otherwise the start of a program would cost seconds under emulation. NVML's
    module is left out, because it is long and most machines have no such GPU: Python compiles it at its first use.

    Raises:
        CommandFailed: the archive could not be written or unpacked.
        Unreachable: there is no SSH connection.
    """
    code = archive()
    if node.run(["test", "-e", f"{code.folder}/.complete"], check=False).rc == 0:
        return code.folder
    incoming = f"{code.folder}.tar"
    node.put(code.content, incoming, mode=0o600)
    script = (
        'set -e; mkdir -p "$1"; tar -xf "$2" -C "$1"; rm "$2"; '
        'python3 -m compileall -q -x "$3" "$1"; touch "$1/.complete"'
    )
    done = node.run(["sh", "-c", script, "unpack", code.folder, incoming, _NVML], check=False, timeout_s=120)
    if done.rc:
        raise CommandFailed(f"{node.name}: could not unpack the node code into {code.folder}: {done.stderr.strip()}")
    return code.folder
