"""What PPO and the first RLOO make alike of a batch of responses: tokens, ends of sequence, scores, learning rates."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pytest_trlcompat.reference import ppo_models
from pytest_trlcompat.reference._stepping import Stepper
from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings, OnPolicyUndecided
from pytest_trlcompat.reference.policy import score_tokens
from pytest_trlcompat.reference.ppo_records import Episodes, PPOLayout, unshuffled_layout
from pytest_trlcompat.reference.tokens import Tokens, tokens_of

__all__ = ["OnPolicyLearner", "placed_rows"]


Settings = TypeVar("Settings", bound=OnPolicySettings)
Step = TypeVar("Step")


class OnPolicyLearner(abc.ABC, Generic[Settings, Step]):
    """Everything that lasts from one batch to the next.

    Args:
        trained: a copy of what is trained, whose parameters are stepped in place.
        undecided: of the settings.
    """

    def __init__(
        self, trained: Any, reward_model: Any, settings: Settings, undecided: OnPolicyUndecided, padded: bool
    ) -> None:
        self.settings, self.padded = settings, padded
        self.trained = trained
        self.reward_model = reward_model
        self._open = undecided
        self.score = functools.partial(
            score_tokens,
            temperature=settings.temperature,
            entropy_at_temperature=undecided.entropy_at_temperature,
            padded=padded,
        )
        self.stepper = Stepper(self.trained, settings)
        self.batches, self.episodes = 0, 0

    def train(self, batches: Sequence[Episodes], layouts: Sequence[PPOLayout] | None) -> tuple[Step, ...]:
        """A training on responses that are given, with one layout for each batch; by default rows are not shuffled."""
        if layouts is None:
            layouts = [unshuffled_layout(len(episodes.queries), self.settings) for episodes in batches]
        total = self.settings.num_total_batches or len(batches)
        return tuple(self.batch(episodes, layout, total) for episodes, layout in zip(batches, layouts, strict=True))

    @abc.abstractmethod
    def batch(self, episodes: Episodes, layout: PPOLayout, total: int) -> Step:
        """Everything that one batch makes, of ``total`` of the whole training.

        Raises:
            ValueError: the layout does not fit the batch.
        """

    def ended(self, episodes: Episodes, last_rate: float, total: int) -> dict[str, float]:
        """What is logged at the end of a batch in addition to its own numbers.

        Args:
            last_rate: the learning rate of its last optimizer step.
            total: batches of the whole training.
        """
        self.batches += 1
        self.episodes += len(episodes.queries)
        rate = self.rate(total) if self._open.learning_rate_logged == "next" else last_rate
        return {"lr": rate, "episode": float(self.episodes)}

    def rate(self, total: int) -> float:
        """The learning rate of the next optimizer step."""
        if self._open.schedule_steps == "batches":
            return self.stepper.learning_rate(self.batches, total)
        whole = total * self.settings.num_ppo_epochs * self.settings.num_mini_batches
        return self.stepper.learning_rate(self.stepper.steps, whole)

    def tokens(self, episodes: Episodes) -> Tokens:
        """Queries and responses, each of which ends with its first stop token.

        Raises:
            ValueError: for a response that is too long.
        """
        settings = self.settings
        longest = max(map(len, episodes.responses))
        if longest > settings.response_length:
            raise ValueError(f"a response has {longest} tokens, response_length={settings.response_length}")
        return tokens_of(
            episodes.queries,
            episodes.responses,
            pad_token_id=settings.pad_token_id,
            # No token has a negative id: without a stop token a response ends where it was given.
            eos_token_id=-1 if settings.stop_token_id is None else settings.stop_token_id,
        )

    def has_eos(self, tokens: Tokens) -> Tensor:
        """``(R,)``: whether an end of sequence counts for ``missing_eos_penalty``."""
        is_end = (tokens.completion_ids == self.settings.eos_token_id) & tokens.completion_mask
        if self._open.eos_must_end:
            # (R, C) at the last token of each response.
            return is_end.gather(1, tokens.lengths[:, None] - 1).squeeze(1)
        return is_end.any(1)

    def scores(self, episodes: Episodes, tokens: Tokens, dtype: torch.dtype) -> Tensor:
        """``(R,)``: those that are given, or the reward model's.

        Raises:
            ValueError: if there are both, or none.
        """
        if (episodes.scores is None) == (self.reward_model is None):
            raise ValueError("give either a reward model or the scores of the responses")
        if episodes.scores is not None:
            return torch.tensor(list(episodes.scores), dtype=dtype)
        return ppo_models.response_scores(self.reward_model, tokens)


def placed_rows(layout: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, list[int]]]:
    """Rank and rows of each micro-batch of an optimizer step, by time, then by rank."""
    return [(rank, list(rows)) for ranks in layout for rank, rows in enumerate(ranks)]
