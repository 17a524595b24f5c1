"""Replace the libraries of NVIDIA's driver in every Python process of a rehearsal; its module seems loaded."""

import ctypes
import os

import standin_gpu

_exists = os.path.exists


class CDLL(ctypes.CDLL):
    def __new__(cls, name, *arguments, **rest):
        if name == "libcuda.so.1":
            return standin_gpu.cuda(os.getpid())
        if name == "libnvidia-ml.so.1":
            return standin_gpu.nvml()
        return super().__new__(cls)


ctypes.CDLL = CDLL
os.path.exists = lambda path: path == "/proc/driver/nvidia/version" or _exists(path)
