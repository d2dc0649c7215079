"""The environment variables with which vLLM runs inside a rank."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ON_CPU", "engine_environment"]

ON_CPU = "TRLCOMPAT_VLLM_ON_CPU"
"""Set to 1 in ranks whose engine runs on the CPU; elsewhere :mod:`.cpu_engine` changes nothing."""


def engine_environment(device: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Defaults for ranks on ``device``; empty where vLLM is not part of the stack.

    Args:
        device: ``software``, ``cpu`` or ``cuda``. With the first two the engine runs on the CPU.
    """
    if "vllm" not in versions:
        return {}
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if device == "cuda":
        return variables
    return {
        **variables,
        ON_CPU: "1",
        # GiB, of which a tiny model touches some MiB. Without it vLLM takes a share of the machine's whole memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The engine stays in the rank's own process: it ends with the rank, and suites read its weights.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Else some releases give each rank the cores of a NUMA node of its own, and end where there are fewer nodes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # It warns of each weight that it rounds to its own dtype.
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
