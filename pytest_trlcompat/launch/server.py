"""The warm server: imports the stack once, then forks new ranks for every launch until its client disconnects.

Started by :mod:`pytest_trlcompat.launch.client` with one end of a socket pair. It must stay single-threaded and must
not touch CUDA, because neither threads nor CUDA survive a fork.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from typing import Any

from pytest_trlcompat import _processes
from pytest_trlcompat.launch import import_variables, protocol
from pytest_trlcompat.launch.limits import explain

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve the client at ``descriptor`` until it closes its side."""
    # Before the first fork: what a rank leaves behind then becomes a child of this process, which ends it.
    _processes.adopt_orphans()
    client = socket.socket(fileno=descriptor)
    # It came here by pass_fds, so it is inheritable: a program that a rank starts would keep this end open, and the
    # test process would not learn that the server has died.
    client.set_inheritable(False)
    try:
        _serve(client, _prepare(protocol.receive(client), client))
    except (EOFError, ConnectionError):
        return


def _prepare(hello: dict[str, Any], client: socket.socket) -> dict[str, Any]:
    """Import the stack; return what this added to the path and the environment, which the ranks need too."""
    environment = dict(os.environ)
    # Entry by entry that of the test process; the one from the command line has absolute paths.
    sys.path[:] = hello["sys_path"]
    try:
        with import_variables.recorded() as read:
            # Before the stack, which looks for devices while it is imported.
            if hello["device"] == "software":
                from pytest_trlcompat import accelerator

                accelerator.activate(devices=hello["devices"])
            from pytest_trlcompat.launch.preload import preload

            _, seconds = preload(may_have_cuda=hello["device"] != "software", project_modules=hello["project_modules"])
    except Exception as error:
        protocol.send(client, {"kind": "refused", "error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    protocol.send(client, {"kind": "ready", "preloaded": seconds, "read": frozenset(read)})
    return {
        "extra_path": tuple(entry for entry in sys.path if entry not in hello["sys_path"]),
        "extra_environment": {key: value for key, value in os.environ.items() if environment.get(key) != value},
    }


def _serve(client: socket.socket, extra: dict[str, Any]) -> None:
    from pytest_trlcompat.launch.children import Cancelled, Refused, launch

    while True:
        spec = replace(protocol.receive(client), **extra)
        try:
            answer = {"kind": "done", "report": launch(spec, client)}
        except Cancelled:
            return
        except Refused as error:  # this launch fails, the next may succeed
            answer = {"kind": "refused", "error": str(error)}
        except OSError as error:  # what a launch has left could not be looked for; the next one does
            answer = {"kind": "refused", "error": explain(error)}
        protocol.send(client, answer)
