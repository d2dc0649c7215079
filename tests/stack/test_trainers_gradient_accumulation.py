"""The cure of ``grpo-gradient-accumulation``: one division, whoever else divides, and else nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from accelerate.utils import DistributedType  # noqa: E402 - part of the stack

from pytest_trlcompat.trainers import gradient_accumulation  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.gradient_accumulation import GradientAccumulationMixin  # noqa: E402 - needs the stack

STEPS = 4


class Trainer:
    """``Trainer.training_step`` and DeepSpeed's ``backward`` as far as they divide; the loss is weight times data."""

    divides_before_backward = False
    divides_report = False
    accelerator_steps = 1
    """Of how many micro-batches Accelerate knows, by which it divides unless DeepSpeed goes backward."""

    def __init__(self, distributed_type: Any = DistributedType.NO) -> None:
        self.args = SimpleNamespace(gradient_accumulation_steps=STEPS)
        self.accelerator = SimpleNamespace(
            distributed_type=distributed_type, no_sync="upstream", gradient_accumulation_steps=self.accelerator_steps
        )
        self.weight = torch.ones((), requires_grad=True)

    def create_accelerator_and_postprocess(self) -> None:
        pass

    def compute_loss(self, data: float) -> Any:
        return self.weight * data

    def training_step(self, data: float) -> Any:
        loss = self.compute_loss(data)
        if self.divides_before_backward:
            loss = loss / STEPS
        by_engine = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        (loss / STEPS if by_engine else loss / self.accelerator.gradient_accumulation_steps).backward()
        return loss.detach() / STEPS if self.divides_report else loss.detach()


class Trainer446(Trainer):
    divides_report = True


class Trainer448(Trainer):
    divides_before_backward = True


class Trainer52(Trainer448):
    """That of 5.2.0 to 5.5.3."""

    accelerator_steps = STEPS


def corrected(kind: type[Trainer], *args: Any) -> Any:
    return type("Corrected", (GradientAccumulationMixin, kind), {})(*args)


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the version of Transformers, and have its Trainer say nothing to DeepSpeed, as before 4.49."""

    def set_version(text: str) -> None:
        monkeypatch.setattr(transformers, "__version__", text)
        monkeypatch.setattr(gradient_accumulation, "_tells_deepspeed_not_to_divide", lambda _: False)

    return set_version


@pytest.mark.parametrize(
    ("kind", "text", "distributed_type", "upstream_scale"),
    [
        (Trainer446, "4.46.3", DistributedType.NO, STEPS),
        (Trainer446, "4.47.1", DistributedType.MULTI_GPU, STEPS),
        (Trainer446, "4.47.1", DistributedType.DEEPSPEED, 1),
        (Trainer448, "4.48.0", DistributedType.NO, 1),
        (Trainer448, "4.48.3", DistributedType.DEEPSPEED, 1 / STEPS),
    ],
)
def test_the_gradient_is_the_mean_and_the_report_stays(
    version: Any, kind: type[Trainer], text: str, distributed_type: Any, upstream_scale: float
) -> None:
    version(text)
    data = [1.0, 2.0, 4.0, 9.0]
    upstream, ours = kind(distributed_type), corrected(kind, distributed_type)
    reported = [sum(trainer.training_step(one).item() for one in data) for trainer in (upstream, ours)]
    assert upstream.weight.grad.item() == 4.0 * upstream_scale
    assert ours.weight.grad.item() == 4.0
    assert reported == [4.0, 4.0]


def test_a_loss_outside_of_training_is_left_alone(version: Any) -> None:
    version("4.46.3")
    trainer = corrected(Trainer446)
    assert trainer.compute_loss(3.0).item() == 3.0
    trainer.training_step(3.0)
    assert trainer.compute_loss(3.0).item() == 3.0


def test_a_failure_leaves_no_factor_behind(version: Any) -> None:
    version("4.46.3")
    trainer = corrected(Trainer446)
    trainer.weight = None
    with pytest.raises(TypeError):
        trainer.training_step(1.0)
    assert trainer._loss_factor == 1.0


@pytest.mark.parametrize(
    ("text", "distributed_type", "replaced"),
    [
        ("4.46.3", DistributedType.DEEPSPEED, True),
        ("4.46.3", DistributedType.MULTI_GPU, False),
        ("4.47.0", DistributedType.DEEPSPEED, False),
    ],
)
def test_no_sync_is_not_entered_under_deepspeed(version: Any, text: str, distributed_type: Any, replaced: bool) -> None:
    version(text)
    trainer = corrected(Trainer446, distributed_type)
    trainer.create_accelerator_and_postprocess()
    assert (trainer.accelerator.no_sync != "upstream") is replaced
    if replaced:
        with trainer.accelerator.no_sync(model=None):
            pass


def test_accelerate_does_not_divide_once_more(version: Any) -> None:
    version("5.2.0")
    for trainer, gradient in ((Trainer52(), 3.0 / STEPS**2), (corrected(Trainer52), 3.0 / STEPS)):
        trainer.create_accelerator_and_postprocess()
        trainer.training_step(3.0)
        assert trainer.weight.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("distributed_type", [DistributedType.NO, DistributedType.DEEPSPEED])
def test_the_installed_trainer_divides_once(distributed_type: Any) -> None:
    # Fails when Trainer no longer names scale_wrt_gas: the cure would then think that DeepSpeed divides as well.
    trainer = corrected(Trainer448, distributed_type)
    assert trainer._missing_factor() == 1.0
