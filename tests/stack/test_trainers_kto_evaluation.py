"""The cure of ``kto-evaluation-mismatch``: datasets of evaluations are prepared by the size of their own batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from pytest_trlcompat.trainers import CureError
from pytest_trlcompat.trainers.evaluation.kto_evaluation import KTOEvaluationMixin


def sizes(training: int, evaluation: int) -> Any:
    return SimpleNamespace(per_device_train_batch_size=training, per_device_eval_batch_size=evaluation)


class Trainer:
    """TRL's KTO trainer as far as it exchanges completions."""

    def __init__(self, args: Any, names: tuple[str, ...] = ("train", "eval")) -> None:
        self.args = args
        self.prepared = [self._prepare_dataset([], None, args, name) for name in names]

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> tuple[str, int]:
        return dataset_name, args.per_device_train_batch_size


class Apart(Trainer):
    """As in releases where it has a method of its own for that."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> tuple[str, int]:
        return dataset_name, self._get_kl_dataset(dataset, dataset_name, args)

    def _get_kl_dataset(self, dataset: Any, dataset_name: str, args: Any) -> int:
        size: int = args.per_device_train_batch_size
        return size


class Exchanges(KTOEvaluationMixin, Trainer):
    pass


class ExchangesApart(KTOEvaluationMixin, Apart):
    pass


@pytest.mark.parametrize("kind", [Exchanges, ExchangesApart])
def test_evaluations_are_prepared_by_the_size_of_their_batches(kind: Any) -> None:
    trainer = kind(sizes(4, 2), ("train", "eval", "train"))
    assert trainer.prepared == [("train", 4), ("eval", 2), ("train", 2)]  # one of evaluations may be called train
    assert vars(trainer.args) == {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2}
    assert trainer._prepare_dataset([], processing_class=None, args=trainer.args, dataset_name="eval") == ("eval", 2)
    assert KTOEvaluationMixin._activity(kind, trainer).active is True


@pytest.mark.parametrize("evaluation", [4, 1])
def test_the_same_size_and_one_row_are_left_alone(evaluation: int) -> None:
    trainer = Exchanges(sizes(4, evaluation))
    assert trainer.prepared == [("train", 4), ("eval", 4)]
    assert KTOEvaluationMixin._activity(Exchanges, trainer).active is False


def test_another_trainer_is_left_alone() -> None:
    class Other:
        def _prepare_dataset(self, dataset: Any, packing: bool) -> Any:
            return dataset, packing

    class Cured(KTOEvaluationMixin, Other):
        def __init__(self) -> None:
            pass

    assert Cured()._prepare_dataset([1], packing=True) == ([1], True)
    assert KTOEvaluationMixin._activity(Cured, None).active is False
    assert KTOEvaluationMixin._activity(Exchanges, None).active is None


def test_a_trainer_that_prepares_another_dataset_first_is_refused() -> None:
    with pytest.raises(CureError, match=r"the training's dataset to be the first .* but one named 'eval'"):
        Exchanges(sizes(4, 2), ("eval",))
