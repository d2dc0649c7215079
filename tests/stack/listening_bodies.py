"""What launches run that look at their own sockets, from inside and as another user."""

from __future__ import annotations

from typing import Any


def train_and_list(root: int) -> dict[str, Any]:
    """A training step, then the sockets that ``root`` and its descendants listen on while all ranks are connected.

    Returns:
        ``losses``, and on rank 0 ``listeners``: kind, whether others are kept out, and a text for messages.
    """
    import torch

    from tests.launch.listening import family, listeners
    from tests.stack.launch_bodies import train_step

    step = train_step()
    several = torch.distributed.is_initialized()
    found = []
    if several:
        torch.distributed.barrier()
    if step["rank"] == 0:
        found = [(each.kind, each.protected, str(each)) for each in listeners(family(root))]
    if several:
        torch.distributed.barrier()
    return {"losses": step["losses"], "listeners": found}


def be_attacked(root: int) -> dict[str, Any]:
    """While all ranks are connected, try as the user nobody whatever reaches a launch from outside; then reduce.

    Returns:
        On rank 0 ``attempts``, what came of each attempt; on all ``sum``, an all-reduce of 1 to the world size.
    """
    import torch

    from tests.stack.launch_bodies import meet

    rank, device = meet()
    attempts = _attack(root) if rank == 0 else {}
    torch.distributed.barrier()
    value = torch.full((1,), float(rank + 1), device=device)
    torch.distributed.all_reduce(value)
    return {"sum": value.item(), "attempts": attempts}


def _attack(root: int) -> dict[str, str]:
    import json
    import os
    import pwd
    import tempfile
    from pathlib import Path

    from tests.launch.listening import family, listeners

    found = listeners(family(root))
    paths = [each.address for each in found if each.kind == "unix"]
    folder = Path(tempfile.gettempdir()).parent
    stores = [str(path) for path in folder.glob("launch-*/*")]
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    ports = [each.port for each in found if each.kind == "tcp"]
    nobody = pwd.getpwnam("nobody")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            os.write(writing, json.dumps(_attempts(address, str(folder), stores, paths, ports)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return {**json.loads(answer), "stores": str(len(stores)), "keepers": str(len(paths)), "ports": str(len(ports))}


def _attempts(
    address: tuple[str, int], folder: str, stores: list[str], paths: list[str], ports: list[int]
) -> dict[str, str]:
    import os
    import socket
    import struct
    from collections.abc import Callable
    from functools import partial

    def attempt(action: Callable[[], object]) -> str:
        try:
            action()
        except OSError as error:
            return type(error).__name__
        return "it worked"

    def connect(kind: int, to: object) -> socket.socket:
        one = socket.socket(kind)
        one.connect(to)  # type: ignore[arg-type]
        return one

    done = {
        "connect to the store's port": attempt(partial(connect, socket.AF_INET, address)),
        "list the folder": attempt(partial(os.listdir, folder)),
    }
    for at, path in enumerate(stores):
        done[f"read store {at}"] = attempt(partial(os.open, path, os.O_RDONLY))
        done[f"write store {at}"] = attempt(partial(os.open, path, os.O_WRONLY | os.O_APPEND))
    for at, path in enumerate(paths):
        done[f"connect to keeper {at}"] = attempt(partial(connect, socket.AF_UNIX, path))
    # gloo takes a connection of anybody; one that comes after the ranks' own must change nothing.
    for port in ports:
        for number in range(8):
            with connect(socket.AF_INET, ("127.0.0.1", port)) as late:
                late.sendall(struct.pack("=q", number) + b"\xff" * 64)
    return done


def be_impersonated(root: int) -> None:
    """Rank 0 waits for rank 1; meanwhile nobody connects to its gloo, as rank 1 would."""
    import os
    import pwd
    import socket
    import struct
    import time

    from tests.launch.listening import family, listeners
    from tests.stack.launch_bodies import meet

    if os.environ["RANK"] == "1":
        ports: list[int] = []
        while not ports:
            ports = [each.port for each in listeners(family(root)) if each.kind == "tcp"]
        nobody = pwd.getpwnam("nobody")
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            connections = [socket.socket() for _ in range(8)]
            for number, each in enumerate(connections):
                each.connect(("127.0.0.1", ports[0]))
                each.sendall(struct.pack("=q", number))
            os.write(writing, b"x")
            time.sleep(600)
        os.read(reading, 1)
    meet()
