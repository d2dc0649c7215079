"""What the engine of a vLLM server holds. Imports the standard library; safetensors inside functions."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["METHOD", "engine_weights", "save"]

METHOD = "trlcompat_save_weights"
"""Of the engine's worker, by which it saves its weights; :mod:`.cpu_engine` adds it."""
_TIMEOUT = 60.0


def engine_weights(url: str) -> dict[str, torch.Tensor]:
    """The engine's tensors by vLLM's own names, in the engine's dtype.

    Args:
        url: of a server from :class:`.server.VLLMServer`.

    Raises:
        OSError: the server does not answer, or could not save them.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="weights-") as folder:  # 0700
        path = Path(folder) / "weights.safetensors"
        body = json.dumps({"method": METHOD, "args": [str(path)]}).encode()
        request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT):
            return load_file(path)


def save(worker: Any, path: str) -> None:
    """Save the weights of a worker of vLLM's to a file, as :data:`METHOD`.

    Raises:
        ValueError: it has a part of the weights alone.
    """
    from safetensors.torch import save_file

    if worker.parallel_config.world_size > 1:
        raise ValueError(f"each of {worker.parallel_config.world_size} workers has a part of the weights alone")
    model = worker.model_runner.model
    save_file({name: parameter.detach().contiguous().clone() for name, parameter in model.named_parameters()}, path)
