"""Models whose log-probabilities can be worked out by hand, and completions to train them on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference import Episodes, GRPOSettings, PPOSettings, Rollout, Undecided

EXACT = Undecided(std_epsilon=0.0)
ROWS = Rollout(
    prompts=[[2, 3]] * 4 + [[4]] * 4,
    completions=[[5, 6, 1], [7, 1], [3, 4, 5, 6], [1], [6, 6, 1], [5, 4, 3, 2], [2, 1], [7, 7, 7, 1]],
    rewards=[[1.0, 0.5], [0.0, 2.0], [2.0, None], [0.5, 1.0], [3.0, 0.0], [1.0, 1.0], [None, 2.0], [0.0, 0.0]],
)
EQUAL = Rollout(prompts=ROWS.prompts, completions=[[2 + row % 3, 7, 1] for row in range(8)], rewards=ROWS.rewards)


class Bigrams(torch.nn.Module):
    """The next token depends on the last one alone: row ``i`` of ``table`` has the logits after token ``i``.

    With a table of zeros every token has the probability 1 / V, and the gradient of its log-probability with respect to
    its row is 1 - 1 / V at the token, and -1 / V elsewhere.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert input_ids.shape == attention_mask.shape
        return self.table[input_ids]


def tilted() -> Bigrams:
    """After 2: 1/6, 1/6, 1/6, 1/2."""
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2, 3] = math.log(3)
    return Bigrams(table)


def uniform(words: int = 4) -> Bigrams:
    return Bigrams(torch.zeros(words, words, dtype=torch.float64))


def random_bigrams(words: int = 8, seed: int = 0) -> Bigrams:
    generator = torch.Generator().manual_seed(seed)
    return Bigrams(torch.randn(words, words, dtype=torch.float64, generator=generator))


def settings_of(**settings: Any) -> GRPOSettings:
    level = {"importance_sampling_level": "sequence"} if settings.get("loss_type") == "luspo" else {}
    base = {"num_generations": 4, "max_completion_length": 4, "optim": "sgd", "learning_rate": 0.1}
    return GRPOSettings(**{**base, **level, **settings})


class Values(torch.nn.Module):
    """The value of a state, or the score of a response, depends on its last token alone."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert input_ids.shape == attention_mask.shape
        return self.table[input_ids][..., None]


def random_values(words: int = 8, seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return Values(torch.randn(words, dtype=torch.float64, generator=generator))


EPISODES = Episodes(
    queries=[[2, 3], [4], [2, 5], [6, 3, 4]],
    responses=[[5, 6, 1, 3], [7, 3], [3, 4, 5, 6], [1]],
    scores=[1.0, 0.5, -2.0, 0.25],
)


def ppo_settings_of(**settings: Any) -> PPOSettings:
    base = {"response_length": 4, "temperature": 1.0, "optim": "sgd", "learning_rate": 0.1, "num_ppo_epochs": 1}
    return PPOSettings(**{**base, **settings})


ADAMW = {
    "optim": "adamw_torch",
    "learning_rate": 0.3,
    "adam_beta1": 0.5,
    "adam_beta2": 0.7,
    "adam_epsilon": 1e-3,
    "weight_decay": 0.2,
    "max_grad_norm": 0.1,
    "lr_scheduler_type": "cosine",
}


def assert_pytorch_steps_so(parameters: Mapping[str, torch.nn.Parameter], steps: Sequence[Any]) -> None:
    """Hold optimizer steps with the settings :data:`ADAMW` against PyTorch's optimizer on the same gradients.

    Args:
        parameters: as they were before the first step, by the names of the steps; changed in place.
        steps: all of the schedule.
    """
    trained = list(parameters.values())
    theirs = torch.optim.AdamW(trained, lr=0.3, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.2)
    for index, step in enumerate(steps):
        for name, parameter in parameters.items():
            parameter.grad = step.gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.1)
        assert torch.allclose(norm, step.grad_norm, rtol=1e-12)
        theirs.param_groups[0]["lr"] = 0.3 * (1 + math.cos(math.pi * index / len(steps))) / 2
        theirs.step()
        for name, parameter in parameters.items():
            assert torch.allclose(parameter, step.weights[name], rtol=1e-12)
