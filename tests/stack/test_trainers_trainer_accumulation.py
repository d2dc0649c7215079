"""The cure of ``trainer-accumulation``: gradients of any trainer, divided once where a release divides twice."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from accelerate.utils import DistributedType  # noqa: E402 - part of the stack

from pytest_trlcompat.trainers import CureError  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.loss.trainer_accumulation import TrainerAccumulationMixin  # noqa: E402 - needs the stack

from .test_trainers_gradient_accumulation import STEPS, Trainer448, Trainer449  # noqa: E402 - needs the stack

DATA = (1.0, 2.0, 4.0, 9.0)
MEAN = 4.0
WITHOUT_DEEPSPEED, WITH_DEEPSPEED = DistributedType.NO, DistributedType.DEEPSPEED


class Trainer52(Trainer449):
    """``Trainer.training_step`` of 5.2.0 to 5.5.3: a loss that takes the number of items is not divided by it."""

    accelerator_steps = STEPS
    model_accepts_loss_kwargs = True
    compute_loss_func: Any = None

    def training_step(  # type: ignore[override]
        self, model: Any, data: float, num_items_in_batch: int | None = None
    ) -> Any:
        loss = self.compute_loss(data, num_items_in_batch)
        if num_items_in_batch is None or not (self.model_accepts_loss_kwargs or self.compute_loss_func):
            loss = loss / STEPS
        self.accelerator.backward(loss, scale_wrt_gas=False)
        return loss.detach()

    def compute_loss(self, data: float, items: int | None = None) -> Any:
        return self.weight * data / (items or 1)


Trainer52.__module__ = "transformers.trainer"


class OfNoItems(Trainer52):
    """One that says that its loss is a mean, as TRL's do."""

    model_accepts_loss_kwargs = False


class OfOwnLoss(Trainer52):
    """Its loss is a mean, and it does not say so."""

    def compute_loss(self, data: float, items: int | None = None) -> Any:
        return self.weight * data


class GoesOn(Trainer52):
    def compute_loss(self, data: float, items: int | None = None) -> Any:
        return super().compute_loss(data, items)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda version: monkeypatch.setattr(transformers, "__version__", version)


def gradient(kind: type, *step: Any, distributed_type: Any = WITHOUT_DEEPSPEED) -> tuple[float, float, Any]:
    """After a step over :data:`DATA`: upstream's, that of the corrected trainer, and what this says of itself."""
    trainers = [kind(distributed_type), type("Corrected", (TrainerAccumulationMixin, kind), {})(distributed_type)]
    for trainer in trainers:
        for each in DATA:
            trainer.training_step(*(each if one is DATA else one for one in step))
    upstream, ours = (trainer.weight.grad.item() for trainer in trainers)
    return upstream, ours, TrainerAccumulationMixin._activity(type(trainers[1]), trainers[1])


@pytest.mark.parametrize("version", ["5.2.0", "5.5.3"])
@pytest.mark.parametrize(
    ("kind", "items", "right"),
    [
        (Trainer52, None, MEAN),
        (OfNoItems, None, MEAN),
        (OfNoItems, STEPS, MEAN / STEPS),  # its loss divides by itself, and Trainer again, in every release
        (Trainer52, STEPS, MEAN),
        (GoesOn, STEPS, MEAN),
    ],
)
def test_accelerate_divides_again(kind: type, items: int | None, right: float, version: str, release: Any) -> None:
    release(version)
    upstream, ours, activity = gradient(kind, None, DATA, items)
    assert (upstream, ours) == pytest.approx((right / STEPS, right))
    assert (activity.active, activity.reason) == (True, "the loss is multiplied by 4, so that it is divided once")


def test_a_loss_that_takes_no_items_and_does_not_say_so_is_left_alone(release: Any) -> None:
    release("5.4.0")
    upstream, ours, _ = gradient(OfOwnLoss, None, DATA, STEPS)
    assert upstream == ours == MEAN


