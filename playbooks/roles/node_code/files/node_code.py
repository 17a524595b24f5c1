"""Install the node code in the folder that is named by its digest, compiled for the node's Python.

The folder appears by a rename, so that it is never incomplete. Compiled files do not check their source, which saves a
stat and a comparison for every module at every start.
"""

import base64
import compileall
import hashlib
import io
import os
import py_compile
import re
import shutil
import tarfile
import tempfile

from faultbed_state import StateError, answer

ROOT = "/var/lib/faultbed/node"
NOT_COMPILED = re.compile("pynvml")
"""Long, and only needed on hosts with an NVIDIA GPU; Python compiles it there when it is first imported."""

COMPLETE = ".complete"
"""A file that marks the folder as complete, also for testbed/remote/node_archive.py, which pushes code too."""


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_install, desired, check=check)


def _install(desired, changes):
    name = desired["name"]
    target = f"{ROOT}/{name}"
    if os.path.exists(f"{target}/{COMPLETE}") or not changes.should_make(f"node code {name[:12]}"):
        return
    content = base64.b64decode(desired["files"]["archive"])
    if hashlib.sha256(content).hexdigest() != desired["archive_sha256"]:
        raise StateError("node code: the archive's SHA-256 is wrong, it was damaged in transfer; provision again")
    os.makedirs(ROOT, exist_ok=True)
    partial = tempfile.mkdtemp(dir=ROOT, prefix=".partial-")
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(partial, filter="data")
        os.chmod(partial, 0o755)
        options = {"invalidation_mode": py_compile.PycInvalidationMode.UNCHECKED_HASH, "rx": NOT_COMPILED}
        # Tracebacks then have the paths of the final folder.
        if not compileall.compile_dir(partial, quiet=1, stripdir=partial, prependdir=target, **options):
            raise StateError("node code: it does not compile; check the version of this node's /usr/bin/python3")
        with open(f"{partial}/{COMPLETE}", "w", encoding="ascii"):
            pass
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
