"""The rendezvous of a launch's ranks on several machines: a store that none of them hosts, so that it outlives each.

On one machine it is a file (:mod:`pytest_trlcompat.launch.store`). Runs in the warm server.
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
from pytest_trlcompat.launch import meeting
from pytest_trlcompat.launch.messages import LaunchSpec

__all__ = ["rendezvous", "store_process"]

_BIND_TIMEOUT = 30.0
_OTHERS_TIMEOUT = 10.0

_hosts: dict[tuple[str, int], int] = {}
"""Process ids of the boards that this server runs for several machines, by address."""


@contextlib.contextmanager
def rendezvous(spec: LaunchSpec) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """Yield ``spec`` with the address of the ranks' store, and a function to call once they are forked.

    Every launch has its own store, on a port that the system has chosen and that is already bound. Machine 0 listens
    where the other machines can reach it, and tells the port to those that know the secret. The store itself asks for
    no secret.

    Raises:
        PermissionError: this machine's secret is not that of machine 0.
        TimeoutError: not all machines came within the launch's timeout; tells which were turned away.
    """
    if spec.strategy == "single" or spec.cluster.address is None:
        yield spec, lambda: None
    else:
        with _across_machines(spec, spec.cluster.address) as spec_and_serve:
            yield spec_and_serve


def store_process() -> set[int]:
    """Children of this server that must outlive a launch."""
    return set(_hosts.values())


@contextlib.contextmanager
def _store(spec: LaunchSpec, host: str) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """A store for the ranks of this launch, at a port that the system chooses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Holds the store, which ends with its last reference.
    stores = []
    try:
        # Before the fork, so that the ranks know the port.
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        # The store is made after the fork, since it has a thread, and a thread must not be forked.
        yield _with_address(spec, host, port), lambda: stores.append(_serve(listener, (host, port), spec.timeout))
    finally:
        stores.clear()
        # It still has its descriptor if no store was made of it.
        listener.close()


@contextlib.contextmanager
def _across_machines(spec: LaunchSpec, address: tuple[str, int]) -> Iterator[tuple[LaunchSpec, Callable[[], None]]]:
    """Machine 0 announces the launch's port on a board at the known address, which lasts as long as its server."""
    host, nnodes = address[0], spec.cluster.nnodes
    secret = str(spec.cluster.secret)
    if spec.cluster.node_rank == 0:
        _host(address, secret)
    board = meeting.Visitor(address, secret, spec.timeout)
    here, port, done = (f"{what}/{spec.number}" for what in ("here", "port", "done"))
    board.gather(here, nnodes)
    if spec.cluster.node_rank != 0:
        addressed = _with_address(spec, host, board.get(port))
        try:
            yield addressed, lambda: None
        finally:
            board.tell(done)
        return
    with _store(spec, host) as (addressed, serve):
        board.set(port, int(addressed.rank_environment[0]["MASTER_PORT"]))
        try:
            yield addressed, serve
        finally:
            # Machines that still need the launch's store by then must have died.
            with contextlib.suppress(TimeoutError):
                board.gather(done, nnodes, _OTHERS_TIMEOUT)


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
        # The ranks come later; waiting for them here would leave nobody to supervise them.
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def _host(address: tuple[str, int], secret: str) -> None:
    """Keep a board for the machines."""
    if address in _hosts:
        return
    listener = _bound(address)
    parent = os.getpid()
    # In a process of its own: its threads must not be forked with ranks, and it serves every launch, since another
    # machine may be at the next one already.
    pid = os.fork()
    if pid == 0:
        _serve_forever(listener, secret, parent)
    listener.close()
    _hosts[address] = pid


def _bound(address: tuple[str, int]) -> socket.socket:
    """Listen at this address of the machine only."""
    deadline = time.monotonic() + _BIND_TIMEOUT
    while True:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Closed connections of a session before would otherwise hold the address for a minute (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if time.monotonic() > deadline:
                raise OSError(f"machine 0 cannot listen at {address[0]}:{address[1]}: {error}") from error
            # The store of a previous session may be about to end.
            time.sleep(0.2)
        else:
            listener.listen(128)
            return listener


def _serve_forever(listener: socket.socket, secret: str, parent: int) -> NoReturn:
    try:
        _processes.die_with_parent(parent)
        meeting.Board(listener, secret).serve()
    except BaseException as error:
        print(f"the board of the machines ended: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)
