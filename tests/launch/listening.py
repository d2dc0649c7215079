"""Which sockets processes listen on, as the kernel lists them in ``/proc``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LISTEN = "0A"  # the state of a TCP socket that accepts connections
_UNCONNECTED = "07"  # that of a UDP socket that receives from anybody
_ACCEPTS = 0x10000  # the flag of a Unix socket that accepts connections
# Of netlink(7) and sock_diag(7).
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER, _REQUEST, _INODE = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x"), struct.Struct("=68xI")


@dataclass(frozen=True)
class Listener:
    """A socket that a process listens on.

    Attributes:
        kind: ``tcp``, ``tcp6``, ``udp``, ``udp6`` or ``unix``.
        address: of an IP socket; of a Unix socket its path, which begins with ``@`` where it is abstract.
        program: the arguments of the process, for messages.
        protected: whether nobody can connect who is on another machine or, to a Unix socket, another user.
    """

    kind: str
    address: str
    port: int
    pid: int
    program: str = field(compare=False)
    protected: bool

    def __str__(self) -> str:
        where = self.address if self.kind == "unix" else f"{self.address}:{self.port}"
        return f"{self.kind} {where} of process {self.pid} ({self.program})"


def listeners(pids: Sequence[int]) -> list[Listener]:
    """The sockets that these processes listen on; processes that have ended have none."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            owned = _sockets(pid)
            program = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-120:]
            for kind, inode, address, port in _open(pid):
                if inode in owned:
                    found.append(Listener(kind, address, port, pid, program, _protected(kind, address)))
    return found


def family(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


@contextlib.contextmanager
def watching(root: int) -> Iterator[set[Listener]]:
    """Yield a set to which every socket is added that ``root`` or a descendant listens on during the block.

    Processes are looked at only where the kernel's list has a socket that it did not have 5 ms before: to look at all
    of them each time takes a whole core. So it sees those of this process's own network, as launches have.
    """
    seen: set[Listener] = set()
    ended = threading.Event()

    def watch() -> None:
        before: set[str] = set()
        while not ended.wait(0.005):
            now = inodes()
            # In this order: whoever has a new socket was there when it was listed.
            if not now <= before:
                seen.update(listeners(family(root)))
            before = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


_KINDS = {"tcp": _LISTEN, "tcp6": _LISTEN, "udp": _UNCONNECTED, "udp6": _UNCONNECTED}


def inodes() -> set[str]:
    """The inodes of all sockets that are listened on where this process is."""
    with contextlib.suppress(OSError):  # no netlink in this kernel or container
        tcp = {*_tcp_inodes(socket.AF_INET), *_tcp_inodes(socket.AF_INET6)}
        return {*tcp, *(inode for _, inode, _, _ in _open(os.getpid(), ("udp", "udp6")))}
    return {inode for _, inode, _, _ in _open(os.getpid())}


def _tcp_inodes(family: int) -> Iterator[str]:
    """Those of TCP. For the list in ``/proc`` the kernel goes through all connections, which takes 2 ms each time."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << int(_LISTEN, 16))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            answer, start = kernel.recv(1 << 16), 0
            while start < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, start)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("sock_diag refused to list the sockets of TCP")
                yield str(_INODE.unpack_from(answer, start + _HEADER.size)[0])
                start += length + -length % 4


def _open(pid: int, kinds: Iterable[str] = tuple(_KINDS)) -> Iterator[tuple[str, str, str, int]]:
    """Kind, inode, address and port of all sockets that are listened on where this process is."""
    for kind in kinds:
        state = _KINDS[kind]
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                address, _, port = fields[1].partition(":")
                yield kind, fields[9], _ip(address), int(port, 16)
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _ACCEPTS:
            yield "unix", fields[6], fields[7] if len(fields) > 7 else "", 0


def _ip(text: str) -> str:
    """The kernel prints an address as words in the machine's own order of bytes."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _protected(kind: str, address: str) -> bool:
    if kind == "unix" and address.startswith("/proc/self/fd/"):
        return (
            True  # bound by a descriptor of its folder, since a path may be too long; tests look at the folder itself
        )
    if kind == "unix":
        return not address.startswith("@") and only_owner_enters(Path(address).parent)
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def only_owner_enters(folder: Path) -> bool:
    """Whether this folder, or one above it, can be entered by its owner alone."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError):
            if each.stat().st_mode & 0o011 == 0:
                return True
    return False
