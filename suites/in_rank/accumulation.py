"""Steps over accumulated micro-batches by a plain ``Trainer``, compared with plain PyTorch. Runs inside the ranks.

The trainer's loss is its own, a mean of the micro-batch, as that of TRL's DPO, KTO and reward models is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.training import of_all_ranks, own_fields
from pytest_trlcompat.conformance.weights import whole

from . import grpo
from .sharding import failure

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["IN_BF16", "train"]

STEPS, ACCUMULATED, ROWS, LENGTH = 2, 2, 2, 6
_SETTINGS: Mapping[str, Any] = {
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": ACCUMULATED,
    "max_steps": STEPS,
    # Adam, and clipping, would hide a gradient of the wrong size.
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}

IN_BF16: Mapping[str, Any] = {"bf16": True, "gradient_accumulation_steps": 1, "learning_rate": 0.5}
"""One micro-batch a step, so that nobody divides by their number; steps so long that bfloat16 weights have them."""

Rows = Sequence[Sequence[int]]


def train(subject: str, model: TinyModel, settings: Mapping[str, Any] = _SETTINGS) -> dict[str, Any]:
    """Train two steps of two micro-batches.

    Args:
        settings: of ``TrainingArguments``, in place of those here: :data:`IN_BF16`.

    Returns:
        ``moved``: how far the weights are from the right ones, as a part of how far these have moved; ``losses``: those
        that were logged, and ``expected_losses``; or the ``failure`` of the training. Of the first rank; the others
        return a ``failure`` alone.
    """
    batches_of_rank: list[Rows] = []
    with failure() as training:
        trainer = _trainer(subject, model, batches_of_rank, settings)
        trainer.train()
        weights = whole(trainer.model_wrapped)
    if training:
        return {"failure": training["text"]}
    batches = of_all_ranks(batches_of_rank)
    if int(os.environ.get("RANK", "0")):
        return {"failure": None}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"failure": None, "losses": losses, **_compared_with_pytorch(trainer.args, model, weights, batches)}


def _trainer(subject: str, model: TinyModel, batches_of_rank: list[Rows], settings: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    from pytest_trlcompat.trainers import cured

    class OwnLoss(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # The loss is a mean, which Trainer is to divide.
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batches_of_rank.append(inputs["input_ids"].tolist())
            return _loss(model, inputs["input_ids"])

    random = torch.Generator().manual_seed(0)
    rows = torch.randint(2, model.vocab_size, (64, LENGTH), generator=random)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    with own_fields(transformers.TrainingArguments):
        arguments = transformers.TrainingArguments(tempfile.mkdtemp(prefix="trlcompat-"), **{**_SETTINGS, **settings})
    kind: Any = cured(OwnLoss) if subject == "corrected" else OwnLoss
    return kind(model=grpo.load_policy(model), args=arguments, train_dataset=dataset)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    import torch

    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _compared_with_pytorch(
    args: Any, model: TinyModel, weights: Mapping[str, torch.Tensor], batches: Sequence[Sequence[Rows]]
) -> dict[str, Any]:
    """The same steps on a copy of the model, in one process: the mean of all micro-batches of all ranks."""
    import torch

    right = model.new_model()
    before = {name: parameter.detach().clone() for name, parameter in right.named_parameters()}
    optimizer = torch.optim.SGD(right.parameters(), lr=args.learning_rate)
    losses = []
    for step in range(STEPS):
        numbers = range(step * args.gradient_accumulation_steps, (step + 1) * args.gradient_accumulation_steps)
        together = [_loss(right, torch.tensor(rank[number])) for rank in batches for number in numbers]
        loss = torch.stack(together).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    after = dict(right.named_parameters())
    apart = torch.cat([(weights[name] - after[name].detach()).flatten() for name in before])
    moved = torch.cat([(after[name].detach() - before[name]).flatten() for name in before])
    return {"moved": float(apart.norm() / moved.norm()), "expected_losses": losses}
