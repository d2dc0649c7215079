"""The cures for Liger's losses on small bases: Liger is part of no cell of these tests.

An object that says it is of Liger's package stands for its loss. The suites of the cells that have Liger measure the
cures with the real one and TRL's trainers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher


class Loss:
    """Stands for one of ``liger_kernel.chunked_loss``."""


Loss.__module__ = "liger_kernel.stand_in"


def gradients_of_a_step(unwraps: bool, has_loss: bool, syncs: bool) -> list[float]:
    """Of one weight, after a step whose loss is the rank's number times it, on the model beneath DDP."""
    import os

    import torch
    from accelerate import Accelerator

    from pytest_trlcompat.trainers import DeepSpeedAccumulationMixin, LigerGradientsMixin

    class Beside:
        accelerator: Any
        model: Any
        use_liger_kernel: bool

        def training_step(self) -> None:
            self.compute_loss().backward()

        def compute_loss(self) -> Any:
            assert self.use_liger_kernel
            return self.accelerator.unwrap_model(self.model)(torch.ones(1, 1).to(self.accelerator.device)).sum() * rank

    class Through(Beside):
        def compute_loss(self) -> Any:
            return self.model(torch.ones(1, 1).to(self.accelerator.device)).sum() * rank

    rank = 1.0 + int(os.environ["RANK"])
    trainer = type("Mine", (DeepSpeedAccumulationMixin, LigerGradientsMixin, Beside if unwraps else Through), {})()
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False).to(accelerator.device)
    trainer.accelerator, trainer.model, trainer.use_liger_kernel = accelerator, model, True
    accelerator.gradient_state._set_sync_gradients(syncs)
    if has_loss:
        trainer.liger_loss = Loss()
    trainer.training_step()
    assert model.weight.grad is not None
    return [float(model.weight.grad)]


@pytest.mark.parametrize(
    ("unwraps", "has_loss", "syncs", "expected"),
    [
        pytest.param(True, True, True, [1.5, 1.5], id="averaged"),
        pytest.param(True, True, False, [1.0, 2.0], id="within_an_accumulation"),
        pytest.param(True, False, True, [1.0, 2.0], id="without_liger"),
        pytest.param(False, True, True, [1.0, 2.0], id="a_loss_that_unwraps_nothing"),
    ],
)
def test_gradients_beside_ddp_are_averaged(
    launcher: Launcher, unwraps: bool, has_loss: bool, syncs: bool, expected: list[float]
) -> None:
    result = launcher(gradients_of_a_step, unwraps, has_loss, syncs, strategy="ddp", world_size=2, sharded=False)
    assert [value[0] for value in result.values] == expected


def trainer_with(has_loss: bool, columns: list[str] | None = None, **args: Any) -> Any:
    from pytest_trlcompat.trainers import LigerSettingsMixin

    class Base:
        def __init__(self, args: Any, train_dataset: Any = None) -> None:
            self.args = args
            self.train_dataset = None if columns is None else SimpleNamespace(column_names=columns)
            self.aux_loss_enabled = getattr(args, "aux", False)
            if has_loss:
                self.liger_loss = Loss()

    kind = type("Mine", (LigerSettingsMixin, Base), {})
    return kind(SimpleNamespace(**args), SimpleNamespace(column_names=["prompt", "completion"]))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"use_weighting": True}, "use_weighting=True"),
        ({"ld_alpha": 0.5}, "ld_alpha=0.5"),
        ({"f_divergence_type": "js_divergence"}, "f_divergence_type='js_divergence'"),
        ({"f_divergence_type": SimpleNamespace(value="js_divergence")}, "f_divergence_type='js_divergence'"),
        ({"loss_type": ["sft", "robust"], "label_smoothing": 0.1}, "label_smoothing=0.1 of loss_type='robust'"),
        ({"aux": True}, "router_aux_loss_coef"),
    ],
)
def test_settings_that_ligers_loss_leaves_out_are_refused(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="would be left out, and TRL does not say so") as caught:
        trainer_with(True, **setting)
    assert named in str(caught.value)
    assert trainer_with(False, **setting).args


def test_settings_that_mean_nothing_else_are_kept() -> None:
    settings: dict[str, Any] = {
        "use_weighting": False,
        "ld_alpha": 1.0,
        "f_divergence_type": "reverse_kl",
        "loss_type": "robust",
    }
    assert trainer_with(True, label_smoothing=0.0, **settings).args


@pytest.mark.parametrize(
    ("columns", "only", "is_refused"),
    [
        (["input_ids"], None, True),
        (["input_ids"], True, True),
        (["input_ids"], False, False),
        (["input_ids", "completion_mask"], None, False),
        (["input_ids", "labels"], True, False),
        (["prompt", "completion"], True, False),  # not prepared
    ],
)
def test_a_dataset_that_loses_its_completions_is_refused(
    columns: list[str], only: bool | None, is_refused: bool
) -> None:
    settings = {"use_liger_kernel": True, "completion_only_loss": only}
    if not is_refused:
        assert trainer_with(False, columns, **settings).args
        return
    with pytest.raises(ValueError, match="that completions alone are trained on would be left out"):
        trainer_with(False, columns, **settings)
    assert trainer_with(False, columns, **{**settings, "use_liger_kernel": False}).args
