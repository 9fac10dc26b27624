"""Runs a function as every rank of a gloo group, in processes of their own."""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _main(rank, body, ranks, store, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    try:
        body(rank, ranks, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(body, ranks, *arguments):
    """body(rank, ranks, *arguments) on each rank; an exception of one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, args=(body, ranks, os.path.join(folder, "store"), arguments), nprocs=ranks)
