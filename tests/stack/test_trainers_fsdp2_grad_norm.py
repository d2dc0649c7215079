"""The cure of ``fsdp2-grad-norm``: whose norms it reduces, and when. What is logged: the issue's suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate")

from pytest_trlcompat.trainers.fsdp.fsdp2_grad_norm import FSDP2GradNormMixin  # noqa: E402 - needs the stack

Accelerator: Any = accelerate.Accelerator


class Norm:
    """As a ``DTensor`` of which each rank holds a part."""

    placements = (SimpleNamespace(is_partial=lambda: True),)

    def full_tensor(self) -> str:
        return "whole"


def accelerator_of(version: int) -> Any:
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    return object.__new__(type("Sharding", (Accelerator,), {"distributed_type": "FSDP", "state": state}))


@pytest.mark.parametrize(("version", "found"), [(2, "whole"), (1, Norm)])
def test_norms_of_its_own_accelerator_are_whole_while_it_trains(
    monkeypatch: pytest.MonkeyPatch, version: int, found: Any
) -> None:
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda self, parameters: Norm())
    other = accelerator_of(version)

    class Base:
        accelerator = accelerator_of(version)

        def train(self) -> Any:
            return self.accelerator.clip_grad_norm_([]), other.clip_grad_norm_([])

    class Mine(FSDP2GradNormMixin, Base):
        pass

    trainer = Mine()
    own, others = trainer.train()
    assert own == found or type(own) is found
    assert (type(others), type(trainer.accelerator.clip_grad_norm_([]))) == (Norm, Norm)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
