"""A torchvision that was built for CUDA can be imported beside a torch for CPUs; both are stand-ins here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.inference import torchvision_ops

ROOT = Path(__file__).resolve().parents[2]
TORCH = """
class version:
    cuda = {cuda!r}
class library:
    defined = []
    @classmethod
    def define(cls, name, schema):
        cls.defined.append(name)
"""
DESCRIBED = """
@torch.library.register_fake("torchvision::nms")
@register_meta("roi_align")
@torch.library.register_fake("torchvision::qnms")
"""
SEEN = "import torch, torchvision, torchvision; print(*torch.library.defined)"


@pytest.mark.parametrize(
    ("build", "cuda", "defined"),
    [
        ("0.28.0+cu130", None, "torchvision::nms torchvision::qnms"),
        ("0.28.0+cu130", "13.0", ""),  # its compiled part defines them
        ("0.28.0+cpu", None, ""),
        ("0.28.0", None, ""),
    ],
)
def test_operators_are_defined_where_the_compiled_part_cannot_be(
    build: str, cuda: str | None, defined: str, tmp_path: Path
) -> None:
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
    (folder / "__init__.py").write_text("")
    (folder / "version.py").write_text(f"__version__ = '{build}'\n")
    (folder / "_meta_registrations.py").write_text(DESCRIBED)
    torchvision_ops.install(tmp_path)
    assert seen(f"import site; site.addsitedir({str(tmp_path)!r}); {SEEN}", tmp_path) == defined


def test_it_is_looked_at_once_where_an_interpreter_reads_the_folder_twice(tmp_path: Path) -> None:
    torchvision_ops.install(tmp_path)
    twice = f"import site, sys; [site.addsitedir({str(tmp_path)!r}) or site.addsitedir({str(tmp_path)!r})]; "
    count = "print(sum(type(each).__name__ == '_Finder' for each in sys.meta_path))"
    assert seen(f"{twice}{count}", tmp_path) == "1"
    again = "sys.path.insert(0, '.'); import trlcompat_torchvision_ops as ops; ops.watch(); "
    assert seen(f"{twice}{again}{count}", tmp_path) == "1"


def test_without_torchvision_nothing_is_imported(tmp_path: Path) -> None:
    torchvision_ops.install(tmp_path)
    look = "import importlib.util, sys; print(importlib.util.find_spec('torchvision'), 'torch' in sys.modules)"
    assert seen(f"import site; site.addsitedir({str(tmp_path)!r}); {look}", tmp_path) == "None False"


def seen(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return result.stdout.strip()
