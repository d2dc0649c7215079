"""The software accelerator is loaded after torch, also where somebody asked before whether torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_trlcompat

_AUTOLOAD = Path(pytest_trlcompat.__file__).parent / "accelerator" / "autoload"


@pytest.mark.parametrize("look", ["", "importlib.util.find_spec('torch'); " * 2])
def test_a_look_for_torch_does_not_disarm_it(tmp_path: Path, look: str) -> None:
    for name in ("torch", "torch_npu"):
        (tmp_path / f"{name}.py").write_text(f"print('loaded {name}')\n")
    program = f"import importlib.util; {look}import torch; import torch"
    environment = {**os.environ, "PYTHONPATH": f"{_AUTOLOAD}{os.pathsep}{tmp_path}"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.stdout.split("\n"), result.returncode) == (["loaded torch", "loaded torch_npu", ""], 0)
