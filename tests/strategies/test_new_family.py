"""A new family of strategies is one file: whoever lists strategies then has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .new_family import copy_with_family


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = copy_with_family(tmp_path_factory.mktemp("copy"))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, str(Path(__file__).with_name("readers.py"))]
    answers: dict[str, Any] = json.loads(subprocess.check_output(words, cwd=folder, env=environment))
    return answers


def test_every_list_has_it(answers: dict[str, Any]) -> None:
    assert answers["names"] == ["single", "ddp", "mirrored", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
    assert answers["catalogue"] == answers["names"]
    assert "consider only this strategy (single, ddp, mirrored, zero1" in answers["doctor"]
    assert answers["marker"] == ["mirrored", "ddp"]
    assert answers["report"] == [1, 2, 3]


def test_it_is_launched_and_proved(answers: dict[str, Any]) -> None:
    assert answers["environment"] == {"ACCELERATE_MIRRORS": "2"}
    assert answers["cold"] == "MULTI_GPU"
    assert answers["engine"] == "ddp"
    assert answers["not proved"] == (
        "rank 1 did not run under strategy 'mirrored' as requested: no ddp engine was built (built: none); pass "
        "sharded=False if the function needs none"
    )


def test_what_it_needs_is_one_fact(answers: dict[str, Any]) -> None:
    assert answers["ranges"] == [[{"accelerate": "<1.1"}, "accelerate>=1.1"]]
    assert answers["absent"].startswith(
        "strategy 'mirrored' was requested, but this stack has accelerate 1.0.1: Accelerate mirrors nothing before. "
        "Use accelerate>=1.1, or another strategy (single, ddp, mirrored, zero1"
    )
