"""A stand-in for libcuda.so.1: the driver functions that faultbed calls, for one GPU whose memory is this process's.

Memory can be written, read and compared, so that a wrong offset or a lost byte shows. Kernels are executed by name, not
by their PTX. `refuses` names a function that returns an error.
"""

import ctypes
import os

import numpy as np

_OK, _INVALID, _NOT_SUPPORTED = 0, 1, 801
_FIRST = 0x7F0000000000


def number(value):
    """Return the integer of a ctypes object or an int."""
    return value if isinstance(value, int) else value.value


class Library:
    """The object that `ctypes.CDLL("libcuda.so.1")` returns.

    `spend(kind, amount)` is called for work: "compute" with a number of units, "copy" with bytes over PCIe, "reduce"
    with kernels, "context" with +1 or -1.
    """

    def __init__(self, *, refuses="", dma_buf=1, processors=132, spend=lambda _kind, _amount: None):
        self.refuses, self.attributes, self.spend = refuses, {124: dma_buf, 16: processors}, spend
        self.calls, self.blocks, self.kernels, self.queued = [], {}, {}, []
        self.next = _FIRST

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(type(self), f"_{name}", lambda _self, *_arguments: _OK)

        def call(*arguments):
            self.calls.append(name)
            return _NOT_SUPPORTED if name == self.refuses else function(self, *arguments) or _OK

        return call

    def _cuGetErrorString(self, _code, words):  # noqa: N802 (names of the driver, as all that follow)
        words._obj.value = b"operation not supported"

    def _cuDeviceGetAttribute(self, value, attribute, _device):  # noqa: N802
        value._obj.value = self.attributes[attribute]

    def _cuDevicePrimaryCtxRetain(self, _context, _device):  # noqa: N802
        self.spend("context", 1)

    def _cuDevicePrimaryCtxRelease_v2(self, _device):  # noqa: N802
        self.spend("context", -1)

    def _cuModuleLoadData(self, module, image):  # noqa: N802
        self.next += 1
        self.kernels[self.next] = image
        module._obj.value = self.next

    def _cuModuleGetFunction(self, kernel, module, name):  # noqa: N802
        if b".visible .entry " + name + b"(" not in self.kernels[number(module)]:
            return _INVALID
        self.next += 1
        self.kernels[self.next] = name.decode()
        kernel._obj.value = self.next
        return _OK

    def _cuMemAlloc_v2(self, pointer, size):  # noqa: N802
        self.next = -(-self.next // (2 << 20)) * (2 << 20)
        self.blocks[self.next] = bytearray(os.urandom(min(number(size), 1 << 16))).ljust(number(size), b"\xaa")
        pointer._obj.value = self.next
        self.next += number(size)

    def _cuMemFree_v2(self, pointer):  # noqa: N802
        del self.blocks[number(pointer)]

    def _cuMemHostAlloc(self, pointer, size, _flags):  # noqa: N802
        self.pinned = ctypes.create_string_buffer(number(size))
        pointer._obj.value = ctypes.addressof(self.pinned)

    def _cuMemFreeHost(self, _pointer):  # noqa: N802
        del self.pinned

    def _cuMemsetD8_v2(self, pointer, byte, size):  # noqa: N802
        self.within(pointer, size)[:] = bytes([number(byte)]) * number(size)

    def _cuMemcpyHtoD_v2(self, pointer, data, size):  # noqa: N802
        self.spend("copy", number(size))
        self.within(pointer, size)[:] = ctypes.string_at(data, number(size))

    def _cuMemcpyDtoH_v2(self, data, pointer, size):  # noqa: N802
        self.spend("copy", number(size))
        target = data._obj if hasattr(data, "_obj") else data
        ctypes.memmove(ctypes.addressof(target) if not isinstance(target, ctypes.c_void_p) else target.value,
                       bytes(self.within(pointer, size)), number(size))  # fmt: skip

    def _cuMemGetHandleForAddressRange(self, handle, pointer, size, kind, _flags):  # noqa: N802
        assert (number(pointer) % 4096, number(size) % 4096, kind) == (0, 0, 1)
        handle._obj.value = os.memfd_create("dmabuf")
        os.ftruncate(handle._obj.value, number(size))

    def _cuLaunchKernel(self, kernel, blocks, _y, _z, threads, *rest):  # noqa: N802
        name, values = self.kernels[number(kernel)], rest[4]
        if name == "faultbed_differing":
            left, right, size, count = (ctypes.cast(values[at], ctypes.POINTER(ctypes.c_uint64))[0] for at in range(4))
            one, other = (np.frombuffer(self.within(side, size), dtype=np.uint8) for side in (left, right))
            differing = int(np.count_nonzero(one != other))
            counter = self.within(count, 8)
            counter[:] = (int.from_bytes(counter, "little") + differing).to_bytes(8, "little")
        else:
            self.queued.append("compute" if name == "faultbed_work" else "reduce")

    def _cuCtxSynchronize(self):  # noqa: N802
        queued, self.queued = self.queued, []
        for kind in sorted(set(queued)):
            self.spend(kind, queued.count(kind))

    def within(self, pointer, size):
        """Return a view of a range of GPU memory; an address outside of every allocation fails."""
        for start, block in self.blocks.items():
            if start <= number(pointer) and number(pointer) + number(size) <= start + len(block):
                return memoryview(block)[number(pointer) - start : number(pointer) - start + number(size)]
        raise AssertionError(f"{number(size)} bytes at {number(pointer):#x} are in no allocation")
