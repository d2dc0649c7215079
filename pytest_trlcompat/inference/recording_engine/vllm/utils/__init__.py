"""``vllm.utils``."""

import socket

__all__ = ["get_open_port"]


def get_open_port() -> int:
    """A port that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
