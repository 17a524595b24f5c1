"""Find the GPU that is nearest to an RNIC in the PCI tree. Pure; not yet run on hardware.

GPUDirect is fastest if both are below one PCIe switch: packets then do not pass the root complex. The nearest GPU is
the one whose path has the most bridges in common with the RNIC's path. A common root complex (`pci0000:15`) does not
count.
"""

from __future__ import annotations

from itertools import takewhile

from faultbed.testbed.discover.facts import Gpu, Machine

__all__ = ["gpu_beside", "shared_bridges"]


def gpu_beside(host: Machine, pcie: str) -> Gpu | None:
    """Return the GPU nearest to the PCIe device; None: several are equally near, or none is below a common bridge."""
    path = host.paths.get(pcie, ())
    shared = {gpu: shared_bridges(path, host.paths.get(gpu.pcie, ())) for gpu in host.gpus}
    most = max(shared.values(), default=0)
    nearest = [gpu for gpu, count in shared.items() if count == most]
    return nearest[0] if most > 1 and len(nearest) == 1 else None


def shared_bridges(path: tuple[str, ...], other_path: tuple[str, ...]) -> int:
    """Return how many steps two PCI paths (root first) have in common; 1 is the root complex alone."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, other_path, strict=False)))
