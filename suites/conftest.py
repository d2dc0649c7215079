"""What all suites share: the subject, and a tiny model that lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.launch import LaunchError

from . import grpo_measures

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
def sharp_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, with larger weights: its log-probabilities differ by one and more among tokens."""
    model = tiny_qwen2(initializer_range=0.2)
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def launch_once(launcher: Launcher) -> Callable[..., list[Any]]:
    """Launch a body, and return what its ranks returned; the same launch is made once for all suites that ask for it.

    Several known issues show in the numbers of one launch, and each has a suite of its own.
    """
    known: dict[str, list[Any] | LaunchError] = {}

    def launch(body: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        key = repr((body.__module__, body.__qualname__, args, settings))
        if key not in known:
            try:
                known[key] = list(launcher(body, *args, **settings).values)
            except LaunchError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, LaunchError):
            raise found
        return found

    return launch
