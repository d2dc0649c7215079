"""Which cluster is this user's: the one that a command starts is closed to others, and ``auto`` is no stranger's.

Whoever can reach a cluster of Ray runs code as the user whose cluster it is, and whoever has a cluster runs code in the
command that connects to it. Must not import ``ray``, which reads its variables when it is imported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["HOST", "address_of", "token_variables"]

HOST = "127.0.0.1"
"""Where the nodes of a cluster of this machine alone listen."""

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_LONGEST = 256
"""Characters of an address."""


def token_variables(options: RayOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which the cluster that a command starts asks for a secret, which nobody else knows.

    https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    if options.address is not None or _MODE in environ:
        return {}
    # Ray has tokens from 2.52 on. Its own way is to keep one in a file, which others may read, depending on the umask.
    return {_MODE: "token", _TOKEN: secrets.token_hex(32)}


def address_of(options: RayOptions, environ: Mapping[str, str]) -> str | None:
    """The address to connect to. For ``auto`` that of the cluster that this user, or root, has started here last.

    Raises:
        MatrixError: ``auto``, and there is no such cluster.
    """
    if options.address != "auto" or environ.get("RAY_ADDRESS"):
        return options.address
    # Ray would believe this file in a folder of all users, and without it connect to a cluster of whoever runs one.
    path = Path(environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    instead = "start one on this machine, or give --address HOST:PORT"
    try:
        # Neither a link, which leads to a file of another user's choice, nor a pipe, at which the command would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MatrixError(f"--address auto: {path} names no cluster of Ray ({error.strerror}); {instead}") from error
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        # Of the open file: at the path there may be another one by now.
        status = os.fstat(descriptor)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise MatrixError(
                f"--address auto: {path} belongs to the user with the id {status.st_uid} (mode "
                f"{status.st_mode & 0o7777:04o}), who would decide to which cluster this command connects; {instead}"
            )
        return file.read(_LONGEST).strip()
