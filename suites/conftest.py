"""What all suites share: the subject, and a tiny model that lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from . import grpo_measures, sharing

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel


@pytest.fixture(params=["upstream", "corrected"])
def subject(request: pytest.FixtureRequest) -> str:
    """Whose trainer runs: TRL's own, or the corrected one of this package."""
    return str(request.param)


@pytest.fixture(scope="session")
def saved_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """A tiny Qwen2 whose folder was written by a rank, so that the test process imports no torch."""
    model = tiny_qwen2()
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def trained(
    tiny_qwen2: Callable[..., TinyModel], launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> sharing.Trainings:
    """One training per subject and strategy for all suites; weights large enough that each of them matters."""
    return sharing.Trainings(launcher, tiny_qwen2(initializer_range=0.1), tmp_path_factory.mktemp("trained"))
