"""The warm servers of a launcher: which one a launch goes to, when one is started, and when one ends.

Runs in the test process.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pytest_trlcompat.launch import import_variables
from pytest_trlcompat.launch.measuring import is_measured
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec
from pytest_trlcompat.launch.result import LaunchWarning
from pytest_trlcompat.launch.warm import Refused, Server

__all__ = ["MAX_OTHER_SERVERS", "MAX_WORLD_SIZE", "Servers", "build_accelerator"]

MAX_WORLD_SIZE = 8
"""The most ranks on one machine."""
MAX_OTHER_SERVERS = 2
"""The most warm servers beside a device's own, of launches whose variables the imports of that one did not have."""

ServerKey: TypeAlias = "tuple[str, frozenset[tuple[str, str]]]"
"""A device, and the variables that a server's imports had otherwise than the device's own server."""


class Servers:
    """The servers that a launcher has started, in the order in which they were last used.

    Args:
        preload: modules that a server imports with the stack.
        environment: gives the variables of a device's own server.

    Attributes:
        preloaded: the seconds that importing each of them took, in the servers that were started.
    """

    def __init__(self, preload: Sequence[str], environment: Callable[[str], Mapping[str, str]]) -> None:
        self.preloaded: dict[str, float] = {}
        self._preload = tuple(preload)
        self._environment = environment
        self._servers: dict[ServerKey, Server] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def launch(self, spec: LaunchSpec, variables: Mapping[str, str]) -> LaunchReport:
        """Run a launch in the server whose imports have read these variables.

        Raises:
            LaunchError: the server could not be started, or refused the launch, or died.
        """
        key = self._key(spec.device, variables)
        try:
            return self._server(key, lambda: variables).launch(spec)
        # It has only declined this launch, and waits for the next.
        except Refused:
            raise
        # Also on Ctrl-C: the next launch would otherwise receive the report of this one.
        except BaseException:
            self._forget(key)
            raise

    def close(self) -> None:
        """End all and their ranks; a later launch starts a new one."""
        servers, self._servers = self._servers, {}
        with contextlib.ExitStack() as exits:
            for server in servers.values():
                exits.callback(server.stop)

    def _key(self, device: str, variables: Mapping[str, str]) -> ServerKey:
        """The server for a launch: the device's own, or one that imported the stack with other variables."""
        # Only a server's own imports tell which variables they read, so the device's own is started in any case.
        first = self._server((device, frozenset()), functools.partial(self._environment, device))
        return device, import_variables.differing(first.read, first.environment, variables)

    def _server(self, key: ServerKey, environment: Callable[[], Mapping[str, str]]) -> Server:
        device, others = key
        known = self._servers.get(key)
        if known is not None and known.death is not None:
            warnings.warn(
                f"the launch server {known.death} since the last launch; a new one is started", LaunchWarning, 4
            )
            self._forget(key)
        if key not in self._servers:
            build_accelerator(device)
            if others:
                self._make_room()
            # Lines that an import runs would not count as covered where it runs before ranks are measured.
            modules = ("coverage",) if is_measured() else self._preload
            self._servers[key] = server = Server(device, MAX_WORLD_SIZE, environment(), modules)
            self.preloaded |= {name: seconds for name, seconds in server.preloaded.items() if name in self._preload}
        # To the end, since the order is that of their last use, by which room is made.
        self._servers[key] = server = self._servers.pop(key)
        return server

    def _make_room(self) -> None:
        """End the least recently used of the servers with variables of their own."""
        others = [key for key in self._servers if key[1]]
        if len(others) >= MAX_OTHER_SERVERS:
            self._forget(others[0])

    def _forget(self, key: ServerKey) -> None:
        server = self._servers.pop(key, None)
        if server is not None:
            server.stop()


def build_accelerator(device: str) -> None:
    """Compile in the test process, so that its progress line is visible."""
    if device == "software":
        from pytest_trlcompat import accelerator

        accelerator.build()
