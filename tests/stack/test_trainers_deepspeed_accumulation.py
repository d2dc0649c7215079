"""The cure of DeepSpeed's own accumulation: a sum of all micro-batches, divided once, and else nothing.

Engine and optimizer stand for those of DeepSpeed 0.17.6 to 0.19.6, of which one release alone can be installed, as far
as they accumulate and divide; what the real ones do, the suites measure.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
deepspeed = pytest.importorskip("deepspeed")

from pytest_trlcompat.trainers.deepspeed.deepspeed_accumulation import (  # noqa: E402 - part of the stack
    DeepSpeedAccumulationMixin,
    repair_accumulation,
)
from pytest_trlcompat.trainers.ppo.ppo_accumulation import PPOAccumulationMixin  # noqa: E402 - part of the stack

STEPS = 4
DATA = [1.0, 2.0, 4.0, 8.0]


class Optimizer:
    """ZeRO-2's as it was in 0.17.6: what it asks for is filled at the boundary only."""

    asks_for = "averaged_gradients"

    def __init__(self, weight: Any) -> None:
        self.params_in_partition = [[torch.ones(())], [weight]]  # that of another group, equal to the first's
        self.all_grad_tensors: dict[int, Any] = {}
        self.averaged_gradients: dict[int, Any] = {}

    def get_all_grad_tensors(self, parameters: list[Any], dtype: Any) -> list[Any]:
        return [torch.zeros(()) if one.grad is None else one.grad for one in parameters]

    def epilogue(self, boundary: bool) -> None:
        for group, parameters in enumerate(self.params_in_partition):
            if getattr(self, self.asks_for).get(group) is None:
                self.all_grad_tensors[group] = self.get_all_grad_tensors(parameters, torch.float32)
            else:
                for so_far, new in zip(
                    self.all_grad_tensors[group], self.get_all_grad_tensors(parameters, torch.float32), strict=True
                ):
                    so_far.add_(new)
            if boundary:
                self.averaged_gradients[group] = self.all_grad_tensors[group]
                self.all_grad_tensors[group] = None
            for one in parameters:
                one.grad = None

    def step(self) -> float:
        gradient = float(self.averaged_gradients[1][0])
        self.averaged_gradients = dict.fromkeys(self.averaged_gradients)
        return gradient


class Mended(Optimizer):
    """As it is from 0.18.3 on."""

    asks_for = "all_grad_tensors"


class Engine:
    """Divides the loss, as DeepSpeed did until 0.18.2."""

    def __init__(self, optimizer: type[Optimizer] = Mended) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.optimizer = optimizer(self.weight)

    def gradient_accumulation_steps(self) -> int:
        return STEPS

    def forward(self, data: float) -> tuple[Any, Any]:
        """Logits, and the hidden states that they are made from."""
        hidden = self.weight * data
        return hidden * 1.0, hidden

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        (loss / STEPS if scale_wrt_gas else loss).backward()

    def step(self, scale_wrt_gas: bool) -> float:
        for index, data in enumerate(DATA):
            self.backward(self.forward(data)[0], scale_wrt_gas=scale_wrt_gas)
            self.optimizer.epilogue(boundary=index == STEPS - 1)
        return self.optimizer.step()


class Engine0183(Engine):
    """Divides the gradients of outputs, whatever ``scale_wrt_gas`` is."""

    def forward(self, data: float) -> tuple[Any, Any]:
        outputs = super().forward(data)
        for output in outputs:
            output.register_hook(self._backward_prologue_per_tensor)
        return outputs

    def _backward_prologue_per_tensor(self, gradient: Any) -> Any:
        return gradient / self.gradient_accumulation_steps()

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        self._scale_wrt_gas = scale_wrt_gas
        loss.backward()


class Engine0184(Engine0183):
    """The same, where ``scale_wrt_gas`` is true."""

    def _backward_prologue_per_tensor(self, gradient: Any) -> Any:
        return gradient / self.gradient_accumulation_steps() if self._scale_wrt_gas else gradient


class Engine0196(Engine0183):
    """Divides the loss again, and gradients of outputs only where somebody else calls backward."""

    def _backward_prologue_per_tensor(self, gradient: Any) -> Any:
        return gradient if self.is_current_graph_registered() else gradient / self.gradient_accumulation_steps()

    def is_current_graph_registered(self) -> bool:
        return True

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        (loss / STEPS if scale_wrt_gas else loss).backward()


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr(deepspeed, "__version__", text)


@pytest.mark.parametrize(("text", "upstream"), [("0.17.6", DATA[-1]), ("0.18.2", DATA[-1])])
def test_every_micro_batch_counts(text: str, upstream: float, version: Any) -> None:
    version(text)
    engine = Engine(Optimizer)
    assert engine.step(scale_wrt_gas=True) == upstream / STEPS
    repair_accumulation(engine)
    repair_accumulation(engine)  # which changes nothing more
    for _ in range(2):
        assert engine.step(scale_wrt_gas=True) == sum(DATA) / STEPS


@pytest.mark.parametrize("text", ["0.17.5", "0.18.3", "0.19.8"])
def test_an_optimizer_that_adds_up_is_left_alone(text: str, version: Any) -> None:
    version(text)
    engine = Engine()
    repair_accumulation(engine)
    assert "get_all_grad_tensors" not in vars(engine.optimizer)
    assert "backward" not in vars(engine)
    assert engine.step(scale_wrt_gas=True) == sum(DATA) / STEPS


@pytest.mark.parametrize(
    ("kind", "scaled", "unscaled"),
    [(Engine0183, STEPS**-2, STEPS**-2), (Engine0184, STEPS**-2, 1.0), (Engine0196, 1 / STEPS, 1.0)],
)
def test_the_loss_is_divided_once_and_only_with_scale_wrt_gas(
    kind: Any, scaled: float, unscaled: float, version: Any
) -> None:
    version("0.18.3")
    for scale_wrt_gas, upstream in ((True, scaled), (False, unscaled)):
        engine = kind()
        assert engine.step(scale_wrt_gas) == sum(DATA) * upstream
        repair_accumulation(engine)
        repair_accumulation(engine)
        assert engine.step(scale_wrt_gas) == sum(DATA) / (STEPS if scale_wrt_gas else 1)
    assert ("backward" in vars(engine)) is (kind is not Engine0196)


def test_a_trainer_of_ones_own_is_repaired_before_its_first_step(version: Any) -> None:
    class Trainer:
        def __init__(self, accelerator: Any) -> None:
            self.accelerator = accelerator

        def training_step(self, scale_wrt_gas: bool) -> Any:
            return self.accelerator.deepspeed_engine_wrapped.engine.step(scale_wrt_gas)

    class Mine(DeepSpeedAccumulationMixin, Trainer):
        pass

    version("0.18.3")
    accelerator = SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=Engine0183()))
    assert Mine(accelerator).training_step(True) == sum(DATA) / STEPS


def test_ppo_enters_no_sync_only_without_deepspeed() -> None:
    def refused(model: Any = None) -> Any:
        raise AssertionError("no_sync context manager is incompatible with gradient partitioning")

    class Trainer:
        def __init__(self, wrapped: Any) -> None:
            self.accelerator = SimpleNamespace(no_sync=refused, deepspeed_engine_wrapped=wrapped)

        def train(self) -> str:
            with self.accelerator.no_sync("model"):
                return "trained"

    class Mine(PPOAccumulationMixin, Trainer):
        pass

    assert Mine(SimpleNamespace(engine=Engine())).train() == "trained"
    with pytest.raises(AssertionError, match="no_sync"):
        Mine(None).train()
