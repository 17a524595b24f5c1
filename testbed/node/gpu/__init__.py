"""GPUs of a machine: NVIDIA's by its driver (NVML, CUDA, XID events), and the synthetic health of soft GPUs."""
