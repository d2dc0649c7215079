"""Train briefly with the legacy RLOO and a setting, and record everything that the reference computes too.

Runs inside a rank. Scores are recorded as the reward model returns them; local variables of TRL's training loop are
read from its stack frame at each backward pass; the rest is recorded as
:mod:`~pytest_trlcompat.conformance.on_policy.recording` says.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.first_rloo import objects
from pytest_trlcompat.conformance.first_rloo.expected import Untrained
from pytest_trlcompat.conformance.first_rloo.quantities import BY_BATCH, BY_MICRO_BATCH
from pytest_trlcompat.conformance.on_policy import recording as on_policy
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
from pytest_trlcompat.conformance.ppo.objects import logged

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AXES", "record", "unknown"]

LEARNING_RATE = 0.002
"""Of SGD; less than PPO's, since a gradient is that of whole completions."""
AXES = ("reward_function", "given")
"""What a setting may have in addition to fields of the config: a function in place of the reward model;
``given="collator"``: a collator of the user's own."""


def unknown(setting: Mapping[str, Any]) -> list[str]:
    """Which :data:`AXES` of a setting this release does not know."""
    return ["reward_function"] if setting.get("reward_function") and not objects.takes_functions() else []


def record(
    subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int = 0
) -> tuple[OnPolicyRecording, Untrained]:
    """Train.

    Args:
        setting: fields of the config, and :data:`AXES`; ``stop_token="none"`` means none.
        seed: of queries and responses.

    Returns:
        The recording, and the models as they were before.
    """
    values = on_policy.arguments_of({"learning_rate": LEARNING_RATE, **setting})
    on_policy.seeded()
    prompts = on_policy.rows_of_batches() * values.get("num_mini_batches", 1) // values.get("rloo_k", 2)
    arguments: dict[str, Any] = {"train_dataset": on_policy.queries(model.words, prompts, seed)}
    collated: list[int] = []
    is_collated = values.pop("given", "") == "collator"
    if is_collated:
        arguments["data_collator"] = on_policy.collator(model.tokenizer, collated)
    is_function = values.pop("reward_function", False) and objects.takes_functions()
    if is_function:
        arguments["reward_model"] = _scores
    trainer = objects.build_trainer(subject, model, arguments, **values)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    on_policy.move(trainer.ref_policy, seed=3)

    def of_ids(ids: Sequence[int]) -> float:
        return _score(model.tokenizer.decode(ids, skip_special_tokens=True))

    before = Untrained(
        policy=copy.deepcopy(trained).cpu(),
        reward_model=None if is_function else copy.deepcopy(trainer.reward_model).cpu(),
        reference_model=copy.deepcopy(trainer.ref_policy).cpu(),
        reward_function=of_ids if is_function else None,
    )
    recording = on_policy.recording(trainer)
    with (
        on_policy.fixed_responses(model.words, recording, seed),
        _watched_scores(trainer, recording),
        _watched_loop(trainer, recording),
        on_policy.watched_training(trainer, trained, recording),
        on_policy.few_objects(),
    ):
        trainer.train()
    recording.logs = logged(trainer)
    recording.collated = sum(collated) if is_collated else None
    recording.prompts = prompts
    return recording, before


def _score(text: str) -> float:
    """A score of a query and its response, without special tokens; it depends on each word and its place.

    Documentation says only that a function takes texts and returns numbers.
    """
    return sum((place * int(word[1:])) % 11 for place, word in enumerate(text.split(), 1)) / 11


def _scores(texts: Sequence[str]) -> list[float]:
    return [_score(text) for text in texts]


@contextlib.contextmanager
def _watched_scores(trainer: Any, recording: OnPolicyRecording) -> Iterator[None]:
    """Record the scores of the reward model, or of the function in its place, before penalties."""
    from unittest import mock

    import torch
    from trl.trainer import rloo_trainer

    get_reward, reward_model = rloo_trainer.get_reward, trainer.reward_model

    def reward(model: Any, ids: torch.Tensor, pad: int, context_length: int) -> Any:
        numbers = get_reward(model, ids, pad, context_length)
        recording.see("scores", numbers[1].reshape(-1))
        return numbers

    def scores(texts: Sequence[str]) -> list[float]:
        numbers = reward_model(texts)
        recording.see("scores", torch.tensor(numbers))
        return numbers

    with mock.patch.object(rloo_trainer, "get_reward", reward), contextlib.ExitStack() as stack:
        if not isinstance(reward_model, torch.nn.Module):
            stack.enter_context(mock.patch.object(trainer, "reward_model", scores))
        yield


@contextlib.contextmanager
def _watched_loop(trainer: Any, recording: OnPolicyRecording) -> Iterator[None]:
    """Record local variables of the loop at each backward pass, once for each batch and for each micro-batch, and when
    there is a checkpoint.

    All releases have the same names for them; with other names this fails, since there would be nothing to compare.
    """
    from unittest import mock

    backward = trainer.accelerator.backward

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # TRL's `train` calls this, and its local variables are shown nowhere else.
        local = sys._getframe(1).f_locals
        if recording.of_batch("advantages", recording.batch) is None:
            of_batch = {
                "mask": ~local["padding_mask"],
                "logprobs": local["logprobs"],
                "reference_logprobs": local["ref_logprobs"],
                "kl": local["kl"],
                "rewards": local["rlhf_reward"].flatten(),
                "baselines": local["baseline"].flatten(),
                "advantages": local["advantages"],
            }
            for name in set(BY_BATCH) & set(of_batch):
                recording.see(name, of_batch[name])
        for name, values in zip(BY_MICRO_BATCH, (local["ratio"], local["pg_loss_max"]), strict=True):
            recording.see(name, values)
        backward(loss, *args, **kwargs)

    save = trainer._save_checkpoint

    def saved(*args: Any, **kwargs: Any) -> None:
        recording.checkpoints.append(recording.batch + 1)
        save(*args, **kwargs)

    with (
        mock.patch.object(trainer.accelerator, "backward", watched),
        mock.patch.object(trainer, "_save_checkpoint", saved),
    ):
        yield
