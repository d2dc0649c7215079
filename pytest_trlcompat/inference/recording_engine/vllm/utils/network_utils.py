"""``vllm.utils.network_utils``, where later releases of vLLM have it."""

from . import get_open_port

__all__ = ["get_open_port"]
