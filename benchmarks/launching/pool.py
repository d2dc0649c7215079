"""DeepSpeed's ``DistributedTest`` (its ``tests/unit/common.py``), the pattern rewritten: a new pool for every test.

The processes come from a fork server, set what torchrun would set, initialise the process group by a file, run the
test, and end with the pool.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

from benchmarks.launching.serve import serve

_TIMEOUT = 600.0


def run(rank: int, world_size: int, folder: Path) -> None:
    """What a process of the pool does."""
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    torch.npu.set_device(rank)
    torch.distributed.init_process_group(
        "hccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    from benchmarks.launching.training import train_here

    losses = train_here()
    (folder / f"{rank}.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(world_size: int) -> None:
    context = multiprocessing.get_context("forkserver")

    def launch(folder: Path, number: int) -> None:
        pool = context.Pool(processes=world_size)
        try:
            pool.starmap_async(run, [(rank, world_size, folder) for rank in range(world_size)]).get(_TIMEOUT)
        finally:
            pool.close()
            pool.join()

    serve(launch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
