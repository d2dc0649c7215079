"""The cure of ``grpo-logged-metrics``: numbers and columns that some ranks log oftener than others, or not at all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

NUMBERS: list[dict[str, list[float]]] = [{"score": [1.0, 2.0, 3.0], "once": [4.0]}, {"score": [6.0]}]
"""By rank, what is logged by each name."""
COLUMNS: list[dict[str, list[str]]] = [{"answer": ["a", "b"]}, {}]


def logged(is_cured: bool, with_names: str) -> dict[str, Any]:
    """What a trainer gathers as TRL's GRPO does from 1.0 to 1.13; ``with_names``: ``all`` or ``common`` ones."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    from pytest_trlcompat.trainers.logs.logged_metrics import LoggedMetricsMixin

    class Trainer:
        def __init__(self) -> None:
            self.accelerator = Accelerator()
            self._pending_metrics: Any = defaultdict(list)
            self._pending_extra_logs: Any = defaultdict(list)

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any) -> Any:
            rank = self.accelerator.process_index
            names = NUMBERS[rank] if with_names == "all" else {"score": NUMBERS[rank]["score"]}
            for name, values in names.items():
                self._pending_metrics[name] += values
            if with_names == "all":
                self._pending_extra_logs.update(COLUMNS[rank])
            return torch.zeros(len(prompts))

        def _generate_and_score_completions(self) -> dict[str, Any]:
            self._calculate_rewards([], prompts=["p", "q"], completions=["c", "d"])
            found: dict[str, Any] = {}
            for name in sorted(self._pending_metrics):
                values = self._pending_metrics[name]
                local_mean = sum(values) / len(values)
                found[name] = self.accelerator.gather(torch.tensor(local_mean)).mean().item()
            for column in sorted(self._pending_extra_logs):
                found[column] = gather_object(self._pending_extra_logs[column])
            return found

    class Cured(LoggedMetricsMixin, Trainer):
        pass

    trainer: Any = Cured() if is_cured else Trainer()
    return trainer._generate_and_score_completions()


def test_each_number_counts_once_and_each_column_is_there(launcher: Launcher) -> None:
    result = launcher(logged, True, "all", strategy="ddp", world_size=2, sharded=False, device="cpu")
    expected = {"once": 4.0, "score": 3.0, "answer": ["a", "b", None, None]}
    assert result.values == [expected, expected]


def test_a_rank_that_logged_none_is_waited_for_without_the_cure(launcher: Launcher) -> None:
    """What the cure is for: the other rank asks for a name that this one does not have."""
    with pytest.raises(LaunchError):
        launcher(logged, False, "all", strategy="ddp", world_size=2, sharded=False, device="cpu", timeout=15)


def test_the_mean_of_means_is_another_number_without_the_cure(launcher: Launcher) -> None:
    result = launcher(logged, False, "common", strategy="ddp", world_size=2, sharded=False, device="cpu")
    assert result.values == [{"score": 4.0}] * 2


def test_one_process_alone_and_newer_releases_are_left_alone() -> None:
    from types import SimpleNamespace

    from pytest_trlcompat.trainers.logs.logged_metrics import LoggedMetricsMixin

    class Newer(LoggedMetricsMixin):
        def _generate_and_score_completions(self) -> None:
            total = 0
            print(total)

    class Older(LoggedMetricsMixin):
        def _generate_and_score_completions(self) -> None:
            local_mean = 0
            print(local_mean)

    def of(ranks: int) -> Any:
        return SimpleNamespace(accelerator=SimpleNamespace(num_processes=ranks))

    assert LoggedMetricsMixin._activity(Newer, of(2)).active is False
    assert LoggedMetricsMixin._activity(Older, of(1)).active is False
    assert LoggedMetricsMixin._activity(Older, of(2)).active is True
    assert LoggedMetricsMixin._activity(Older, None).active is None