@pytest.mark.parametrize("version", ["5.1.0", "5.5.4", "4.49.0", "4.47.1"])
def test_other_releases_are_left_alone(version: str, release: Any) -> None:
    release(version)
    upstream, ours, activity = gradient(OfNoItems, None, DATA)
    assert upstream == ours
    assert activity.active is False
    assert TrainerAccumulationMixin._activity(OfNoItems, None).active is False


@pytest.mark.parametrize(("version", "factor"), [("4.48.3", STEPS), ("4.49.0", 1)])
def test_deepspeed_divides_again(version: str, factor: int, release: Any) -> None:
    release(version)
    kind = Trainer448 if factor > 1 else Trainer449
    upstream, ours, activity = gradient(kind, DATA, distributed_type=WITH_DEEPSPEED)
    assert (upstream, ours) == pytest.approx((MEAN / factor, MEAN))
    assert activity.active is (factor > 1)


@pytest.mark.parametrize(("version", "distributed_type"), [("4.48.3", WITHOUT_DEEPSPEED), ("5.4.0", WITH_DEEPSPEED)])
def test_what_does_not_divide_again_is_left_alone(version: str, distributed_type: Any, release: Any) -> None:
    release(version)
    kind = Trainer448 if version < "5" else Trainer449
    upstream, ours, activity = gradient(kind, DATA, distributed_type=distributed_type)
    assert upstream == ours == MEAN
    assert activity.active is False


def test_of_a_class_it_is_said_where_it_may_act(release: Any) -> None:
    release("5.3.0")
    activity = TrainerAccumulationMixin._activity(OfNoItems, None)
    assert (activity.active, "without DeepSpeed" in activity.reason) == (None, True)
    release("4.48.0")
    assert "with DeepSpeed" in TrainerAccumulationMixin._activity(OfNoItems, None).reason


def test_what_cannot_be_seen_is_refused_by_its_own_name(release: Any) -> None:
    release("5.4.0")

    class Scales(OfNoItems):
        def training_step(  # type: ignore[override]
            self, model: Any, data: float, num_items_in_batch: int | None = None
        ) -> Any:
            self.accelerator.backward(self.compute_loss(data) * 0.7)

    trainer = type("Corrected", (TrainerAccumulationMixin, Scales), {})()
    with pytest.raises(CureError, match="^TrainerAccumulationMixin with transformers ") as caught:
        trainer.training_step(None, 1.0)
    assert "without=['TrainerAccumulationMixin']" in str(caught.value)


class Trainer450(Trainer52):
    """``Trainer.training_step`` from 4.48 on, as far as it divides; Accelerate does not."""

    accelerator_steps = 1

    def training_step(  # type: ignore[override]
        self, model: Any, data: float, num_items_in_batch: int | None = None
    ) -> Any:
        compute: Any = self.compute_loss
        loss = compute(data, num_items_in_batch=num_items_in_batch)
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func):
            loss = loss / STEPS
        self.accelerator.backward(loss, scale_wrt_gas=False)
        return loss.detach()


