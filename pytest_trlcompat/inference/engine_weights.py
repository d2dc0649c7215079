"""What the engine of a vLLM server holds.

A rank that wants to know waits at a Unix socket (:class:`.control.Inbox`) and asks the server, through its port, to
send what the engine holds under a token. The engine's worker finds the socket by the token, in a folder that is this
user's alone. A request that names anything else is refused: what comes from the port says nothing of files.
"""

from __future__ import annotations

import functools
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from pytest_trlcompat.inference import control

if TYPE_CHECKING:
    import torch

__all__ = ["METHOD", "engine_weights", "offer", "send"]

METHOD = "trlcompat_send_weights"
"""Of the engine's worker, by which it sends its weights; :mod:`.cpu_engine` adds it."""
_UPDATE = "update_named_param"
"""Of the worker of TRL's own server, which has no other method that a client may call; with a name that begins with
:data:`METHOD` it sends instead."""
_TIMEOUT = 60.0


def engine_weights(url: str) -> dict[str, torch.Tensor]:
    """The engine's tensors by vLLM's own names, in the engine's dtype.

    Args:
        url: of a server from :class:`.server.VLLMServer`, or of what passes requests on to it.

    Raises:
        OSError: the server does not answer, or could not send them; another user's process sent something.
        ControlError: this is no process of a test that has started such a server.
    """
    from safetensors.torch import load

    # The engine works off requests in their order, so that it sends what earlier ones have made of its weights; and it
    # answers when all is sent, so that somebody must read meanwhile.
    with control.Inbox() as inbox, ThreadPoolExecutor(1) as pool:
        request = pool.submit(_ask, url, inbox.token)
        content = inbox.receive(_TIMEOUT, lambda: request.done() and request.exception() is not None)
        request.result()
    if content is None:
        raise ConnectionError("the server answered, and sent nothing")
    return load(content)


def _ask(url: str, token: str) -> None:
    try:
        _post(f"{url}/collective_rpc", {"method": METHOD, "args": [token]})
    except HTTPError as error:
        if error.code != 404:
            raise
        # TRL's own server, which answers before it has done what it was asked for.
        _post(f"{url}/{_UPDATE}/", {"name": f"{METHOD}:{token}", "dtype": "torch.uint8", "shape": [0]})


def _post(url: str, content: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_TIMEOUT).close()


def offer(worker: type, engine: type) -> None:
    """Let whoever uses a server ask for what its engine holds.

    Args:
        worker: vLLM's ``Worker``.
        engine: vLLM's ``LLM``, which TRL's own server has.
    """
    setattr(worker, METHOD, send)
    call = engine.collective_rpc  # type: ignore[attr-defined]

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        first = str((options.get("args") or ("",))[0])
        if method == _UPDATE and first.startswith(f"{METHOD}:"):
            method, options = METHOD, {"args": (first.partition(":")[2],)}
        return call(self, method, *args, **options)

    engine.collective_rpc = collective_rpc  # type: ignore[attr-defined]


def send(worker: Any, token: str) -> None:
    """Send the weights of a worker of vLLM's to the process of this user that waits for them, as :data:`METHOD`.

    Args:
        token: of its :class:`.control.Inbox`.

    Raises:
        ValueError: the worker has a part of the weights alone.
        ControlError: it is no token, or nobody waits under it.
    """
    if worker.parallel_config.world_size > 1:
        raise ValueError(f"each of {worker.parallel_config.world_size} workers has a part of the weights alone")
    # Before the weights are copied, since anybody may have asked.
    control.check_token(token)
    from safetensors.torch import save

    model = worker.model_runner.model
    control.send(
        token, save({name: parameter.detach().contiguous().clone() for name, parameter in model.named_parameters()})
    )
