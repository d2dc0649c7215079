"""The cure of ``grpo-gradient-accumulation``: one division, whoever else divides, and else nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from accelerate.utils import DistributedType  # noqa: E402 - part of the stack

from pytest_trlcompat.trainers import CureError  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.loss.gradient_accumulation import GradientAccumulationMixin  # noqa: E402 - needs the stack

STEPS = 4


class Engine:
    """A DeepSpeed engine as far as it divides."""

    def gradient_accumulation_steps(self) -> int:
        return STEPS

    def backward(self, loss: Any, scale_wrt_gas: bool = True) -> None:
        (loss / STEPS if scale_wrt_gas else loss).backward()


class Accelerator:
    """Accelerate's ``backward`` as far as it divides."""

    def __init__(self, distributed_type: Any, steps: int) -> None:
        self.distributed_type = distributed_type
        self.gradient_accumulation_steps = steps
        self.no_sync = "upstream"
        self.deepspeed_engine_wrapped = SimpleNamespace(engine=Engine())

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if self.distributed_type == DistributedType.DEEPSPEED:
            self.deepspeed_engine_wrapped.engine.backward(loss, **kwargs)
        else:
            (loss / self.gradient_accumulation_steps).backward()


class Trainer:
    """``Trainer.training_step`` as far as it divides; the loss is weight times data."""

    divides_before_backward = False
    divides_report = False
    tells_deepspeed = False
    accelerator_steps = 1
    """Of how many micro-batches Accelerate knows, by which it divides unless DeepSpeed goes backward."""

    def __init__(self, distributed_type: Any = DistributedType.NO) -> None:
        self.args = SimpleNamespace(gradient_accumulation_steps=STEPS)
        self.accelerator = Accelerator(distributed_type, self.accelerator_steps)
        self.weight = torch.ones((), requires_grad=True)

    def create_accelerator_and_postprocess(self) -> None:
        pass

    def compute_loss(self, data: float) -> Any:
        return self.weight * data

    def training_step(self, data: float) -> Any:
        loss = self.compute_loss(data)
        if self.divides_before_backward:
            loss = loss / STEPS
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.tells_deepspeed else {}))
        return loss.detach() / STEPS if self.divides_report else loss.detach()


class Trainer446(Trainer):
    divides_report = True


class Trainer448(Trainer):
    divides_before_backward = True


class Trainer449(Trainer448):
    tells_deepspeed = True


class Trainer52(Trainer449):
    """That of 5.2.0 to 5.5.3."""

    accelerator_steps = STEPS


