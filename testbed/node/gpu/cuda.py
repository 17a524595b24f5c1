"""A GPU through the CUDA driver API: its primary context, and work for it.

The few functions that are needed are called by ctypes. The driver's library is on every host with a GPU, so nothing
else has to be installed. Source: CUDA driver API reference, module management and execution control.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CudaDevice", "CudaKernel", "CudaWork", "NoCuda"]

_LIBRARY = "libcuda.so.1"
_PROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_BLOCKS, _THREADS = 8, 256
"""Blocks per multiprocessor, and threads per block: as many as it can hold."""
_ROUNDS = 1 << 15
"""Rounds of a unit. A round is four dependent multiply-adds per thread, and at most three other instructions. 64 warps
of a multiprocessor that starts four per cycle take at most 112 cycles for it. On an H100 at 1.98 GHz a unit takes
1.35 ms, 82 cycles a round, probably because the driver unrolls the loop. Its time depends on the GPU's clock only."""
_WORK = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry faultbed_work(.param .u64 out, .param .u32 rounds)
{
    .reg .pred %again;
    .reg .f32 %value, %factor, %term;
    .reg .b32 %left, %block, %size, %thread;
    .reg .b64 %to, %offset;
    ld.param.u64 %to, [out];
    ld.param.u32 %left, [rounds];
    mov.f32 %value, 0f3F800000;
    mov.f32 %factor, 0f3F7FFFFF;
    mov.f32 %term, 0f33800000;
AGAIN:
    fma.rn.f32 %value, %value, %factor, %term;
    fma.rn.f32 %value, %value, %factor, %term;
    fma.rn.f32 %value, %value, %factor, %term;
    fma.rn.f32 %value, %value, %factor, %term;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %again, %left, 0;
    @%again bra AGAIN;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %thread, %block, %size, %thread;
    cvta.to.global.u64 %to, %to;
    mul.wide.u32 %offset, %thread, 4;
    add.s64 %to, %to, %offset;
    st.global.f32 [%to], %value;
    ret;
}
"""
"""PTX, which the driver compiles for the GPU (Volta or newer). The store keeps the rounds from being optimised away."""


class NoCuda(Exception):  # named for a state, like faultbed.testbed.errors
    """There is no such GPU, its driver cannot do this, or a call failed."""


class CudaDevice:
    """A GPU, by PCIe address or by number; `make_current` and `release` its primary context."""

    def __init__(self, *, pcie: str | None, number: int, library: Any) -> None:
        self._cuda = library if library is not None else _load()
        self.call("cuInit", 0)
        self._device = ctypes.c_int()
        if pcie is not None:
            self.call("cuDeviceGetByPCIBusId", ctypes.byref(self._device), pcie.encode())
        else:
            self.call("cuDeviceGet", ctypes.byref(self._device), number)

    def attribute(self, number: int) -> int:
        """Return a CUdevice_attribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def make_current(self) -> None:
        """Make its primary context current in this thread."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def release(self) -> None:
        """Release its primary context."""
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, and raise NoCuda if it returns an error code."""
        code = getattr(self._cuda, name)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(words))
            raise NoCuda(f"{name}: {(words.value or b'error').decode()} ({code})")


class CudaKernel:
    """The kernel `name` of a module in PTX, compiled by the driver for the GPU whose context is current."""

    def __init__(self, gpu: CudaDevice, image: bytes, name: bytes) -> None:
        self._gpu = gpu
        self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        gpu.call("cuModuleLoadData", ctypes.byref(self._module), image)
        try:
            gpu.call("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, name)
        except NoCuda:
            self.close()
            raise

    def launch(self, blocks: int, threads: int, *values: Any) -> None:
        """Queue the kernel. `values` are its arguments, as ctypes objects of their types in PTX."""
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values))
        self._gpu.call("cuLaunchKernel", self._kernel, blocks, 1, 1, threads, 1, 1, 0, None, arguments, None)

    def close(self) -> None:
        """Unload the module."""
        self._gpu.call("cuModuleUnload", self._module)


class CudaWork:
    """Work for a GPU: `units` of multiply-adds on all its processors."""

    def __init__(self, *, pcie: str | None, number: int, library: Any = None) -> None:
        self._gpu = CudaDevice(pcie=pcie, number=number, library=library)
        self._blocks = _BLOCKS * self._gpu.attribute(_PROCESSORS)
        self._gpu.make_current()
        self._out = ctypes.c_uint64()
        try:
            self._kernel = CudaKernel(self._gpu, _WORK, b"faultbed_work")
            size = ctypes.c_size_t(4 * self._blocks * _THREADS)
            self._gpu.call("cuMemAlloc_v2", ctypes.byref(self._out), size)
        except NoCuda:
            self._gpu.release()
            raise
        self._rounds = ctypes.c_uint32(_ROUNDS)

    def compute(self, units: int) -> None:
        """Compute, and return when the GPU is done."""
        for _ in range(units):
            self._kernel.launch(self._blocks, _THREADS, self._out, self._rounds)
        self._gpu.call("cuCtxSynchronize")

    def close(self) -> None:
        """Free memory, module and context."""
        self._gpu.call("cuMemFree_v2", self._out)
        self._kernel.close()
        self._gpu.release()


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoCuda(f"no CUDA driver on this host ({error}); install NVIDIA's driver") from error
