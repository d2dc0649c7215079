"""The software accelerator loads only when requested, with as many devices as requested, and on no real accelerator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import accelerator

from .accelerator_bodies import run_python


def test_importing_the_plugin_or_the_accelerator_loads_neither_torch_nor_the_device() -> None:
    code = "import sys, pytest_trlcompat.plugin, pytest_trlcompat.accelerator\n"
    code += "print({'torch', 'torch_npu'} & {*sys.modules})"
    assert run_python(code) == "set()"


def test_building_imports_no_torch() -> None:
    code = "import sys; from pytest_trlcompat import accelerator; accelerator.build(); print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_a_child_has_the_devices_of_its_environment() -> None:
    code = "import torch; print(torch.npu.device_count(), (torch.ones(1, device='npu:2') + 1).item())"
    assert run_python(code, **accelerator.environment(devices=3)) == "3 2.0"


ACTIVATE = """
from pytest_trlcompat import accelerator
try:
    accelerator.activate(devices=2)
    print("active")
except accelerator.AcceleratorError as error:
    print(error)
"""


def test_activating_twice_is_fine_but_for_another_number_of_devices() -> None:
    again = ACTIVATE.replace("devices=2", "devices=3")
    first, second, third = run_python(ACTIVATE + ACTIVATE + again).splitlines()
    assert (first, second) == ("active", "active")
    assert third.startswith("3 software accelerators were requested, but this process already has 2")


def test_activating_is_refused_where_torch_sees_a_real_accelerator() -> None:
    pretend = "import torch\ntorch.accelerator.is_available = lambda: True\n"
    pretend += "torch.accelerator.current_accelerator = lambda: torch.device('cuda')\n"
    found = run_python(pretend + ACTIVATE + "print(hasattr(torch, 'npu'))").splitlines()
    assert found[0].startswith("The software accelerator was requested, but torch sees a real one (cuda).")
    assert found[1] == "False"


def test_activating_is_refused_beside_a_torch_npu_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('must not be imported')\n")
    found = run_python(ACTIVATE, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert "this environment has a real torch_npu" in found


@pytest.mark.parametrize("count", ["0", "two"])
def test_a_wrong_number_of_devices_is_refused_when_the_device_loads(count: str) -> None:
    code = "import torch\ntry: import torch_npu\nexcept Exception as error: print(error)"
    environment = {**accelerator.environment(), "TRLCOMPAT_ACCELERATOR_DEVICES": count}
    found = run_python(code, **environment, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert f"TRLCOMPAT_ACCELERATOR_DEVICES must be a whole number from 1 to 127, not '{count}'" in found
