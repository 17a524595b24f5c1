"""Workloads that are programs of other authors: `ib_write_bw`, nccl-tests, fio, a training script."""
