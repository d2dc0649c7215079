"""One GRPO training per subject and strategy, from which the suites about sharing a model judge what they are about.

Runs inside the ranks. What one launch measures, in its order: how the models
are placed and sharded; the tokens that a greedy generation gave; losses and gradient norms of two steps; the
synchronisation of the reference model after them; the gathered policy and reference model; and, where it is requested,
an evaluation between the steps, what ``save_model`` wrote, and an evaluation of few prompts at last. A failure is
returned, not raised, with all that was known before it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.conformance import weights

from . import grpo, models

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "EVALUATION",
    "EVALUATION_IN_BATCHES",
    "EVALUATION_OF_PART",
    "LEARNING_RATE",
    "MIXUP",
    "SAVING",
    "STEPS",
    "failure",
    "to_bytes",
    "train",
]

STEPS = 2
GENERATED = 3
"""New tokens of the generation that is looked at."""
EVALUATION, SAVING, EVALUATION_OF_PART = "evaluation", "saving", "evaluation of part"
EVALUATION_IN_BATCHES = "evaluation in batches"
"""What is measured only on request: it costs, and most strategies are judged without."""
MIXUP = 0.6
"""``ref_model_mixup_alpha``: the share of the policy in the synchronised reference model."""
LEARNING_RATE = 0.5
_MAX_GRAD_NORM = 0.5


def train(
    subject: str, model: TinyModel, folder: str, measured: Collection[str] = (), **settings: Any
) -> dict[str, Any]:
    """Train, synchronise and gather, and what else is to be ``measured``.

    Args:
        folder: the policy is saved there.
        measured: any of ``EVALUATION``, ``SAVING``, ``EVALUATION_OF_PART``, which is of two prompts, whose rows fill
            one batch, and ``EVALUATION_IN_BATCHES``, whose rows fill one batch and half another.
        settings: of the ``GRPOConfig``, in place of those chosen here.

    Returns:
        Plain numbers and texts; ``policy``, ``initial`` and ``ref_model`` map names of parameters to the bytes of
        whole float32 tensors, on rank 0 alone, and are ``None`` where they could not be gathered.
    """
    generated = _generate_greedily()
    returned = grpo.fix_completions(model.vocab_size)
    losses: list[float] = []
    evaluation: dict[str, Any] = {}
    batches: list[tuple[int, float]] = []
    evaluating = {"eval_strategy": "steps", "eval_steps": 1} if EVALUATION in measured else {}
    trainer = grpo.build_trainer(
        subject,
        model,
        cls=_recording(subject, losses, evaluation, batches, returned),
        arguments={"eval_dataset": grpo.prompts().select(range(grpo.ROWS))},
        **{**_settings(), **evaluating, **settings},
    )
    with failure() as training:
        trainer.train()
    with failure() as gathering:
        policy, ref_model = weights.whole(trainer.model_wrapped), weights.whole(trainer.ref_model)
    with failure() as saving:
        if SAVING in measured:
            trainer.save_model(folder)
    part: dict[str, Any] = {}
    evaluate = super(type(trainer), trainer).evaluate  # past what ours adds
    if EVALUATION_OF_PART in measured:
        # Two ranks hold more rows than there are prompts: grpo-eval-remainder.
        part = _evaluated(evaluate, grpo.prompts().select(range(2)))
    in_batches: dict[str, Any] = {}
    if EVALUATION_IN_BATCHES in measured:
        batches.clear()
        in_batches = _evaluated(evaluate, grpo.prompts().select(range(_prompts_of(grpo.ROWS + grpo.ROWS // 2))))
        in_batches["batches"] = list(batches)
    main = trainer.is_world_process_zero()
    callbacks = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    return {
        **models.placement(trainer),
        "failure": training.get("text"),
        "generated": [ids.tolist() for ids in generated],
        "losses": losses,
        "kl": models.logged(trainer, "kl"),
        "grad_norm": models.logged(trainer, "grad_norm"),
        "evaluation": evaluation,
        "evaluation_of_part": part,
        "evaluation_in_batches": in_batches,
        "synchronises": any("SyncRefModelCallback" in name for name in callbacks),
        "gathering": gathering.get("text"),
        "saving": saving.get("text"),
        "initial": to_bytes(model.new_model().state_dict()) if main else None,
        "policy": to_bytes(policy) if main and not gathering else None,
        "ref_model": to_bytes(ref_model) if main and not gathering else None,
    }


def _prompts_of(rows: int) -> int:
    """How many prompts fill so many rows of a batch: trl 0.14 counts prompts where later releases count completions."""
    from importlib import metadata

    from packaging.version import Version

    return rows if Version(metadata.version("trl")) < Version("0.15") else rows // 2


def _settings() -> dict[str, Any]:
    """Of the ``GRPOConfig``."""
    return {
        "max_steps": STEPS,
        # Adam divides a gradient by itself: it hides a wrong scale, and blows up the rounding of a zero.
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        # Below every gradient norm here, so that clipping matters.
        "max_grad_norm": _MAX_GRAD_NORM,
        # One batch, on however many ranks: each call of generate has tokens of its own.
        "per_device_eval_batch_size": grpo.ROWS // int(os.environ.get("WORLD_SIZE", "1")),
        "sync_ref_model": True,
        "ref_model_sync_steps": STEPS,
        "ref_model_mixup_alpha": MIXUP,
    }


def _recording(
    subject: str,
    losses: list[float],
    evaluation: dict[str, Any],
    batches: list[tuple[int, float]],
    returned: list[torch.Tensor],
) -> type:
    """The subject's trainer, which keeps the losses of training and goes on after a failed evaluation.

    Args:
        batches: of evaluations, the rows and the loss of each.
        returned: by :func:`grpo.fix_completions`; the completions of training are the same with an evaluation and
            without.
    """

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training:
                losses.append(loss.detach().float().item())
            return loss

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            prediction = super().prediction_step(model, inputs, *args, **kwargs)
            batches.append((len(inputs), prediction[0].float().item()))
            return prediction

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            if evaluation:  # once is enough
                return {}
            known = len(returned)
            evaluation.update(_evaluated(super().evaluate, *args, **kwargs))
            del returned[known:]
            return {}

    return Recording


def _evaluated(evaluate: Callable[..., dict[str, float]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The ``loss`` of an evaluation, or its ``failure``."""
    with failure() as caught:
        metrics = evaluate(*args, **kwargs)
    return {"failure": caught["text"]} if caught else {"loss": float(metrics["eval_loss"])}


@contextlib.contextmanager
def failure() -> Iterator[dict[str, str]]:
    """Catch what is raised, and keep it as a text."""
    caught: dict[str, str] = {}
    try:
        yield caught
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        caught["text"] = artefacts.error_text(error)


def _generate_greedily() -> list[torch.Tensor]:
    """Make generation greedy, and return a list that grows by the new tokens of every call, ``(B, K)``."""
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate
    tokens: list[torch.Tensor] = []

    def greedy(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        # Nobody looks at the tokens of later calls.
        length = 1 if tokens else GENERATED
        # top_k is greedy, and allowed with several sequences per prompt.
        ids = generate(self, inputs, **grpo.with_generation_settings(kwargs, top_k=1, max_new_tokens=length))
        tokens.append(ids[:, prompts.shape[1] :].cpu())
        return ids

    # For good: the rank is a process of its own, and ends with the launch.
    GenerationMixin.generate = greedy
    return tokens


def to_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
