"""Several machines: the same tests are started on each, as with ``torchrun``, and their launches connect."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SECRET_VARIABLE", "Cluster", "ClusterError"]

SECRET_VARIABLE = "TRLCOMPAT_RDZV_SECRET"
"""The environment variable of the secret: other users see command lines, and configuration files are committed."""

_SHORTEST_SECRET = 16


class ClusterError(ValueError):
    """Invalid settings of a cluster, or a world size that it cannot have."""


@dataclass(frozen=True)
class Cluster:
    """Which machine of how many this is, and the address of their rendezvous; the names are torchrun's.

    Every machine must run the same launches in the same order. A launch returns the results of this machine's ranks.

    Attributes:
        nnodes: number of machines.
        node_rank: number of this one, from 0.
        rdzv_endpoint: ``HOST:PORT`` of machine 0, reachable from every machine.
        secret: a text, the same on every machine, that a machine must know to take part. It does not protect or encrypt
            what the ranks exchange afterwards, so a private network is required, as for torchrun.

    Raises:
        ClusterError: the settings contradict each other.
    """

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ClusterError(f"nnodes must be at least 1, not {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ClusterError(f"node_rank must be 0 to {self.nnodes - 1}, not {self.node_rank}")
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise ClusterError(f"{self.nnodes} machines need rdzv_endpoint, the HOST:PORT of machine 0")
        if self.nnodes > 1 and len(self.secret or "") < _SHORTEST_SECRET:
            raise ClusterError(
                f"{self.nnodes} machines need a secret of {_SHORTEST_SECRET} characters or more, the same on each, as "
                f"{SECRET_VARIABLE}; make one by: python -c 'import secrets; print(secrets.token_hex())'"
            )
        if self.rdzv_endpoint is not None:
            _address(self.rdzv_endpoint)

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the rendezvous; ``None`` for a single machine, where the system chooses."""
        return None if self.nnodes == 1 or self.rdzv_endpoint is None else _address(self.rdzv_endpoint)

    def local_world_size(self, world_size: int) -> int:
        """Number of ranks on each machine.

        Raises:
            ClusterError: the ranks cannot be distributed evenly.
        """
        if world_size % self.nnodes:
            raise ClusterError(f"world_size={world_size} cannot be distributed evenly over {self.nnodes} machines")
        return world_size // self.nnodes


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ClusterError(f"rdzv_endpoint must be HOST:PORT, like 10.0.0.1:29400, not {endpoint!r}")
    # An IPv6 address stands in brackets, [::1]:29400, and sockets take it without.
    return host.strip("[]"), int(port)
