"""A family of strategies that this package does not have: a copy of the package with one more file has it."""

from __future__ import annotations

from pathlib import Path

import pytest_trlcompat
from tests.copies import copy_with_bytecode

__all__ = ["MODULE", "copy_with_family"]

MODULE = """
from pytest_trlcompat.strategies.ddp import DDP
from pytest_trlcompat.strategies.family import Need


class Mirrored(DDP):
    names = ("mirrored",)
    position = 25
    packages = ("peft",)
    needs = (Need("accelerate", "1.1", "Accelerate mirrors nothing before"),)

    def variables(self, name, settings, folder):
        return {"ACCELERATE_MIRRORS": "2"}
"""


def copy_with_family(folder: Path) -> Path:
    """Copy the package into ``folder`` and add the module to its strategies; returns what belongs on ``sys.path``."""
    package = Path(pytest_trlcompat.__file__).parent
    copy_with_bytecode(package, folder / package.name)
    (folder / package.name / "strategies" / "mirrored.py").write_text(MODULE)
    return folder
