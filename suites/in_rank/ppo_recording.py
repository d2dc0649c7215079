"""A short PPO training with a setting, and everything of it that the reference computes too.

Runs inside a rank; imports the stack only inside functions. Responses are fixed by their query, and drawn by
Transformers' own generation. What a trainer does not show from outside is looked at where it passes by: the functions
of its module that give log-probabilities, values and scores, and whitened advantages, the forwards of what is trained,
gradients and weights around the optimizer's step, and the logs.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.ppo.records import PPORecording, PPOStepRecord
from pytest_trlcompat.conformance.ppo.truth import Untrained

from . import ppo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["record"]

RESPONSE_LENGTH = 6
BATCHES = 3
EPOCH = 2
"""Batches of the data set: the third one is of its second epoch, unless there are several mini-batches."""
ROWS = 8
"""Rows of a batch on each rank: whitening of rewards asks for as many."""
STOP_WORD = 5
"""A token that half of the responses have; no end of sequence."""
_PAD, _EOS, _SPECIAL = 0, 1, 3

BASE: Mapping[str, Any] = {
    "response_length": RESPONSE_LENGTH,
    "num_ppo_epochs": 2,
    "local_rollout_forward_batch_size": ROWS,
    "optim": "sgd",
    "learning_rate": 0.01,
    "max_grad_norm": 0.0,
    "adam_epsilon": 1e-5,
    "stop_token": "eos",
}
"""SGD, since it hides no factor of a gradient, at a rate at which no training diverges: those that do make any rounding
large. With AdamW ``adam_epsilon`` keeps rounding from becoming a step.
"""


def record(subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int = 0) -> tuple[PPORecording, Untrained]:
    """Train.

    Args:
        setting: fields of the config; ``stop_token="none"`` stands for none.
        seed: of queries and responses.

    Returns:
        What was recorded, and the models as they were before.
    """
    import os

    import numpy
    import torch

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    accumulated = {**BASE, **setting}.get("gradient_accumulation_steps", 1)
    values = {
        **BASE,
        "per_device_train_batch_size": ROWS // accumulated,
        "total_episodes": ROWS * ranks * BATCHES,
        "seed": 7,
        **setting,
    }
    if values.get("stop_token_id") is not None or values["stop_token"] == "none":
        values["stop_token"] = None
    torch.manual_seed(0)
    numpy.random.seed(0)  # it deals rows to mini-batches, and TRL does not seed it
    # Releases before 0.17 have num_mini_batches times as many rows in a batch.
    rows = ROWS * ranks * EPOCH * values.get("num_mini_batches", 1)
    arguments = {"train_dataset": _queries(model.words, rows, seed)}
    trainer = ppo.build_trainer(subject, model, arguments=arguments, **values)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    reference_model = getattr(trainer, "ref_model", None) or trainer.ref_policy
    _move(reference_model, seed=3)
    models = (trained.policy, trained.value_model, trainer.reward_model, reference_model)
    before = Untrained(*(copy.deepcopy(each).cpu() for each in models))
    found = PPORecording(
        {
            name: value
            for name, value in vars(trainer.args).items()
            if isinstance(value, (int, float, str, bool, type(None)))
        },
        rank=int(os.environ.get("RANK", "0")),
    )
    found.arguments["stop_token_id"] = getattr(trainer, "stop_token_id", found.arguments.get("stop_token_id"))
    with (
        _fixed_responses(model.words, found, seed),
        _watched_functions(trainer, found),
        _watched_training(trainer, trained, found),
        _few_objects(),
    ):
        trainer.train()
    found.logs = ppo.logged(trainer)
    return found, before


@contextlib.contextmanager
def _few_objects() -> Iterator[None]:
    """Let the garbage collector, which TRL calls several times a batch, pass over what was there before."""
    import gc

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _move(model: Any, seed: int) -> None:
    """Other weights, so that there is a divergence from the first batch on."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.1 * parameter.std() * noise)


def _queries(words: int, rows: int, seed: int) -> Any:
    """Queries of unequal lengths, each different from all others."""
    from datasets import Dataset

    dice = random.Random(f"{seed}/queries")
    numbers = dice.sample(range(words**2), rows)
    ids = []
    for number in numbers:
        rest = [dice.randrange(words) for _ in range(dice.randint(1, 4))]
        ids.append([_SPECIAL + word for word in (*divmod(number, words), *rest)])
    return Dataset.from_dict({"input_ids": ids})


def _response(query: list[int], call: int, words: int, seed: int) -> list[int]:
    """Token ids that generation draws one after the other, whether or not it stops at one."""
    dice = random.Random(f"{seed}/{tuple(query)}/{call}")
    found = [_SPECIAL + dice.randrange(words) for _ in range(RESPONSE_LENGTH)]
    found = [STOP_WORD + 1 if token == STOP_WORD else token for token in found]
    if dice.random() < 0.7:
        found[dice.randrange(RESPONSE_LENGTH)] = _EOS
    if dice.random() < 0.5:
        found[dice.randrange(RESPONSE_LENGTH)] = STOP_WORD
    return found


@contextlib.contextmanager
def _fixed_responses(words: int, found: PPORecording, seed: int) -> Iterator[None]:
    """Let generation run, and draw the fixed tokens."""
    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., Any] = GenerationMixin.generate
    multinomial = torch.multinomial

    def fixed(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"].bool()
        queries = [row[own].tolist() for row, own in zip(ids, mask, strict=True)]
        call = len(found.rows)
        planned = torch.tensor([_response(query, call, words, seed) for query in queries], device=ids.device)
        drawn = 0

        def draw(probabilities: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> torch.Tensor:
            nonlocal drawn
            if probabilities.shape[0] != len(planned) or num_samples != 1:
                raise RuntimeError(
                    f"generation drew {num_samples} of {tuple(probabilities.shape)} for {len(planned)} queries"
                )
            drawn += 1
            return planned[:, drawn - 1 : drawn]

        torch.multinomial = draw
        try:
            output = generate(self, *args, **kwargs)
        finally:
            torch.multinomial = multinomial
        for query, row in zip(queries, output.sequences[:, ids.shape[1] :].tolist(), strict=True):
            while row and row[-1] == _PAD:
                row.pop()
            found.rows.append((query, row))
        return output

    GenerationMixin.generate = fixed
    try:
        yield
    finally:
        GenerationMixin.generate = generate


@contextlib.contextmanager
def _watched_functions(trainer: Any, found: PPORecording) -> Iterator[None]:
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


@contextlib.contextmanager
def _watched_training(trainer: Any, trained: Any, found: PPORecording) -> Iterator[None]:
    """Keep the tokens of each micro-batch, and gradients and weights around each step of the optimizer."""
    import torch

    def forward(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            pairs = zip(kwargs["input_ids"], kwargs["attention_mask"].bool(), strict=True)
            found.micro_batches.append((found.batch, [ids[mask].tolist() for ids, mask in pairs]))

    def tensors(gradients: bool) -> dict[str, torch.Tensor]:
        return {
            name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().cpu().clone()
            if gradients
            else parameter.detach().cpu().clone()
            for name, parameter in trained.named_parameters()
            if parameter.requires_grad
        }

    def before(*_: Any) -> None:
        rate = float(inner.param_groups[0]["lr"])
        found.steps.append(PPOStepRecord(len(found.micro_batches), rate, tensors(gradients=True), {}))

    def after(*_: Any) -> None:
        found.steps[-1].weights = tensors(gradients=False)

    inner = trainer.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    handles = [
        trained.register_forward_pre_hook(forward, with_kwargs=True),
        inner.register_step_pre_hook(before),
        inner.register_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
