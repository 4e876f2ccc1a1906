"""Run a function on several gloo ranks of this machine, and get back what the first one returns.

Ranks are fresh processes. Where the platform has a fork server, it imports the heavy packages once for all of them.
"""

import multiprocessing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PRELOAD = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "neatpack.hf",
    "neatpack.train.context_parallel",
]


def run_on_ranks(function, world_size, folder):
    """Call `function(rank, world_size)` in `world_size` new processes; what rank 0 returned."""
    start_method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)
    arguments = (world_size, function, str(folder))
    torch.multiprocessing.start_processes(_rank, arguments, world_size, start_method=start_method)
    return torch.load(Path(folder) / "result.pt", weights_only=False)


def _rank(rank, world_size, function, folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    init = f"file://{folder}/init"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    result = function(rank, world_size)
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.barrier()
    dist.destroy_process_group()
