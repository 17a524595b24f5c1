"""GPU memory that an RNIC can register (dma-buf), by the CUDA driver API. Not yet run on hardware.

Source: CUDA driver API reference, memory management. `cuMemGetHandleForAddressRange` requires the address and the size
to be multiples of the host's page size; allocations in whole 2 MiB are.
"""

from __future__ import annotations

import ctypes

from faultbed.testbed.node.gpu.cuda import CudaDevice, NoCuda

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CudaMemory"]

_GRAIN = 2 << 20
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS


class CudaMemory:
    """`size` bytes on a GPU, and their dma-buf `fd`. The GPU is selected by PCIe address or, without one, by number."""

    def __init__(self, size: int, *, pcie: str | None, number: int, library: Any = None) -> None:
        self._gpu = CudaDevice(pcie=pcie, number=number, library=library)
        if not self._gpu.attribute(_DMA_BUF_SUPPORTED):
            raise NoCuda(
                "the driver of this GPU exports no dma-buf; use the open kernel modules with Linux 5.12 or later, "
                "or --memory host"
            )
        self._gpu.make_current()
        self.size = -(-size // _GRAIN) * _GRAIN
        self._pointer = ctypes.c_uint64()
        self._gpu.call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(self.size))
        try:
            # Data that the RNIC has written must be visible to copies that follow (GPUDirect RDMA guide).
            enabled = ctypes.c_uint(1)
            self._gpu.call("cuPointerSetAttribute", ctypes.byref(enabled), _SYNC_MEMOPS, self._pointer)
            self._gpu.call("cuMemsetD8_v2", self._pointer, ctypes.c_ubyte(0), ctypes.c_size_t(self.size))
            handle = ctypes.c_int(-1)
            self._gpu.call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(handle),
                self._pointer,
                ctypes.c_size_t(self.size),
                _DMA_BUF_FD,
                ctypes.c_ulonglong(0),
            )
            self.fd = handle.value
        except NoCuda:
            self._free()
            raise

    def read(self, size: int) -> bytes:
        """Copy the first `size` bytes to the host."""
        into = ctypes.create_string_buffer(size)
        self._gpu.call("cuMemcpyDtoH_v2", into, self._pointer, ctypes.c_size_t(size))
        return into.raw

    def close(self) -> None:
        """Free the memory. The RNIC must have deregistered it before."""
        import os

        os.close(self.fd)
        self._free()

    def _free(self) -> None:
        self._gpu.call("cuMemFree_v2", self._pointer)
        self._gpu.release()