class Trainer446(Trainer450):
    """That of 4.46 and 4.47: it divides what it logs alone."""

    def training_step(  # type: ignore[override]
        self, model: Any, data: float, num_items_in_batch: int | None = None
    ) -> Any:
        compute: Any = self.compute_loss
        loss = compute(data, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach() / STEPS


Trainer450.__module__ = Trainer446.__module__ = "transformers.trainer"


class MeanOfTRL:
    """A loss of TRL's as ORPO's until 0.18: a mean, whatever the number of items."""

    weight: Any

    def compute_loss(self, data: float, num_items_in_batch: int | None = None) -> Any:
        return self.weight * data


class ShareOfTRL(MeanOfTRL):
    """One as SFT's: the sum over the items, divided by their number in the step."""

    def compute_loss(self, data: float, num_items_in_batch: int | None = None) -> Any:
        return self.weight * data / (num_items_in_batch or 1)


MeanOfTRL.__module__ = ShareOfTRL.__module__ = "trl.trainer.orpo_trainer"


class SaysSo(MeanOfTRL):
    model_accepts_loss_kwargs = False


class Weighted(MeanOfTRL):
    """A user's, around TRL's."""

    def compute_loss(self, data: float, num_items_in_batch: int | None = None) -> Any:
        return 2.0 * super().compute_loss(data, num_items_in_batch)


class Divides(MeanOfTRL):
    """A user's who knows that nobody divides."""

    args: Any

    def compute_loss(self, data: float, num_items_in_batch: int | None = None) -> Any:
        return super().compute_loss(data) / self.args.gradient_accumulation_steps


def step_of(loss: type, base: type, distributed_type: Any = WITHOUT_DEEPSPEED) -> Any:
    """Gradients and logged losses after a step over :data:`DATA`, upstream's first, and the corrected trainer."""
    trainers = [
        type("Upstream", (loss, base), {})(distributed_type),
        type("Corrected", (TrainerAccumulationMixin, loss, base), {})(distributed_type),
    ]
    logged = [sum(trainer.training_step(None, one, STEPS).item() for one in DATA) for trainer in trainers]
    return [trainer.weight.grad.item() for trainer in trainers], logged, trainers[1]


@pytest.mark.parametrize("distributed_type", [WITHOUT_DEEPSPEED, WITH_DEEPSPEED])
@pytest.mark.parametrize(
    ("loss", "base", "version", "gradients", "logged"),
    [
        (MeanOfTRL, Trainer450, "4.50.3", (STEPS * MEAN, MEAN), (STEPS * MEAN, MEAN)),
        (Weighted, Trainer450, "4.50.3", (STEPS * 2 * MEAN, 2 * MEAN), (STEPS * 2 * MEAN, 2 * MEAN)),
        (SaysSo, Trainer450, "4.50.3", (MEAN, MEAN), (MEAN, MEAN)),
        (ShareOfTRL, Trainer450, "4.50.3", (MEAN, MEAN), (MEAN, MEAN)),
    ],
)
def test_a_mean_of_trls_is_divided_where_nobody_does(
    loss: type, base: type, version: str, gradients: Any, logged: Any, distributed_type: Any, release: Any
) -> None:
    release(version)
    assert step_of(loss, base, distributed_type)[:2] == (pytest.approx(gradients), pytest.approx(logged))


@pytest.mark.parametrize("loss", [MeanOfTRL, SaysSo])
def test_before_it_divides_what_it_logs_alone(loss: type, release: Any) -> None:
    release("4.46.3")
    assert step_of(loss, Trainer446)[:2] == (pytest.approx((STEPS * MEAN, MEAN)), pytest.approx((MEAN, MEAN)))


def test_it_says_that_it_divides(release: Any) -> None:
    release("4.50.3")
    _, _, trainer = step_of(MeanOfTRL, Trainer450)
    activity = TrainerAccumulationMixin._activity(type(trainer), trainer)
    assert (activity.active, activity.reason) == (True, "the loss is multiplied by 0.25, so that it is divided once")
    of_class = TrainerAccumulationMixin._activity(type("Upstream", (MeanOfTRL, Trainer450), {}), None)
    assert (of_class.active, "may leave a mean undivided" in of_class.reason) == (None, True)
    assert TrainerAccumulationMixin._activity(type("Share", (ShareOfTRL, Trainer450), {}), None).active is False


def test_a_user_who_may_divide_already_is_asked(release: Any) -> None:
    release("4.50.3")
    with pytest.raises(CureError, match="gradient_accumulation_steps, by which TRL's does not divide"):
        step_of(Divides, Trainer450)


def test_a_trainer_that_goes_backward_by_itself_is_left_alone(release: Any) -> None:
    release("4.50.3")

    class GoesBackward(MeanOfTRL):
        """As online DPO does."""

        accelerator: Any

        def training_step(self, model: Any, data: float, num_items_in_batch: int | None = None) -> Any:
            self.accelerator.backward(self.weight * data / STEPS)
            return self.weight.detach() * data / STEPS

    GoesBackward.__module__ = "trl.trainer.online_dpo_trainer"
    assert step_of(GoesBackward, Trainer450)[:2] == ([MEAN, MEAN], [MEAN, MEAN])
