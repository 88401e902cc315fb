# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks: real processes, gloo over loopback."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as mp

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "fmuon",
]


def run(function, world, *arguments, timeout=60):
    """function(rank, world, *arguments) on every rank; what rank 0 returns."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _start,
            (function, world, folder, arguments, timeout),
            nprocs=world,
            start_method="forkserver",
            join=False,
        )
        while not context.join(timeout=timeout):
            pass
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _start(rank, function, world, folder, arguments, timeout):
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = function(rank, world, *arguments)
        if rank == 0:
            torch.save(result, Path(folder) / "result.pt")
    finally:
        dist.destroy_process_group()
