"""Where the tests of the software accelerator run what uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from pytest_trlcompat.launch import Launcher


def beside_two_devices(launch: Launcher, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns in a process that has two devices, as each of two ranks has."""

    def joined() -> Any:
        import torch

        torch.distributed.init_process_group("hccl")
        return function(*args)

    return launch(joined, strategy="ddp", world_size=2, sharded=False).values[0]


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()
