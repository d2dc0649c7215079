"""What recordings of PPO and of the legacy RLOO share: queries, fixed responses, and the records of each step.

Runs inside a rank. A response follows from its query, and Transformers' own generation draws it. Gradients and weights
are recorded around the optimizer's step, and rows in the forward pass of the trained model.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.grpo.watching import prepared_config
from pytest_trlcompat.conformance.on_policy.quantities import DRAWN
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording, OnPolicyStep
from pytest_trlcompat.conformance.training import world_size

if TYPE_CHECKING:
    import torch

__all__ = [
    "ROWS",
    "arguments_of",
    "collator",
    "few_objects",
    "fixed_responses",
    "move",
    "queries",
    "recording",
    "rows_of_batches",
    "seeded",
    "watched_training",
]

RESPONSE_LENGTH = 6
BATCHES = 3
EPOCH = 2
"""Batches of the dataset: the third one is in its second epoch, unless there are several mini-batches."""
ROWS = 8
"""Rows of a batch on each rank: whitening of rewards needs as many."""
STOP_WORD = 5
"""A token that half of the responses have, and that is no end of sequence."""
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
"""SGD, since a wrong factor of a gradient then shows, at a rate at which no training diverges: one that does makes any
rounding large. With AdamW, ``adam_epsilon`` keeps gradients that are only rounding from becoming a whole step."""


def arguments_of(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the config for a setting.

    Args:
        setting: fields of the config; ``stop_token="none"`` means none.
    """
    values = {
        **BASE,
        "per_device_train_batch_size": ROWS // setting.get("gradient_accumulation_steps", 1),
        "total_episodes": ROWS * world_size() * BATCHES,
        "seed": 7,
        **setting,
    }
    if values.get("stop_token_id") is not None or values["stop_token"] == "none":
        values["stop_token"] = None
    return values


def rows_of_batches() -> int:
    """Rows of the dataset, over all ranks."""
    return ROWS * world_size() * EPOCH


def seeded() -> None:
    """Seed torch and numpy: TRL deals rows to mini-batches with numpy, and does not seed it."""
    import numpy
    import torch

    torch.manual_seed(0)
    numpy.random.seed(0)


def recording(trainer: Any) -> OnPolicyRecording:
    """An empty recording with the arguments as the trainer has them."""
    import os

    plain_types = (int, float, str, bool, type(None))
    arguments = {name: value for name, value in vars(trainer.args).items() if isinstance(value, plain_types)}
    empty = OnPolicyRecording(arguments, rank=int(os.environ.get("RANK", "0")))
    empty.arguments["stop_token_id"] = getattr(trainer, "stop_token_id", empty.arguments.get("stop_token_id"))
    return empty


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Within, the garbage collector skips objects that exist already: TRL calls it several times for each batch."""
    import gc

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collator(tokenizer: Any, collated: list[int]) -> Any:
    """A user's own collator, which pads as the default one does.

    Args:
        collated: the list to which it appends the number of rows of each batch.
    """
    from transformers import DataCollatorWithPadding

    class Collator(DataCollatorWithPadding):
        def __call__(self, features: Any) -> Any:
            collated.append(len(features))
            return super().__call__(features)

    return Collator(tokenizer)


def move(model: Any, seed: int) -> None:
    """Change the weights of a model, so that there is a divergence from the first batch on."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Drawn on the CPU, so that it is the same on every device.
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.1 * parameter.std() * noise)


def queries(words: int, rows: int, seed: int) -> Any:
    """Queries of unequal lengths, each different from all others."""
    from datasets import Dataset

    dice = random.Random(f"{seed}/queries")
    numbers = dice.sample(range(words**2), rows)
    ids = []
    for number in numbers:
        rest = [dice.randrange(words) for _ in range(dice.randint(1, 4))]
        # The first two words spell the number, so that no two queries are equal.
        ids.append([_SPECIAL + word for word in (*divmod(number, words), *rest)])
    return Dataset.from_dict({"input_ids": ids})


def _response(query: list[int], call: int, words: int, seed: int, copy: int = 0) -> list[int]:
    """Token ids that generation draws one after the other, whether or not it stops at one of them.

    Args:
        copy: how many earlier rows of the call have the same query.
    """
    dice = random.Random(f"{seed}/{tuple(query)}/{call}" + (f"/{copy}" if copy else ""))
    tokens = [_SPECIAL + dice.randrange(words) for _ in range(RESPONSE_LENGTH)]
    # The stop word stands only where it is put below.
    tokens = [STOP_WORD + 1 if token == STOP_WORD else token for token in tokens]
    if dice.random() < 0.7:
        tokens[dice.randrange(RESPONSE_LENGTH)] = _EOS
    if dice.random() < 0.5:
        tokens[dice.randrange(RESPONSE_LENGTH)] = STOP_WORD
    return tokens


@contextlib.contextmanager
def fixed_responses(words: int, recording: OnPolicyRecording, seed: int) -> Iterator[None]:
    """Within, generation runs as it is, and draws the fixed tokens."""
    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., Any] = GenerationMixin.generate
    multinomial = torch.multinomial

    def fixed(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"].bool()
        queries = [row[is_real].tolist() for row, is_real in zip(ids, mask, strict=True)]
        call = len(recording.rows)
        copies = [queries[:number].count(query) for number, query in enumerate(queries)]
        pairs = zip(queries, copies, strict=True)
        planned = torch.tensor([_response(query, call, words, seed, copy) for query, copy in pairs], device=ids.device)
        drawn = 0

        def draw(probabilities: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> torch.Tensor:
            nonlocal drawn
            if probabilities.shape[0] != len(planned) or num_samples != 1:
                raise RuntimeError(
                    f"generation drew {num_samples} of {tuple(probabilities.shape)} for {len(planned)} queries"
                )
            drawn += 1
            # (B, 1), as `multinomial` returns it.
            return planned[:, drawn - 1 : drawn]

        torch.multinomial = draw
        try:
            with prepared_config() as prepared:
                output = generate(self, *args, **kwargs)
        finally:
            torch.multinomial = multinomial
        recording.drawn.append({name: getattr(prepared[0], name, None) for name in DRAWN})
        for query, row in zip(queries, output.sequences[:, ids.shape[1] :].tolist(), strict=True):
            # generate() pads rows that end before others.
            while row and row[-1] == _PAD:
                row.pop()
            recording.rows.append((query, row))
        return output

    GenerationMixin.generate = fixed
    try:
        yield
    finally:
        GenerationMixin.generate = generate


@contextlib.contextmanager
def watched_training(trainer: Any, trained: Any, recording: OnPolicyRecording) -> Iterator[None]:
    """Record the tokens of each micro-batch, and gradients and weights around each step of the optimizer."""
    import torch

    def forward(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            pairs = zip(kwargs["input_ids"], kwargs["attention_mask"].bool(), strict=True)
            recording.micro_batches.append((recording.batch, [ids[mask].tolist() for ids, mask in pairs]))

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
        recording.steps.append(OnPolicyStep(len(recording.micro_batches), rate, tensors(gradients=True), {}))

    def after(*_: Any) -> None:
        recording.steps[-1].weights = tensors(gradients=False)

    # Hooks of torch are on the optimizer that Accelerate wraps.
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
