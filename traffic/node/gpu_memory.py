"""GPU memory that an RNIC can register (dma-buf), by the CUDA driver API.

Source: CUDA driver API reference, memory management. `cuMemGetHandleForAddressRange` requires the address and the size
to be multiples of the host's page size; allocations in whole 2 MiB are.

Memory and its export were verified on an H100. Its registration by an RNIC is not yet run on hardware.
"""

from __future__ import annotations

import ctypes

from faultbed.testbed.node.gpu.cuda import CudaDevice, CudaKernel, NoCuda

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CudaMemory"]

_GRAIN = 2 << 20
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_BLOCKS, _THREADS = 256, 256
_DIFFERING = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry faultbed_differing(.param .u64 left, .param .u64 right, .param .u64 size, .param .u64 count)
{
    .reg .pred %is_done, %differ;
    .reg .b16 %one, %other;
    .reg .b32 %block, %blocks, %threads, %thread;
    .reg .b64 %left, %right, %size, %count, %at, %step, %first, %address, %found;
    ld.param.u64 %left, [left];
    ld.param.u64 %right, [right];
    ld.param.u64 %size, [size];
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %left, %left;
    cvta.to.global.u64 %right, %right;
    cvta.to.global.u64 %count, %count;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %block, %threads;
    cvt.u64.u32 %first, %thread;
    add.u64 %at, %at, %first;
    mul.wide.u32 %step, %blocks, %threads;
    mov.u64 %found, 0;
AGAIN:
    setp.ge.u64 %is_done, %at, %size;
    @%is_done bra END;
    add.u64 %address, %left, %at;
    ld.global.u8 %one, [%address];
    add.u64 %address, %right, %at;
    ld.global.u8 %other, [%address];
    setp.ne.u16 %differ, %one, %other;
    @%differ add.u64 %found, %found, 1;
    add.u64 %at, %at, %step;
    bra AGAIN;
END:
    setp.eq.u64 %is_done, %found, 0;
    @%is_done ret;
    red.global.add.u64 [%count], %found;
    ret;
}
"""
"""PTX of a kernel that adds to `count` how many of `size` bytes differ between `left` and `right`."""


class CudaMemory:
    """`size` bytes on a GPU, and their dma-buf `fd`. The GPU is selected by PCIe address or, without one, by number.

    With `export=False` there is no dma-buf, `fd` is -1, and no RNIC can register the memory.
    """

    def __init__(self, size: int, *, pcie: str | None, number: int, library: Any = None, export: bool = True) -> None:
        self._gpu = CudaDevice(pcie=pcie, number=number, library=library)
        if export and not self._gpu.attribute(_DMA_BUF_SUPPORTED):
            raise NoCuda(
                "the driver of this GPU exports no dma-buf; use the open kernel modules with Linux 5.12 or later, "
                "or --memory host"
            )
        self._gpu.make_current()
        self.size = -(-size // _GRAIN) * _GRAIN
        self.fd = -1
        self._differing: CudaKernel | None = None
        self._expected, self._expected_size, self._count = ctypes.c_uint64(), 0, ctypes.c_uint64()
        self._pointer = ctypes.c_uint64()
        self._gpu.call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(self.size))
        try:
            # Data that the RNIC has written must be visible to copies that follow (GPUDirect RDMA guide).
            enabled = ctypes.c_uint(1)
            self._gpu.call("cuPointerSetAttribute", ctypes.byref(enabled), _SYNC_MEMOPS, self._pointer)
            self._gpu.call("cuMemsetD8_v2", self._pointer, ctypes.c_ubyte(0), ctypes.c_size_t(self.size))
            if export:
                self.fd = self._exported()
        except NoCuda:
            self._free()
            raise

    def _exported(self) -> int:
        handle = ctypes.c_int(-1)
        self._gpu.call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(handle),
            self._pointer,
            ctypes.c_size_t(self.size),
            _DMA_BUF_FD,
            ctypes.c_ulonglong(0),
        )
        return handle.value

    def read(self, size: int, offset: int = 0) -> bytes:
        """Copy `size` bytes from `offset` on to the host."""
        into = ctypes.create_string_buffer(size)
        self._gpu.call("cuMemcpyDtoH_v2", into, self._at(offset, size), ctypes.c_size_t(size))
        return into.raw

    def write(self, offset: int, data: bytes) -> None:
        """Copy `data` from the host to `offset`."""
        self._gpu.call("cuMemcpyHtoD_v2", self._at(offset, len(data)), data, ctypes.c_size_t(len(data)))

    def count_differing(self, offset: int, expected: bytes) -> int:
        """Count the bytes from `offset` on that differ from the expected ones, on the GPU itself."""
        size = len(expected)
        left = self._at(offset, size)
        if self._differing is None:
            self._gpu.call("cuMemAlloc_v2", ctypes.byref(self._count), ctypes.c_size_t(8))
            self._differing = CudaKernel(self._gpu, _DIFFERING, b"faultbed_differing")
        if size > self._expected_size:
            self._free_expected()
            self._gpu.call("cuMemAlloc_v2", ctypes.byref(self._expected), ctypes.c_size_t(size))
            self._expected_size = size
        if size:
            self._gpu.call("cuMemcpyHtoD_v2", self._expected, expected, ctypes.c_size_t(size))
        self._gpu.call("cuMemsetD8_v2", self._count, ctypes.c_ubyte(0), ctypes.c_size_t(8))
        self._differing.launch(_BLOCKS, _THREADS, left, self._expected, ctypes.c_uint64(size), self._count)
        self._gpu.call("cuCtxSynchronize")
        differing = ctypes.c_uint64()
        self._gpu.call("cuMemcpyDtoH_v2", ctypes.byref(differing), self._count, ctypes.c_size_t(8))
        return differing.value

    def _at(self, offset: int, size: int) -> ctypes.c_uint64:
        """Return the address of a range; a range outside of the memory would reach that of other programs' data."""
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes from {offset} on are not within {self.size} bytes of GPU memory")
        return ctypes.c_uint64(self._pointer.value + offset)

    def close(self) -> None:
        """Free the memory. The RNIC must have deregistered it before."""
        import os

        if self.fd >= 0:
            os.close(self.fd)
        self._free()

    def _free(self) -> None:
        if self._differing is not None:
            self._differing.close()
            self._gpu.call("cuMemFree_v2", self._count)
        self._free_expected()
        self._gpu.call("cuMemFree_v2", self._pointer)
        self._gpu.release()

    def _free_expected(self) -> None:
        if self._expected_size:
            self._expected_size = 0
            self._gpu.call("cuMemFree_v2", self._expected)
