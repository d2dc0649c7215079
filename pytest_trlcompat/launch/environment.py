"""The environment variables of a launch: those of the test process, of the strategy, of each rank.

Runs in the test process and must import nothing of the stack.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat.accelerator.build import cache_folder
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.strategy import Strategy

__all__ = ["base_environment", "rank_environment"]

_OTHER_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def base_environment(device: str, cluster: Cluster) -> dict[str, str]:
    """The test process's environment, less what another launcher may have left, plus what keeps launches offline.

    What the test process itself has set wins over the defaults given here.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _OTHER_LAUNCHERS}
    defaults = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores; and a thread pool does not survive a fork
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(_extensions_folder()),
    }
    if cluster.nnodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # nothing listens where another machine could reach it
    if device == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"
        # Mismatched collectives then fail at once and name each other. The software accelerator compares by itself, for
        # less; NCCL would pay much.
        defaults["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if device == "software" and visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ""  # beside a GPU it would be left to chance which of them is taken
    return {**defaults, **environment}


def rank_environment(chosen: Strategy, local_rank: int, world_size: int, cluster: Cluster) -> dict[str, str]:
    """What a launcher such as torchrun tells a rank about itself; where to meet is the server's to say."""
    if chosen.name == "single":
        return {}
    local = cluster.local_world_size(world_size)
    return {
        "RANK": str(cluster.node_rank * local + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(cluster.node_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the server's; no rank hosts it
        "TORCHELASTIC_RESTART_COUNT": "0",  # asked for beside it up to torch 2.5
    }


def _extensions_folder() -> Path:
    """One folder per environment: extensions built against one torch and DeepSpeed must not meet another's."""
    digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return cache_folder() / "torch_extensions" / digest
