"""Registered memory of a flow, on the host or on a GPU."""

from __future__ import annotations

import mmap

from faultbed.traffic.node.verbs import Rnic

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    from pyverbs.mr import MR

__all__ = ["CudaBuffer", "HostBuffer", "make"]


class HostBuffer:
    """Page-aligned host memory."""

    def __init__(self, rnic: Rnic, size: int) -> None:
        import ctypes

        self._memory = mmap.mmap(-1, size)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
        self.mr: MR = rnic.register(self.address, size)

    def read(self, size: int, offset: int = 0) -> bytes:
        """Return `size` bytes from `offset` on."""
        return self._memory[offset : offset + size]

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""
        self._memory[offset : offset + len(data)] = data

    def recount(self, offset: int, expected: bytes) -> int | None:
        """Return None: only the host accesses this memory, and it has counted already."""
        return None

    def close(self) -> None:
        """Deregister the memory, then free it."""
        self.mr.close()
        del self._view
        self._memory.close()


class CudaBuffer:
    """GPU memory registered by its dma-buf. For the RNIC it begins at address 0. Not yet run on hardware."""

    address = 0

    def __init__(self, rnic: Rnic, size: int, gpu: dict[str, Any]) -> None:
        from faultbed.traffic.node.gpu_memory import CudaMemory

        self._memory = CudaMemory(size, pcie=gpu["pcie"], number=gpu["number"])
        try:
            self.mr: MR = rnic.register_dmabuf(self._memory.fd, self._memory.size)
        except BaseException:
            self._memory.close()
            raise

    def read(self, size: int, offset: int = 0) -> bytes:
        """Return `size` bytes from `offset` on."""
        return self._memory.read(size, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""
        self._memory.write(offset, data)

    def recount(self, offset: int, expected: bytes) -> int | None:
        """Return how many bytes from `offset` on differ from the expected ones, counted on the GPU."""
        return self._memory.count_differing(offset, expected)

    def close(self) -> None:
        """Deregister the memory, then free it."""
        self.mr.close()
        self._memory.close()


def make(rnic: Rnic, size: int, gpu: dict[str, Any] | None) -> HostBuffer | CudaBuffer:
    """Allocate a buffer on the GPU {"pcie", "number"}, or on the host if `gpu` is None."""
    return HostBuffer(rnic, size) if gpu is None else CudaBuffer(rnic, size, gpu)