def corrected(kind: type[Trainer], *args: Any) -> Any:
    bases = (kind,) if issubclass(kind, GradientAccumulationMixin) else (GradientAccumulationMixin, kind)
    return type("Corrected", bases, {})(*args)


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the version of Transformers."""
    return lambda text: monkeypatch.setattr(transformers, "__version__", text)


@pytest.mark.parametrize(
    ("kind", "distributed_type", "upstream_scale", "factor"),
    [
        (Trainer446, DistributedType.NO, STEPS, 1 / STEPS),
        (Trainer446, DistributedType.MULTI_GPU, STEPS, 1 / STEPS),
        (Trainer446, DistributedType.DEEPSPEED, 1, 1),
        (Trainer448, DistributedType.NO, 1, 1),
        (Trainer448, DistributedType.DEEPSPEED, 1 / STEPS, STEPS),
        (Trainer449, DistributedType.DEEPSPEED, 1, 1),
    ],
)
def test_the_gradient_is_the_mean_and_the_report_stays(
    kind: type[Trainer], distributed_type: Any, upstream_scale: float, factor: float
) -> None:
    data = [1.0, 2.0, 4.0, 9.0]
    upstream, ours = kind(distributed_type), corrected(kind, distributed_type)
    reported = [sum(trainer.training_step(one).item() for one in data) for trainer in (upstream, ours)]
    assert upstream.weight.grad.item() == 4.0 * upstream_scale
    assert ours.weight.grad.item() == 4.0
    assert reported[0] == reported[1]
    activity = GradientAccumulationMixin._activity(type(ours), ours)
    assert activity.active is (factor != 1)
    assert (f"multiplied by {factor:g}" in activity.reason) is (factor != 1)


def test_a_training_step_that_somebody_has_wrapped_is_seen_through() -> None:
    """Without functools.wraps, so that its code says nothing: what is called says everything."""

    class Timed(Trainer449):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return step(self, *args, **kwargs)

    step: Any = Trainer449.training_step
    trainer = corrected(Timed, DistributedType.DEEPSPEED)
    for one in (1.0, 2.0, 4.0, 9.0):
        trainer.training_step(one)
    assert trainer.weight.grad.item() == 4.0


def test_a_training_step_that_divides_by_itself_under_deepspeed_is_divided_once() -> None:
    class Own(Trainer):
        def training_step(self, data: float) -> Any:
            loss = self.compute_loss(data) / STEPS
            self.accelerator.backward(loss)  # DeepSpeed divides as well
            return loss.detach()

    trainer = corrected(Own, DistributedType.DEEPSPEED)
    trainer.training_step(3.0)
    assert trainer.weight.grad.item() == 3.0 / STEPS


def test_a_loss_that_trl_has_divided_is_not_divided_again() -> None:
    class Divides(Trainer):
        current_gradient_accumulation_steps = STEPS

        def compute_loss(self, data: float) -> Any:
            return self.weight * data / self.current_gradient_accumulation_steps

    class Tells(Divides):
        tells_deepspeed = True

    for kind, distributed_type in (
        (Divides, DistributedType.NO),
        (Divides, DistributedType.DEEPSPEED),
        (Tells, DistributedType.DEEPSPEED),
    ):
        trainer = corrected(kind, distributed_type)
        trainer.training_step(3.0)
        assert trainer.weight.grad.item() == 3.0 / STEPS


def test_a_term_that_a_users_step_adds_counts_as_well() -> None:
    class Regularised(Trainer446):
        def training_step(self, data: float) -> Any:
            loss = self.compute_loss(data) + 2 * self.weight
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = corrected(Regularised)
    trainer.training_step(3.0)
    assert trainer.weight.grad.item() == 5.0 / STEPS


class Logs(Trainer448):
    current_gradient_accumulation_steps = STEPS

    def log(self) -> int:
        return self.current_gradient_accumulation_steps


class Scales(Trainer448):
    def compute_loss(self, data: float) -> Any:
        return super().compute_loss(data) / STEPS


class Replaces(Trainer448):
    def compute_loss(self, data: float) -> Any:
        return 0.7 * self.weight * data


class ScalesInFront(GradientAccumulationMixin, Trainer448):
    def compute_loss(self, data: float) -> Any:
        return super().compute_loss(data) / STEPS


@pytest.mark.parametrize(
    ("kind", "scale"), [(Logs, 1), (Scales, 1 / STEPS), (Replaces, 0.7), (ScalesInFront, 1 / STEPS)]
)
@pytest.mark.parametrize("distributed_type", [DistributedType.NO, DistributedType.DEEPSPEED])
def test_what_a_user_makes_of_the_loss_stays(kind: type[Trainer], scale: float, distributed_type: Any) -> None:
    trainer = corrected(kind, distributed_type)
    for one in (1.0, 2.0, 4.0, 9.0):
        trainer.training_step(one)
    assert trainer.weight.grad.item() == pytest.approx(4.0 * scale)


def test_a_users_loss_that_may_divide_or_only_look_is_refused() -> None:
    class Looks(Trainer448):
        current_gradient_accumulation_steps = STEPS

        def compute_loss(self, data: float) -> Any:
            return super().compute_loss(data) + 0 * self.current_gradient_accumulation_steps

    with pytest.raises(CureError, match="a loss function around TRL's uses current_gradient_accumulation_steps"):
        corrected(Looks).training_step(1.0)


def test_a_step_of_fewer_micro_batches_is_their_mean() -> None:
    for micro_batches in (1, 3):
        trainer = corrected(Trainer446)
        trainer.current_gradient_accumulation_steps = micro_batches
        for _ in range(micro_batches):
            trainer.training_step(6.0)
        assert trainer.weight.grad.item() == pytest.approx(6.0)


def test_a_divisor_that_changes_is_seen_and_none_is_changed() -> None:
    trainer = corrected(Trainer52)
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator.gradient_accumulation_steps == STEPS  # Accelerate shares it with other trainers
    trainer.training_step(3.0)
    trainer.accelerator.gradient_accumulation_steps = 1  # as when another trainer is built
    trainer.training_step(3.0)
    assert trainer.weight.grad.item() == pytest.approx(2 * 3.0 / STEPS)


def test_without_accumulation_nothing_is_kept() -> None:
    trainer = corrected(Trainer446)
    trainer.args.gradient_accumulation_steps = 1
    before = set(vars(trainer))
    trainer.training_step(3.0)
    assert trainer.weight.grad.item() == 3.0
    assert set(vars(trainer)) == before


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (0.7, "before it the loss was multiplied by 0.7"),
        (None, "the loss that it was given was not made from what compute_loss returned"),
    ],
)
def test_what_cannot_be_seen_is_refused(scale: float | None, found: str) -> None:
    class Own(Trainer):
        def training_step(self, data: float) -> Any:
            loss = self.weight * data if scale is None else self.compute_loss(data) * scale
            self.accelerator.backward(loss)

    with pytest.raises(CureError) as caught:
        corrected(Own).training_step(1.0)
    message = str(caught.value)
    assert message.startswith(f"GradientAccumulationMixin with transformers {transformers.__version__}, accelerate ")
    assert found in message
    assert "without=['GradientAccumulationMixin']" in message


def test_the_answer_is_found_once() -> None:
    trainer = corrected(Trainer446)
    asked = 0
    look = trainer._divided_by_trainer

    def counted(*args: Any) -> int:
        nonlocal asked
        asked += 1
        return int(look(*args))

    trainer._divided_by_trainer = counted
    for one in (1.0, 2.0, 4.0):
        trainer.training_step(one)
    assert asked == 1


def test_a_loss_outside_of_training_is_left_alone() -> None:
    trainer = corrected(Trainer446)
    assert trainer.compute_loss(3.0).item() == 3.0
    trainer.training_step(3.0)
    assert trainer.compute_loss(3.0).item() == 3.0


def test_a_failure_leaves_nothing_behind() -> None:
    trainer = corrected(Trainer446)
    backward = trainer.accelerator.backward
    trainer.weight = None
    with pytest.raises(TypeError):
        trainer.training_step(1.0)
    assert trainer.accelerator.backward == backward
    assert "compute_loss" not in vars(trainer)


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


def test_accelerate_does_not_divide_once_more() -> None:
    for trainer, gradient in ((Trainer52(), 3.0 / STEPS**2), (corrected(Trainer52), 3.0 / STEPS)):
        trainer.create_accelerator_and_postprocess()
        trainer.training_step(3.0)
        assert trainer.weight.grad.item() == pytest.approx(gradient)


def test_hooks_that_an_engine_gives_its_loss_wait_for_the_backward_pass() -> None:
    """As DeepSpeed and FSDP1 do where their forward pass returns the loss: with Liger's, in TRL."""
    happened = []

    class Hooked(Trainer448):
        def compute_loss(self, data: float) -> Any:
            loss = super().compute_loss(data)
            loss.register_hook(lambda gradient: happened.append("hook"))
            return loss

    trainer = corrected(Hooked)
    backward = trainer.accelerator.backward

    def seen(loss: Any, **kwargs: Any) -> None:
        happened.append("backward")
        backward(loss, **kwargs)

    trainer.accelerator.backward = seen
    trainer.training_step(2.0)
    assert happened == ["backward", "hook"]
