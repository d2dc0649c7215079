"""The environment variables of a launch: from the test process, the strategy and each rank.

Runs in the test process.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from pytest_trlcompat import stack
from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat._trust import UntrustedError, make_folder
from pytest_trlcompat.accelerator.build import AcceleratorError, cache_folder
from pytest_trlcompat.inference.environment import engine_environment
from pytest_trlcompat.launch import store
from pytest_trlcompat.launch.cluster import SECRET_VARIABLE, Cluster
from pytest_trlcompat.launch.strategy import Strategy

__all__ = ["base_environment", "rank_environment"]

# A test process that was itself started by torchrun or accelerate has them, and its launches are no part of that.
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
    """The test process's variables, without those of other launchers and the secret of several machines, and defaults
    that keep launches offline.

    Variables that the test process has set take precedence over these defaults.

    Raises:
        AcceleratorError: another user could change the extensions that PyTorch compiles for this one.
    """
    environment = {key: value for key, value in os.environ.items() if key not in (*_OTHER_LAUNCHERS, SECRET_VARIABLE)}
    defaults = {
        # Ranks share the cores, and a thread pool does not survive a fork.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        **engine_environment(device, stack.installed()),
    }
    if "TORCH_EXTENSIONS_DIR" not in environment and (extensions := _extensions_folder()) is not None:
        defaults["TORCH_EXTENSIONS_DIR"] = str(extensions)
    if cluster.nnodes == 1:
        # Neither can then be reached from other machines. Other users of this one can connect to gloo; ranks look
        # whether they have before it is used.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
        # With "=", NCCL takes the interface of exactly this name; without, all whose names begin so.
        defaults["NCCL_SOCKET_IFNAME"] = "=lo"
    if device == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"
    if device == "software" and visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ""  # otherwise libraries might use either
    return {**defaults, **environment}


def rank_environment(chosen: Strategy, local_rank: int, world_size: int, cluster: Cluster) -> dict[str, str]:
    """The variables that a launcher such as torchrun sets for a rank; the server adds the rendezvous."""
    if chosen.name == "single":
        return {}
    local = cluster.local_world_size(world_size)
    # On one machine the store is a file; of several the server adds its address.
    address = {"MASTER_ADDR": store.ADDRESS, "MASTER_PORT": store.PORT} if cluster.nnodes == 1 else {}
    return {
        **address,
        "RANK": str(cluster.node_rank * local + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(cluster.node_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank hosts a store
        "TORCHELASTIC_RESTART_COUNT": "0",  # required together with it up to torch 2.5
    }


def _extensions_folder() -> Path | None:
    """One folder per environment: an extension built for one torch and DeepSpeed must not be loaded by another.

    ``None`` without a home directory: PyTorch then chooses a folder itself.
    """
    digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    try:
        folder = cache_folder() / "torch_extensions" / digest
    except AcceleratorError:
        return None
    try:
        make_folder(folder)
    except UntrustedError as error:
        raise AcceleratorError(
            f"{error}, so another user could change the extensions that PyTorch compiles into {folder}. Let "
            "TRLCOMPAT_CACHE name a folder that, with all above it, only you and root can write to, or set "
            "TORCH_EXTENSIONS_DIR."
        ) from error
    except OSError:
        pass  # PyTorch says so itself if it compiles one
    return folder
