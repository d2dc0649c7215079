"""The cures of GRPO's evaluation, on stand-ins that err as TRL's releases do."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from pytest_trlcompat.trainers.evaluation.evaluation import EvaluationMixin, _lacks_prediction_step


class Base:
    """What the cure touches of a trainer; ``log`` is called as Transformers calls it."""

    def __init__(self, metrics: Any) -> None:
        self.model = SimpleNamespace(training=True)
        self.control = SimpleNamespace(should_evaluate=False)
        self._metrics = metrics
        self.logged: list[dict[str, float]] = []

    def evaluate(self) -> None:
        self.model.training = False
        self._prepare_inputs([])
        self.log({"eval_loss": 1.0})
        self.model.training = True

    def prediction_step(self, *_: Any, **__: Any) -> str:
        return "own"

    def _prepare_inputs(self, inputs: Any) -> Any:
        raise NotImplementedError

    def log(self, logs: dict[str, float]) -> None:
        raise NotImplementedError


class OnePlace(Base):
    """As trl 0.14.0: one dictionary for all metrics, and no prefix."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        self._metrics["reward"].append(5.0)
        return inputs

    def log(self, logs: dict[str, float]) -> None:
        self.logged.append({**logs, **{name: sum(values) / len(values) for name, values in self._metrics.items()}})
        self._metrics.clear()


class ByControl(Base):
    """As trl 0.16 and 0.17: an evaluation is what is due."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        self._metrics["eval" if self.control.should_evaluate else "train"]["reward"].append(5.0)
        return inputs

    def log(self, logs: dict[str, float]) -> None:
        mode, prefix = ("eval", "eval_") if self.control.should_evaluate else ("train", "")
        averages = {prefix + name: sum(values) / len(values) for name, values in self._metrics[mode].items()}
        self.logged.append({**logs, **averages})
        self._metrics[mode].clear()


class MineOnePlace(EvaluationMixin, OnePlace):
    pass


class MineByControl(EvaluationMixin, ByControl):
    pass


def test_pending_metrics_of_training_stay_out_of_an_evaluation() -> None:
    trainer = MineOnePlace(defaultdict(list, reward=[1.0]))
    trainer.evaluate()
    trainer.log({"loss": 0.0})
    assert trainer.logged == [{"eval_loss": 1.0, "eval_reward": 5.0}, {"loss": 0.0, "reward": 1.0}]


@pytest.mark.parametrize("due", [False, True])
def test_an_evaluation_is_what_runs_and_not_what_is_due(due: bool) -> None:
    trainer = MineByControl({"train": defaultdict(list, reward=[1.0]), "eval": defaultdict(list)})
    trainer.control.should_evaluate = due
    trainer.log({"loss": 0.0})
    trainer.evaluate()
    assert trainer.logged == [{"loss": 0.0, "reward": 1.0}, {"eval_loss": 1.0, "eval_reward": 5.0}]
    assert trainer.control.should_evaluate is due


def test_what_a_callback_decides_meanwhile_holds() -> None:
    class Deciding(ByControl):
        def log(self, logs: dict[str, float]) -> None:
            super().log(logs)
            self.control.should_evaluate = not self.control.should_evaluate

    class Mine(EvaluationMixin, Deciding):
        pass

    trainer = Mine({"train": defaultdict(list), "eval": defaultdict(list)})
    trainer.control.should_evaluate = True
    trainer.log({"loss": 0.0})
    assert trainer.control.should_evaluate is True


def test_gradients_are_not_accumulated_in_an_evaluation() -> None:
    seen: list[int] = []

    class Dividing(ByControl):
        def _prepare_inputs(self, inputs: Any) -> Any:
            seen.append(self.current_gradient_accumulation_steps)  # type: ignore[attr-defined]
            return super()._prepare_inputs(inputs)

    class Mine(EvaluationMixin, Dividing):
        pass

    trainer = Mine({"train": defaultdict(list), "eval": defaultdict(list)})
    trainer.evaluate()
    assert not hasattr(trainer, "current_gradient_accumulation_steps")
    trainer.current_gradient_accumulation_steps = 8
    trainer.evaluate()
    assert trainer.current_gradient_accumulation_steps == 8
    assert seen == [1, 1]


def test_a_prediction_step_of_trl_is_kept() -> None:
    trainer = MineByControl({"train": defaultdict(list), "eval": defaultdict(list)})
    assert trainer.prediction_step(None, [], True) == "own"


def test_a_class_in_front_that_asks_for_trls_does_not_count() -> None:
    class Trainer(ByControl):
        pass

    Trainer.prediction_step = lambda *_: pytest.fail("Transformers' own")  # type: ignore[method-assign]
    Trainer.__module__ = "transformers.trainer"

    class Watched(type("Corrected", (EvaluationMixin, Trainer), {})):  # type: ignore[misc] # made here
        def prediction_step(self, *args: Any) -> Any:
            return super().prediction_step(*args)

    assert _lacks_prediction_step(Watched)
    assert not _lacks_prediction_step(MineByControl)
