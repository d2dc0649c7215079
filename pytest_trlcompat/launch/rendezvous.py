"""The rendezvous of a launch's ranks on several machines: a store that none of them hosts, so that it outlives each.

On one machine it is a file (:mod:`pytest_trlcompat.launch.store`). Runs in the warm server. Imports torch only
inside functions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

from pytest_trlcompat import _processes
from pytest_trlcompat.launch.messages import LaunchSpec

__all__ = ["rendezvous", "store_process"]

_BIND_TIMEOUT = 30.0
_OTHERS_TIMEOUT = 10.0

_hosts: dict[tuple[str, int], int] = {}
"""Process ids of the stores that this server runs for several machines, by address."""


@contextlib.contextmanager
def rendezvous(spec: LaunchSpec) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """Yield ``spec`` with the address of the ranks' store, and a function to call once they are forked.

    Every launch has its own store, on a port that the system chose and that is bound already. Machine 0 listens where
    the others can reach it, and sends them the port.
    """
    if spec.strategy == "single" or spec.cluster.address is None:
        yield spec, lambda: None
    else:
        with _across_machines(spec, spec.cluster.address) as found:
            yield found


def store_process() -> set[int]:
    """Children of this server that must outlive a launch."""
    return set(_hosts.values())


@contextlib.contextmanager
def _store(spec: LaunchSpec, host: str) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """Bind the socket before the fork, so that the ranks know the port; the store's thread starts after it, so that
    no thread is forked."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    stores = []
    try:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        yield _with_address(spec, host, port), lambda: stores.append(_serve(listener, (host, port), spec.timeout))
    finally:
        stores.clear()
        listener.close()


@contextlib.contextmanager
def _across_machines(spec: LaunchSpec, address: tuple[str, int]) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """Machine 0 publishes the launch's port in a store at the known address, which lasts as long as its server."""
    host, _ = address
    if spec.cluster.node_rank == 0:
        _host(address)
    lasting = _client(address, spec.timeout)
    if spec.cluster.node_rank != 0:
        found = _with_address(spec, host, int(lasting.get(f"port/{spec.number}")))
        try:
            yield found, lambda: None
        finally:
            lasting.add(f"done/{spec.number}", 1)
        return
    with _store(spec, host) as (found, serve):
        lasting.set(f"port/{spec.number}", found.rank_environment[0]["MASTER_PORT"])
        try:
            yield found, serve
        finally:
            lasting.add(f"done/{spec.number}", 1)
            _wait_for_others(lasting, f"done/{spec.number}", spec.cluster.nnodes)


def _wait_for_others(lasting: Any, key: str, nnodes: int) -> None:
    """Wait until the ranks of all machines no longer need the launch's store, or must have died."""
    deadline = time.monotonic() + _OTHERS_TIMEOUT
    while lasting.add(key, 0) < nnodes and time.monotonic() < deadline:
        time.sleep(0.02)


def _with_address(spec: LaunchSpec, host: str, port: int) -> LaunchSpec:
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return replace(spec, rank_environment=tuple({**variables, **address} for variables in spec.rank_environment))


def _serve(listener: socket.socket, address: tuple[str, int], timeout: float) -> Any:
    import torch
    from torch.distributed import TCPStore

    return TCPStore(
        *address,
        use_libuv=torch.__version__ >= (2, 8),  # before, it did not accept a listening socket
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def _client(address: tuple[str, int], timeout: float) -> Any:
    """Connect to machine 0, which may start later."""
    from torch.distributed import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def _host(address: tuple[str, int]) -> None:
    """Keep a store for the machines, in a process of its own: its threads must not be forked, and it serves every
    launch, since another machine may be at the next one already."""
    if address in _hosts:
        return
    listener = _bound(address)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _serve_forever(listener, address, parent)
    listener.close()
    _hosts[address] = pid


def _bound(address: tuple[str, int]) -> socket.socket:
    """Listen at this address of the machine only."""
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
            time.sleep(0.2)  # the store of a previous session may be about to end
        else:
            listener.listen(128)
            return listener


def _serve_forever(listener: socket.socket, address: tuple[str, int], parent: int) -> NoReturn:
    try:
        _processes.die_with_parent(parent)
        store = _serve(listener, address, timedelta(days=1).total_seconds())
        while store is not None:
            time.sleep(3600)
    except BaseException as error:
        print(f"the rendezvous store ended: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)
