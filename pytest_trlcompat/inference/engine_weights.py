"""What the engine of a vLLM server holds. Imports the standard library; safetensors inside functions."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

if TYPE_CHECKING:
    import torch

__all__ = ["METHOD", "engine_weights", "offer", "save"]

METHOD = "trlcompat_save_weights"
"""Of the engine's worker, by which it saves its weights; :mod:`.cpu_engine` adds it."""
_UPDATE = "update_named_param"
"""Of the worker of TRL's own server, which has no other method that a client may call; with a name that begins with
:data:`METHOD` it saves instead."""
_TIMEOUT = 60.0
_POLL = 0.02


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
        try:
            _post(f"{url}/collective_rpc", {"method": METHOD, "args": [str(path)]})
        except HTTPError as error:
            if error.code != 404:
                raise
            _post(f"{url}/{_UPDATE}/", {"name": f"{METHOD}:{path}", "dtype": "torch.uint8", "shape": [0]})
            _wait(path)  # this server answers before it has done what it was asked for
        return load_file(path)


def _post(url: str, content: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_TIMEOUT).close()


def _wait(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server did not save its engine's weights within {_TIMEOUT:g} s")
        time.sleep(_POLL)


def offer(worker: type, engine: type) -> None:
    """Let whoever uses a server ask for what its engine holds.

    Args:
        worker: vLLM's ``Worker``.
        engine: vLLM's ``LLM``, which TRL's own server has.
    """
    setattr(worker, METHOD, save)
    call = engine.collective_rpc  # type: ignore[attr-defined]

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        given = options.get("args") or ("",)
        if method == _UPDATE and str(given[0]).startswith(f"{METHOD}:"):
            method, options = METHOD, {"args": (given[0].partition(":")[2],)}
        return call(self, method, *args, **options)

    engine.collective_rpc = collective_rpc  # type: ignore[attr-defined]


def save(worker: Any, path: str) -> None:
    """Save the weights of a worker of vLLM's to a file, as :data:`METHOD`.

    Raises:
        ValueError: it has a part of the weights alone.
    """
    from safetensors.torch import save_file

    if worker.parallel_config.world_size > 1:
        raise ValueError(f"each of {worker.parallel_config.world_size} workers has a part of the weights alone")
    model = worker.model_runner.model
    tensors = {name: parameter.detach().contiguous().clone() for name, parameter in model.named_parameters()}
    save_file(tensors, f"{path}.unfinished")
    os.replace(f"{path}.unfinished", path)
