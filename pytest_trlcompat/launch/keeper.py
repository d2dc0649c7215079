"""Keeps one rank of a cold launch: ``python -m pytest_trlcompat.launch.keeper SOCKET``, started by a real launcher.

The keeper receives the launch over the socket and forks the rank, which then imports the stack. It reports how the rank
ended, so that the real cause of a rank's death is known, and not only what the launcher says about it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from pytest_trlcompat import _processes
from pytest_trlcompat.launch import children, protocol
from pytest_trlcompat.launch.messages import LaunchSpec, RankReport

__all__ = ["main"]


class _Stopped(BaseException):
    """The launcher's command stops this process."""


def main(path: str) -> int:
    """Keep a rank.

    Returns:
        An exit status for the launcher's command: 0 if the rank succeeded.
    """
    _processes.adopt_orphans()
    # Before anything else: the launcher's agent stops its processes so, and the rank must be ended and reported first.
    signal.signal(signal.SIGTERM, _stop)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        with protocol.short_path(Path(path)) as short:
            client.connect(short)
        # accelerate launch sets neither variable for a single process.
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        protocol.send(client, {"local_rank": rank, "world_size": int(os.environ.get("WORLD_SIZE", "1"))})
        try:
            spec = protocol.receive(client)["spec"]
            report = _keep(spec, rank, client)
        except EOFError:  # the client has gone
            return 1
        # The launcher may stop this process while it waits here; the report has been made.
        with contextlib.suppress(OSError, EOFError, _Stopped):
            protocol.send(client, report)
            # The exit of a failed rank makes the launcher end all others. So wait until the client has their reports.
            protocol.receive(client)
    return 0 if report.exit_status == 0 else 1


def _stop(number: int, frame: object) -> None:
    raise _Stopped


def _keep(spec: LaunchSpec, rank: int, client: socket.socket) -> RankReport:
    with contextlib.ExitStack() as stack:
        child = children.fork_rank(spec, rank, [client], children.output_files(spec, rank, stack), stack)
        try:
            _attend(child, client)
        except _Stopped:
            child.end("its launcher stopped it")
        except BaseException:
            child.end("the launch was cancelled")
            raise
        finally:
            children.reap(child, wait=True)
            children.end_orphans()
        return children.report(child)


def _attend(child: children.Child, client: socket.socket) -> None:
    """Receive from the rank, and follow the client's messages, until the rank has ended.

    Raises:
        EOFError: the client has gone.
    """
    with selectors.DefaultSelector() as selector:
        for source in (child.channel, child.pidfd, client):
            selector.register(source, selectors.EVENT_READ)
        while child.status is None:
            for key, _ in selector.select():
                if key.fileobj is client:
                    _handle(child, protocol.receive(client))
                elif not children.attend(child, key.fileobj):
                    selector.unregister(key.fileobj)
            # Keepers do not know of each other, so a cold rank is not kept open until the others have returned.
            if child.outcome is not None:
                child.release()


def _handle(child: children.Child, message: dict[str, Any]) -> None:
    if message["kind"] == "dump":
        children.dump_stacks([child])
    elif message["kind"] == "end":
        child.end(message["reason"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
