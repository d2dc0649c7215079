"""Runs TRL's command for a vLLM server in this process, at a port that the test process holds.

    python -m pytest_trlcompat.inference.serving DESCRIPTOR PORT MODULE ...

The test process has bound the port before anybody is told of it, in a way in which no other process can, and keeps it:
nobody else can listen there, not even when this process has ended. So this process cannot bind it either, and whatever
binds it here gets that socket.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import socket
import sys
from typing import Any

__all__ = ["main", "take", "use_socket"]


def use_socket(descriptor: int, port: int) -> None:
    """From now on, a socket of this process that binds ``port`` by IPv4 becomes the one at ``descriptor``."""
    os.set_inheritable(descriptor, False)
    bind = socket.socket.bind

    @functools.wraps(bind)
    def bind_or_take(self: socket.socket, address: Any, /) -> None:
        if self.family == socket.AF_INET and isinstance(address, tuple) and address[1] == port:
            take(self, descriptor)
        else:
            bind(self, address)

    socket.socket.bind = bind_or_take  # type: ignore[method-assign,assignment]
    _tell_uvicorn(descriptor, port)


def take(replaced: socket.socket, descriptor: int) -> None:
    """Make a socket of this process the one at ``descriptor``, whatever it was before."""
    os.dup2(descriptor, replaced.fileno(), inheritable=False)


def _tell_uvicorn(descriptor: int, port: int) -> None:
    """uvloop, where uvicorn uses it, binds in C."""
    try:
        uvicorn = importlib.import_module("uvicorn")
    except ImportError:
        return
    run = uvicorn.Server.run

    @functools.wraps(run)
    def run_at_the_socket(self: Any, sockets: Any = None) -> Any:
        if sockets is None and self.config.port == port:
            sockets = [socket.socket(fileno=os.dup(descriptor))]
        return run(self, sockets)

    uvicorn.Server.run = run_at_the_socket


def main() -> None:
    descriptor, port, module, *arguments = sys.argv[1:]
    use_socket(int(descriptor), int(port))
    sys.argv = [module, *arguments]
    # As `python -m` would: processes that this one spawns import the command's module again, and not this one.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
