"""Where the ranks of a launch meet: a store that none of them hosts, so that one which is done takes nothing away.

Runs in the warm server. Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn

from pytest_trlcompat import _processes

__all__ = ["rendezvous", "store_process"]

_LOOPBACK = "127.0.0.1"
_BIND_TIMEOUT = 30.0

_hosts: dict[tuple[str, int], int] = {}
"""Process ids of the stores that this server keeps for several machines, by address."""


@contextlib.contextmanager
def rendezvous(spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Tell the ranks of ``spec`` where to meet; what it yields is to be called once they are forked.

    On one machine that is a store on loopback, on a port that the system chose and nobody can take away. Several
    machines meet at the address that they were given.
    """
    address, node_rank, number = spec["cluster"]
    if spec["strategy"] == "single":
        yield lambda: None
    elif address is None:
        with _on_loopback(spec) as serve:
            yield serve
    else:
        if node_rank == 0:
            _host(tuple(address))
        _meet_at(spec, *address)
        for variables in spec["rank_environment"]:
            # Part of each key in the store: launches one after the other, and machines ahead of others, stay apart.
            variables["TORCHELASTIC_RESTART_COUNT"] = str(number)
        yield lambda: None


def store_process() -> set[int]:
    """Children of this server that must outlive a launch."""
    return set(_hosts.values())


def _meet_at(spec: Mapping[str, Any], host: str, port: int) -> None:
    for variables in spec["rank_environment"]:
        variables["MASTER_ADDR"], variables["MASTER_PORT"] = host, str(port)


@contextlib.contextmanager
def _on_loopback(spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """The socket is bound before the fork, so that the ranks know the port; the store's thread starts after it, so
    that no thread is forked."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    stores = []
    try:
        listener.bind((_LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        _meet_at(spec, _LOOPBACK, port)
        yield lambda: stores.append(_serve(listener, port, spec["timeout"]))
    finally:
        stores.clear()
        listener.close()


def _serve(listener: socket.socket, port: int, timeout: float) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def _host(address: tuple[str, int]) -> None:
    """Keep a store for the machines, in a process of its own: its threads must not be forked, and it serves every
    launch, since another machine may be at the next one already."""
    if address in _hosts:
        return
    listener = _bound(address)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _serve_for_ever(listener, address[1], parent)
    listener.close()
    _hosts[address] = pid


def _bound(address: tuple[str, int]) -> socket.socket:
    """Listen at the address itself and at no other of this machine."""
    deadline = time.monotonic() + _BIND_TIMEOUT
    while True:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if time.monotonic() > deadline:
                raise OSError(f"machine 0 cannot listen at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.2)  # the store of a session that has just ended
        else:
            listener.listen(128)
            return listener


def _serve_for_ever(listener: socket.socket, port: int, parent: int) -> NoReturn:
    try:
        _processes.die_with_parent(parent)
        kept = _serve(listener, port, timedelta(days=1).total_seconds())
        while kept is not None:
            time.sleep(3600)
    except BaseException as error:
        print(f"the store of the rendezvous ended: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)
