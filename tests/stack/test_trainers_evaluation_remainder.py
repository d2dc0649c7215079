"""The cure of ``grpo-eval-remainder``: Accelerate counts rows, not prompts, while an evaluation lasts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

data_loader = pytest.importorskip("accelerate.data_loader")
datasets = pytest.importorskip("datasets")

from pytest_trlcompat.trainers import CureError  # noqa: E402 - part of the stack
from pytest_trlcompat.trainers.evaluation.evaluation_remainder import EvaluationRemainderMixin  # noqa: E402 - part of the stack


def trainer(sampler: Any, loop: Any) -> Any:
    class Base:
        def evaluation_loop(self, dataloader: Any, description: str) -> Any:
            assert description == "Evaluation"
            return loop(dataloader)

        def _get_eval_sampler(self, dataset: Any) -> Any:
            return sampler

    return type("Mine", (EvaluationRemainderMixin, Base), {})()


def remainder(loader: Any) -> int:
    """Of the last batch, as Accelerate counts it when it begins to read."""
    loader.begin()
    try:
        return int(loader.remainder)
    finally:
        loader.end()


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [([0, 0, 1, 1, 2, 2], 6 % 4), ([0, 1, 2], 3), (None, 3)],
)
def test_the_remainder_is_of_rows(sampler: Any, expected: int) -> None:
    prompts = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    loader = data_loader.DataLoaderShard(prompts, batch_size=4, sampler=sampler)
    assert trainer(sampler, remainder).evaluation_loop(loader, "Evaluation") == expected
    assert remainder(loader) == 3
    assert not hasattr(prompts, "total_dataset_length")


def test_nothing_is_left_of_an_evaluation_that_fails() -> None:
    prompts = datasets.Dataset.from_dict({"prompt": ["a"]})

    def fails(_loader: Any) -> None:
        assert prompts.total_dataset_length == 2
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer([0, 0], fails).evaluation_loop(SimpleNamespace(dataset=prompts), "Evaluation")
    assert not hasattr(prompts, "total_dataset_length")


def test_a_stream_has_no_length() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    stream = Stream()
    found = trainer([0, 0], lambda loader: loader.dataset).evaluation_loop(
        SimpleNamespace(dataset=stream), description="Evaluation"
    )
    assert found is stream


def test_a_shard_of_a_stream_has_none_either() -> None:
    stream = datasets.Dataset.from_dict({"prompt": ["a", "b"]}).to_iterable_dataset()
    shard = data_loader.IterableDatasetShard(stream, batch_size=1, num_processes=2)
    found = trainer([0, 0], lambda loader: loader.dataset).evaluation_loop(
        SimpleNamespace(dataset=shard), description="Evaluation"
    )
    assert found is shard


def test_a_list_is_evaluated_as_well() -> None:
    class Base:
        eval_dataset: ClassVar[Any] = ["a", "b", "c"]

        def get_eval_dataloader(self, eval_dataset: Any) -> Any:
            chosen = self.eval_dataset if eval_dataset is None else eval_dataset
            return data_loader.DataLoaderShard(
                self.eval_dataset[chosen] if isinstance(chosen, str) else chosen, batch_size=4
            )

        def _get_eval_sampler(self, dataset: Any) -> Any:
            return [0, 0, 1, 1, 2, 2]

        def evaluation_loop(self, dataloader: Any) -> Any:
            return remainder(dataloader)

    mine: Any = type("Mine", (EvaluationRemainderMixin, Base), {})()
    assert mine.evaluation_loop(mine.get_eval_dataloader()) == 2
    assert mine.evaluation_loop(mine.get_eval_dataloader(["d", "e"])) == 2
    mine.eval_dataset = {"one": ("a", "b", "c")}
    assert mine.evaluation_loop(mine.get_eval_dataloader("one")) == 2


def test_what_takes_no_attribute_is_refused() -> None:
    with pytest.raises(CureError, match="but this tuple takes no attribute. Evaluate on a"):
        trainer([0, 0], remainder).evaluation_loop(SimpleNamespace(dataset=("a",)), "Evaluation")


def test_the_sampler_of_transformers_is_left_alone() -> None:
    upstream: Any = pytest.importorskip("transformers").Trainer

    class Asked(upstream):
        eval_dataset = ("a", "b")

        def __init__(self) -> None:
            pass

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.eval_dataset

    mine: Any = type("Mine", (EvaluationRemainderMixin, Asked), {})()
    assert mine.get_eval_dataloader() is Asked.eval_dataset
    assert mine._evaluated_rows(["a", "b"]) is None
