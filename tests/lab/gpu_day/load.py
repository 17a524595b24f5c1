"""The process that loads the GPU with the phases of a training job.

    python tests/lab/gpu_day/load.py PCIE fma|matmul

It reads `{"phase": NAME, "seconds": S}` from stdin, one line each, and answers each with its start and end (monotonic
ns) and its amount of work. The first line of its output says that it is ready.

- compute: fma is the work unit of our compute phases; matmul is a bf16 matrix product of 8192 x 8192 by PyTorch.
- collective: 24 blocks of a kernel that adds one buffer to another, as a communication library keeps some
  multiprocessors busy while the others wait for it.
- checkpoint: 256 MiB at a time are copied to the host, and from there into other memory, as into a page cache.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

from faultbed.testbed.node.gpu.cuda import CudaDevice, CudaKernel, CudaWork

REHEARSAL = os.environ.get("FAULTBED_REHEARSAL") == "1"
CHUNK = (256 << 20) if not REHEARSAL else (1 << 20)
BLOCKS, THREADS, AT_A_TIME = 24, 512, 20
SIDE = 8192
REDUCE = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry faultbed_reduce(.param .u64 target, .param .u64 source, .param .u64 count)
{
    .reg .pred %is_done;
    .reg .b32 %block, %blocks, %threads, %thread;
    .reg .f32 %a0, %a1, %a2, %a3, %b0, %b1, %b2, %b3;
    .reg .b64 %target, %source, %count, %at, %step, %first, %offset, %to, %from;
    ld.param.u64 %target, [target];
    ld.param.u64 %source, [source];
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %target, %target;
    cvta.to.global.u64 %source, %source;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %block, %threads;
    cvt.u64.u32 %first, %thread;
    add.u64 %at, %at, %first;
    mul.wide.u32 %step, %blocks, %threads;
AGAIN:
    setp.ge.u64 %is_done, %at, %count;
    @%is_done ret;
    shl.b64 %offset, %at, 4;
    add.u64 %to, %target, %offset;
    add.u64 %from, %source, %offset;
    ld.global.v4.f32 {%a0, %a1, %a2, %a3}, [%to];
    ld.global.v4.f32 {%b0, %b1, %b2, %b3}, [%from];
    add.f32 %a0, %a0, %b0;
    add.f32 %a1, %a1, %b1;
    add.f32 %a2, %a2, %b2;
    add.f32 %a3, %a3, %b3;
    st.global.v4.f32 [%to], {%a0, %a1, %a2, %a3};
    add.u64 %at, %at, %step;
    bra AGAIN;
}
"""
"""PTX: adds `count` groups of four numbers of `source` to those of `target`."""


class Load:
    def __init__(self, pcie, compute):
        self.gpu = CudaDevice(pcie=pcie, number=0, library=None)
        self.gpu.make_current()
        self.target, self.source, self.pinned = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()
        for pointer in (self.target, self.source):
            self.gpu.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(CHUNK))
        self.gpu.call("cuMemHostAlloc", ctypes.byref(self.pinned), ctypes.c_size_t(CHUNK), 0)
        self.cache = ctypes.create_string_buffer(CHUNK)
        noise = (os.urandom(1 << 16) * (CHUNK >> 16)).translate(bytes(0x38 | (byte & 7) for byte in range(256)))
        for pointer in (self.target, self.source):  # small numbers that differ: each byte is 0x38 to 0x3f
            self.gpu.call("cuMemcpyHtoD_v2", pointer, noise, ctypes.c_size_t(CHUNK))
        self.reduce = CudaKernel(self.gpu, REDUCE, b"faultbed_reduce")
        self.compute = self.matmul() if compute == "matmul" and not REHEARSAL else self.fma(pcie)
        self.compute()

    def fma(self, pcie):
        work = CudaWork(pcie=pcie, number=0)
        return lambda: work.compute(AT_A_TIME)

    def matmul(self):
        import torch

        torch.manual_seed(7)
        left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)

        def compute():
            for _ in range(AT_A_TIME):
                torch.matmul(left, right, out=product)
            torch.cuda.synchronize()

        return compute

    def collective(self):
        for _ in range(AT_A_TIME):
            self.reduce.launch(BLOCKS, THREADS, self.target, self.source, ctypes.c_uint64(CHUNK // 16))
        self.gpu.call("cuCtxSynchronize")

    def checkpoint(self):
        self.gpu.call("cuMemcpyDtoH_v2", self.pinned, self.target, ctypes.c_size_t(CHUNK))
        ctypes.memmove(self.cache, self.pinned, CHUNK)

    def run(self, phase, seconds):
        step = {"compute": self.compute, "collective": self.collective, "checkpoint": self.checkpoint}[phase]
        start_ns, amount = time.monotonic_ns(), 0
        while time.monotonic_ns() - start_ns < seconds * 1e9:
            step()
            amount += 1
        return {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "amount": amount}


def main():
    load = Load(sys.argv[1], sys.argv[2])
    print(json.dumps({"ready_ns": time.monotonic_ns()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(load.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
