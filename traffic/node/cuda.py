"""Memory of a GPU, by the CUDA driver API, in a form that an RNIC can be told of (dma-buf). Not yet run on hardware.

Only the few calls that this needs, by ctypes: the driver's library is on every host with a GPU, and nothing else has to
be installed. Source: CUDA driver API reference, memory management; `cuMemGetHandleForAddressRange` wants address and
size in whole pages of the host, which allocations in whole 2 MiB have.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CudaMemory", "NoCuda"]

_LIBRARY = "libcuda.so.1"
_GRAIN = 2 << 20
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS


class NoCuda(Exception):  # named for what is so, like testbed.errors
    """There is no such GPU, its driver cannot do this, or a call failed."""


class CudaMemory:
    """`size` bytes on a GPU, and `fd`, their dma-buf. The GPU is named by PCIe address or, without one, by number."""

    def __init__(self, size: int, *, pcie: str | None, number: int, library: Any = None) -> None:
        self._cuda = library if library is not None else _load()
        self._call("cuInit", 0)
        device = ctypes.c_int()
        if pcie is not None:
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(device), pcie.encode())
        else:
            self._call("cuDeviceGet", ctypes.byref(device), number)
        self._device = device
        supported = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _DMA_BUF_SUPPORTED, device)
        if not supported.value:
            raise NoCuda(
                "this GPU's driver exports no dma-buf: the open kernel modules and Linux 5.12 do; or use --memory host"
            )
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.size = -(-size // _GRAIN) * _GRAIN
        self._pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(self.size))
        try:
            # What the RNIC has written must be seen by copies that follow (GPUDirect RDMA guide).
            yes = ctypes.c_uint(1)
            self._call("cuPointerSetAttribute", ctypes.byref(yes), _SYNC_MEMOPS, self._pointer)
            self._call("cuMemsetD8_v2", self._pointer, ctypes.c_ubyte(0), ctypes.c_size_t(self.size))
            found = ctypes.c_int(-1)
            self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(found),
                self._pointer,
                ctypes.c_size_t(self.size),
                _DMA_BUF_FD,
                ctypes.c_ulonglong(0),
            )
            self.fd = found.value
        except NoCuda:
            self._free()
            raise

    def read(self, size: int) -> bytes:
        """The first bytes, copied to the host."""
        into = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", into, self._pointer, ctypes.c_size_t(size))
        return into.raw

    def close(self) -> None:
        """Give the memory back; after the RNIC has forgotten it."""
        import os

        os.close(self.fd)
        self._free()

    def _free(self) -> None:
        self._call("cuMemFree_v2", self._pointer)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(words))
            raise NoCuda(f"{name}: {(words.value or b'error').decode()} ({code})")


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoCuda(f"no CUDA driver on this host ({error}): install NVIDIA's driver, or use --memory host") from error
