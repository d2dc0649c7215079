"""A short PPO training with a setting, and everything of it that the reference computes too.

Runs inside a rank; imports the stack only inside functions. What a trainer does not show from outside is looked at
where it passes by: the functions of its module that give log-probabilities, values and scores, and whitened advantages;
the rest as :mod:`.on_policy_recording` says.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
from pytest_trlcompat.conformance.ppo.truth import Untrained

from . import on_policy_recording, ppo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["record"]


def record(
    subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int = 0
) -> tuple[OnPolicyRecording, Untrained]:
    """Train.

    Args:
        setting: fields of the config; ``stop_token="none"`` stands for none.
        seed: of queries and responses.

    Returns:
        What was recorded, and the models as they were before.
    """
    values = on_policy_recording.arguments_of(setting)
    on_policy_recording.seeded()
    # Releases before 0.17 have num_mini_batches times as many rows in a batch.
    rows = on_policy_recording.rows_of_batches() * values.get("num_mini_batches", 1)
    arguments = {"train_dataset": on_policy_recording.queries(model.words, rows, seed)}
    trainer = ppo.build_trainer(subject, model, arguments=arguments, **values)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    reference_model = getattr(trainer, "ref_model", None) or trainer.ref_policy
    on_policy_recording.move(reference_model, seed=3)
    models = (trained.policy, trained.value_model, trainer.reward_model, reference_model)
    before = Untrained(*(copy.deepcopy(each).cpu() for each in models))
    found = on_policy_recording.recording(trainer)
    with (
        on_policy_recording.fixed_responses(model.words, found, seed),
        _watched_functions(trainer, found),
        on_policy_recording.watched_training(trainer, trained, found),
        on_policy_recording.few_objects(),
    ):
        trainer.train()
    found.logs = ppo.logged(trainer)
    return found, before


@contextlib.contextmanager
def _watched_functions(trainer: Any, found: OnPolicyRecording) -> Iterator[None]:
    """Keep what the functions give that the trainer's module calls by a name of its own."""
    import inspect
    import sys
    from unittest import mock

    import torch

    from pytest_trlcompat.trainers._ppo import ppo_trainer_class

    module = sys.modules[inspect.unwrap(ppo_trainer_class().train).__module__]
    expected = "logprobs"

    def log_softmax(logits: torch.Tensor, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal expected
        given: torch.Tensor = originals["selective_log_softmax"](logits, index, *args, **kwargs)
        if torch.is_grad_enabled():
            found.see("new_logprobs", given)
        else:  # of each part of a batch first the policy's, then the reference model's
            found.see(expected, given)
            expected = "reference_logprobs" if expected == "logprobs" else "logprobs"
        return given

    def reward(model: Any, ids: torch.Tensor, pad: int, context_length: int) -> Any:
        given = originals["get_reward"](model, ids, pad, context_length)
        if model is trainer.reward_model:
            found.see("scores", given[1].reshape(-1))
        else:
            found.see("values", given[0][:, context_length - 1 : -1].squeeze(-1))
        return given

    def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        given: torch.Tensor = originals["masked_whiten"](values, mask, shift_mean)
        # The first call of a batch is for rewards, where these are whitened.
        if trainer.args.whiten_rewards and found.of_batch("rewards", found.batch) is None:
            found.see("rewards", values)
            found.see("whitened_rewards", given)
        else:
            found.see("estimates", values)
            found.see("advantages", given)
            found.see("mask", mask)
        return given

    watched = {"selective_log_softmax": log_softmax, "get_reward": reward, "masked_whiten": whiten}
    originals = {name: getattr(module, name) for name in watched if hasattr(module, name)}
    with mock.patch.dict(vars(module), {name: watched[name] for name in originals}):
        yield
