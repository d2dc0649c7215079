"""How the tests run pytest with the plugin, as a user does, with a stack that is not really there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "pytest_trlcompat.plugin"
STACK = {"torch": "2.13.0+cpu", "transformers": "4.48.3", "trl": "0.15.2", "accelerate": "1.4.0"}

Run = Callable[..., pytest.RunResult]
