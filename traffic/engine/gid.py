"""The index of an RNIC's GID, which perftest needs and which shows that the RNIC has its address."""

from __future__ import annotations

from faultbed.testbed.errors import LabError
from faultbed.testbed.node.kernel_files import gid_of
from faultbed.testbed.remote.remote_node import Node
from faultbed.traffic.engine.run_results import Endpoint

__all__ = ["gid_index"]


def gid_index(node: Node, place: Endpoint, *, timeout_s: float = 60.0) -> int:
    """Return the index of the RoCE v2 GID with an RNIC's address, looked up by value on its host.

    Raises:
        LabError: there is none.
        Unreachable: the host does not answer.
        CommandFailed: it did not answer in time.
    """
    gid_text = gid_of(place.address)
    port = f"/sys/class/infiniband/{place.rnic}/ports/1"
    argv = ["grep", "-sH", "", "-r", f"{port}/gids", f"{port}/gid_attrs/types"]
    listing = node.run(argv, check=False, timeout_s=timeout_s).stdout
    values = dict(line.split(":", 1) for line in listing.splitlines() if ":" in line)
    for path, value in values.items():
        index = path.rsplit("/", 1)[1]
        if value == gid_text and "v2" in values.get(f"{port}/gid_attrs/types/{index}", ""):
            return int(index)
    raise LabError(f"{place.name} has no RoCE v2 GID for {place.address}")
