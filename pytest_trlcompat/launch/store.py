"""The store in which the ranks of a launch on one machine meet: a file that only this user can reach.

PyTorch's own way is a ``TCPStore`` at ``MASTER_ADDR`` and ``MASTER_PORT``, which checks nothing: every user of the
machine can read and write it. If a rank or a launcher's agent hosts it, it listens on all interfaces. Runs inside the
ranks.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlparse

__all__ = ["ADDRESS", "PORT", "use_file"]

ADDRESS, PORT = "127.0.0.1", "1"
"""What ranks find as ``MASTER_ADDR`` and ``MASTER_PORT``, which libraries ask for: nobody listens there."""

_MODULE, _HANDLERS = "torch.distributed.rendezvous", "_rendezvous_handlers"


def use_file(path: str) -> None:
    """Let ``env://``, where every library meets that names no address, take its store from files at ``path``.

    A process group that is initialised after another one was destroyed gets a new file, since it would take the keys of
    the first group for its own. Without ``torch.distributed`` nothing is done.

    Raises:
        RuntimeError: this torch keeps its handlers elsewhere, and would open a port.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:  # the function gets the same error, if it needs torch
        return
    if not torch.distributed.is_available():
        return
    # Not register_rendezvous_handler, the public way: it refuses a scheme that torch has registered already.
    handlers = getattr(importlib.import_module(_MODULE), _HANDLERS, None)
    if not isinstance(handlers, dict) or "env" not in handlers:
        raise RuntimeError(
            f"torch {torch.__version__} has no handler of env:// in {_MODULE}.{_HANDLERS}, as torch 2.4 to 2.15 have; "
            "without it ranks would meet at a port that other users can reach, so nothing was launched"
        )
    numbers, torch_handler = itertools.count(), handlers["env"]

    def from_file(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        # torch moves rank= and world_size= of init_process_group into the query, where they come before the variables.
        query = dict(parse_qsl(urlparse(url).query))
        rank, world_size = (query.get(name, os.environ.get(name.upper())) for name in ("rank", "world_size"))
        if not rank or not world_size:
            yield from torch_handler(url, **options)  # says which variable is missing
            return
        # A number for each group, which would take the keys of the one before for its own.
        store = torch.distributed.FileStore(f"{path}-{next(numbers)}", int(world_size))
        yield store, int(rank), int(world_size)
        # As torch's own handlers: whoever asks their iterator again gets this instead of a second store.
        raise RuntimeError("env:// cannot meet again in the same store")

    handlers["env"] = from_file
