"""Put the node-side code where its content hash says, compiled for the node's Python.

The directory appears by a rename, whole or not at all; compiled files carry no check of their source, which saves a
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
LATER = re.compile("pynvml")  # compiled where there is an NVIDIA GPU, when it is first used: it is long
COMPLETE = ".complete"  # says to whoever pushes code (testbed/remote/node_archive.py) that nothing is left to do


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    name = wanted["name"]
    target = f"{ROOT}/{name}"
    if os.path.exists(f"{target}/{COMPLETE}") or not changes.really(f"node code {name[:12]}"):
        return
    content = base64.b64decode(wanted["files"]["archive"])
    if hashlib.sha256(content).hexdigest() != wanted["archive_sha256"]:
        raise StateError("the archive of the node code was damaged on its way")
    os.makedirs(ROOT, exist_ok=True)
    partial = tempfile.mkdtemp(dir=ROOT, prefix=".partial-")
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(partial, filter="data")
        os.chmod(partial, 0o755)
        how = {"invalidation_mode": py_compile.PycInvalidationMode.UNCHECKED_HASH, "rx": LATER}
        # Paths in tracebacks are those of the final place.
        if not compileall.compile_dir(partial, quiet=1, stripdir=partial, prependdir=target, **how):
            raise StateError("the node code does not compile on this node's Python")
        with open(f"{partial}/{COMPLETE}", "w", encoding="ascii"):
            pass
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
