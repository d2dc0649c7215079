"""What launches run that look at their own sockets, from inside and as another user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def train_and_list(root: int) -> dict[str, Any]:
    """A training step, then the sockets that ``root`` and its descendants listen on while all ranks are connected.

    Returns:
        ``step``, what ``train_step`` returns; on rank 0 ``listeners``: kind, whether others are kept out, and a text
        for messages; and ``keepers``: of each socket of keepers whether others are kept out of its folder.
    """
    import tempfile
    from pathlib import Path

    import torch

    from tests.launch.listening import family, listeners, only_owner_enters
    from tests.stack.launch_bodies import train_step

    step = train_step()
    several = torch.distributed.is_initialized()
    found, keepers = [], []
    if several:
        torch.distributed.barrier()
    if step["rank"] == 0:
        found = [(each.kind, each.protected, str(each)) for each in listeners(family(root))]
        sockets = _sockets(Path(tempfile.gettempdir()).parent)
        keepers = [only_owner_enters(Path(each).parent) for each in sockets]
    if several:
        torch.distributed.barrier()
    return {"step": step, "listeners": found, "keepers": keepers}


def _sockets(folder: Any) -> list[str]:
    """Paths of the sockets of a launcher's launches."""
    return [str(path) for path in folder.glob("launch-*/*") if path.is_socket()]


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
    import os
    import tempfile
    from pathlib import Path

    from tests.launch.listening import family, listeners
    from tests.stranger import returned

    found = listeners(family(root))
    folder = Path(tempfile.gettempdir()).parent
    paths = _sockets(folder)
    files = [str(path) for path in folder.glob("launch-*/*") if path.is_file()]
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    ports = [each.port for each in found if each.kind == "tcp"]
    attempts = returned(lambda: _attempts(address, str(folder), files, paths, ports))
    counted = sum(Path(path).name.startswith("store-") for path in files)
    return {
        **attempts,
        "files": str(len(files)),
        "stores": str(counted),
        "keepers": str(len(paths)),
        "ports": str(len(ports)),
    }


def _attempts(
    address: tuple[str, int], folder: str, files: list[str], paths: list[str], ports: list[int]
) -> dict[str, str]:
    import os
    import socket
    import struct
    from functools import partial

    def connect(kind: int, to: object) -> socket.socket:
        one = socket.socket(kind)
        one.connect(to)  # type: ignore[arg-type]
        return one

    done = {
        "connect to the store's port": _attempt(partial(connect, socket.AF_INET, address)),
        "list the folder": _attempt(partial(os.listdir, folder)),
    }
    for at, path in enumerate(files):
        done[f"read file {at}"] = _attempt(partial(os.open, path, os.O_RDONLY))
        done[f"write file {at}"] = _attempt(partial(os.open, path, os.O_WRONLY | os.O_APPEND))
    for at, path in enumerate(paths):
        done[f"connect to keeper {at}"] = _attempt(partial(connect, socket.AF_UNIX, path))
    # gloo takes a connection of anybody; one that comes after the ranks' own must change nothing.
    for port in ports:
        for number in range(8):
            with connect(socket.AF_INET, ("127.0.0.1", port)) as late:
                late.sendall(struct.pack("=q", number) + b"\xff" * 64)
    return done


def be_impersonated(root: int) -> None:
    """Rank 0 waits for rank 1; meanwhile nobody connects to its gloo, as rank 1 would."""
    import os
    import socket
    import struct
    import time

    from tests.launch.listening import family, listeners
    from tests.stack.launch_bodies import meet
    from tests.stranger import become_stranger

    if os.environ["RANK"] == "1":
        ports: list[int] = []
        while not ports:
            ports = [each.port for each in listeners(family(root)) if each.kind == "tcp"]
        reading, writing = os.pipe()
        if os.fork() == 0:
            become_stranger()
            connections = [socket.socket() for _ in range(8)]
            for number, each in enumerate(connections):
                each.connect(("127.0.0.1", ports[0]))
                each.sendall(struct.pack("=q", number))
            os.write(writing, b"x")
            time.sleep(600)
        os.read(reading, 1)
    meet()


def files_others_try(root: int) -> dict[str, Any]:
    """While all ranks are connected, try as the user nobody to open whatever descendants of ``root`` write to.

    Returns:
        On rank 0 ``attempts``, what came of each attempt, by file and way, and ``listeners``: kind, whether others are
        kept out, and a text for messages.
    """
    import tempfile
    from pathlib import Path

    import torch

    from tests.launch.listening import family, listeners
    from tests.stack.launch_bodies import train_step

    step = train_step()
    attempts, found = {}, []
    torch.distributed.barrier()
    if step["rank"] == 0:
        left = [str(path) for path in Path(tempfile.gettempdir()).parent.glob("launch-*/*") if path.is_file()]
        held = _written_files([pid for pid in family(root) if pid != root])
        attempts = _open_as_nobody(sorted({*left, *held}))
        found = [(each.kind, each.protected, str(each)) for each in listeners(family(root))]
    torch.distributed.barrier()
    return {"attempts": attempts, "listeners": found}


def _written_files(pids: list[int]) -> list[str]:
    """Regular files that these processes have open to write, or mapped to share what they write, by their paths."""
    import contextlib
    import os
    import re
    from pathlib import Path

    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                flags = re.search(r"^flags:\s*(\d+)$", Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(), re.M)
                if flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    found.add(os.readlink(link))
            found |= set(re.findall(r"^\S+ rw.s (?:\S+ +){3}(/.*)$", Path(f"/proc/{pid}/maps").read_text(), re.M))
    return sorted(
        path for path in found if Path(path).is_file()
    )  # what was deleted has no path by which others find it


def _open_as_nobody(paths: list[str]) -> dict[str, str]:
    import os
    from functools import partial

    from tests.stranger import returned

    ways = {"read": os.O_RDONLY, "write": os.O_WRONLY | os.O_APPEND}
    return dict(
        returned(
            lambda: {
                f"{way} {path}": _attempt(partial(os.open, path, flags))
                for path in paths
                for way, flags in ways.items()
            }
        )
    )


def _attempt(action: Callable[[], object]) -> str:
    """The name of its error, or ``it worked``."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "it worked"
