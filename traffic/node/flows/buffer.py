"""Registered memory of a flow: of the host, or of a GPU."""

from __future__ import annotations

import mmap

from traffic.node.verbs import Rnic

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    from pyverbs.mr import MR

__all__ = ["CudaBuffer", "HostBuffer", "make"]


class HostBuffer:
    """Page-aligned memory of the host."""

    def __init__(self, rnic: Rnic, size: int) -> None:
        import ctypes

        self._memory = mmap.mmap(-1, size)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
        self.mr: MR = rnic.register(self.address, size)

    def read(self, size: int, offset: int = 0) -> bytes:
        """So many bytes from `offset` on."""
        return self._memory[offset : offset + size]

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes there."""
        self._memory[offset : offset + len(data)] = data

    def close(self) -> None:
        """Forget the registration, then the memory."""
        self.mr.close()
        del self._view
        self._memory.close()


class CudaBuffer:
    """Memory of a GPU, registered by its dma-buf: for the RNIC it begins at address 0. Not yet run on hardware."""

    address = 0

    def __init__(self, rnic: Rnic, size: int, gpu: dict[str, Any]) -> None:
        from traffic.node.gpu_memory import CudaMemory

        self._memory = CudaMemory(size, pcie=gpu["pcie"], number=gpu["number"])
        try:
            self.mr: MR = rnic.register_dmabuf(self._memory.fd, self._memory.size)
        except BaseException:
            self._memory.close()
            raise

    def read(self, size: int, offset: int = 0) -> bytes:
        """The first bytes; there is no way yet to others."""
        if offset:
            raise NotImplementedError("memory of a GPU is read from its beginning only")
        return self._memory.read(size)

    def write(self, offset: int, data: bytes) -> None:
        """There is no way yet to do so."""
        raise NotImplementedError("memory of a GPU is not written by its host")

    def close(self) -> None:
        """Forget the registration, then the memory."""
        self.mr.close()
        self._memory.close()


def make(rnic: Rnic, size: int, gpu: dict[str, Any] | None) -> HostBuffer | CudaBuffer:
    """On the GPU {"pcie", "number"}; None: on the host."""
    return HostBuffer(rnic, size) if gpu is None else CudaBuffer(rnic, size, gpu)
