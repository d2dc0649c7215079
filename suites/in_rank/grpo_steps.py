"""What one optimizer step did, compared with the reference: runs inside a rank.

The optimizer is plain SGD, so that the step itself shows the gradient under any strategy: a weight moves by the
learning rate times its gradient.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.conformance.training import of_all_ranks

from ..measured import every
from . import grpo, grpo_objective
from .grpo_objective import Objective, Row, Trained

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ALONE", "RANKS", "steps", "wrong_numbers"]

LEARNING_RATE = 0.1
STEPS = 2
GRADIENT_TOLERANCE = 1e-3
"""Relative: some hundred times the rounding of a weight of 1 that moves by a tenth of its gradient."""
LOSS_TOLERANCE = 1e-4
"""Trainer rounded what it reports to four digits until Transformers 5."""

ALONE: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"gradient_accumulation_steps": 2},
    "bnpo": {"gradient_accumulation_steps": 2, "loss_type": "bnpo"},
    "dapo": {"gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "num_iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    # The two numbers differ, since grpo-token-normalizer scales gradients by their quotient.
    "steps_per_generation": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "loss_type": "dapo"},
    "truncated": {"gradient_accumulation_steps": 2, "mask_truncated_completions": True, "loss_type": "dapo"},
}
"""Settings that are measured in one process, in one launch."""
RANKS: Mapping[str, Mapping[str, Any]] = {"grpo": ALONE["grpo"]}
"""Settings that are measured in several: one, since a process can set DeepSpeed up but once."""
_SGD: Mapping[str, Any] = {
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": LEARNING_RATE,
    "max_grad_norm": 0.0,
    # On by default from 1.16.0 on; it changes the gradient of the KL term, and is not what is judged here.
    "use_bias_correction_kl": False,
}


def steps(subject: str, model: TinyModel, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train two steps with each variant's settings, one trainer after the other.

    Returns:
        Of each variant the numbers of :func:`_numbers`; or the ``failure`` of its training; or ``absent``, with what
        this release does not know.
    """
    return {name: _steps(subject, model, dict(settings)) for name, settings in variants.items()}


def _steps(subject: str, model: TinyModel, settings: dict[str, Any]) -> dict[str, Any]:
    import trl

    unknown = sorted(set(settings) - set(trl.GRPOConfig.__dataclass_fields__))
    if unknown:
        return {"absent": f"GRPOConfig of this release has no {', '.join(unknown)}"}
    with grpo_objective.learn_by_heart(model.vocab_size) as sampled:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # Not caught: the launch describes every rank's failure better.
            return _train(subject, model, settings, sampled)
        try:
            return _train(subject, model, settings, sampled)
        except Exception as error:
            if str(settings.get("loss_type")) in str(error) and "nknown loss type" in str(error):
                return {"absent": f"{error} in this release"}
            return {"failure": artefacts.error_text(error)}


def wrong_numbers(run: Mapping[str, Any]) -> bool:
    """Whether a step's gradient or its reported loss is not the right one."""
    right = every(error <= GRADIENT_TOLERANCE for error in run["gradient_error"])  # NaN is wrong, too
    return not (right and every(error <= LOSS_TOLERANCE for error in run["reported_error"]))


@dataclass
class _Recorder:
    """What the trainer trains on between two optimizer steps, and which step was right.

    Attributes:
        policy: a plain copy of the policy, on the CPU, as it was at the last optimizer step.
        sampled: rows that were generated since they were looked at.
        generated: tokens that count in the last generation on this rank.
    """

    objective: Objective
    policy: Any
    sampled: list[Row]
    share: float
    old: dict[Row, torch.Tensor] = field(default_factory=dict)
    microbatches: list[list[Trained]] = field(default_factory=list)
    generated: int = 0
    comparisons: list[dict[str, float]] = field(default_factory=list)

    def look(self) -> list[Row]:
        """Take what was sampled, by the policy as it is now."""
        import torch

        rows, self.sampled[:] = list(self.sampled), []
        if rows:
            with torch.no_grad():
                self.old.update(zip(rows, self.objective.logprobs(self.policy, rows), strict=True))
            self.generated = self.objective.tokens(rows)
        return rows

    def train_on(self, rows: Sequence[Row]) -> None:
        self.microbatches.append([Trained(row, self.old[row]) for row in rows])

    def step(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compare the step to ``weights`` with the right one, and follow it."""
        ranks = of_all_ranks((self.microbatches, self.generated))
        tokens = sum(generated for _, generated in ranks) * self.share
        parts = [part for microbatches, _ in ranks for part in microbatches]
        loss, gradient = self.objective.gradient(self.policy, parts, tokens)
        before = dict(self.policy.named_parameters())
        moved = {name: (before[name].detach() - weights[name]) / LEARNING_RATE for name in gradient}
        self.comparisons.append({"loss": loss, **_compare(moved, gradient)})
        self.policy.load_state_dict(weights, strict=False)
        self.microbatches.clear()


def _train(subject: str, model: TinyModel, settings: dict[str, Any], sampled: list[Row]) -> dict[str, Any]:
    from transformers import TrainerCallback

    accumulated = settings.get("gradient_accumulation_steps", 1)
    share = accumulated / settings.get("steps_per_generation", accumulated)
    objective = _objective(model, settings)
    recorder = _Recorder(objective, copy.deepcopy(objective.start), sampled, share)

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.look()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            # 0.14.0 samples within compute_loss, and trains on what it has sampled.
            recorder.train_on(_rows(inputs) if "completion_ids" in inputs else recorder.look())
            return loss

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            recorder.step(_weights(model))

    callbacks = [Steps()]
    trainer = grpo.build_trainer(subject, model, cls=Recording, arguments={"callbacks": callbacks}, **_SGD, **settings)
    trainer.train()
    reported = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _numbers(objective.loss_type, recorder.comparisons, reported)


def _numbers(loss_type: str, comparisons: Sequence[Mapping[str, float]], reported: Sequence[float]) -> dict[str, Any]:
    """One number for each step: norm of the right gradient, factor by which the step's is longer, and so on."""
    assert len(comparisons) == len(reported) == STEPS, (comparisons, reported)
    return {
        "loss_type": loss_type,
        "gradient_norm": [step["norm"] for step in comparisons],
        "gradient_scale": [step["scale"] for step in comparisons],
        "gradient_error": [step["error"] for step in comparisons],
        "loss": [step["loss"] for step in comparisons],
        "reported_error": [abs(entry - step["loss"]) for entry, step in zip(reported, comparisons, strict=True)],
    }


def _objective(model: TinyModel, settings: Mapping[str, Any]) -> Objective:
    return Objective(
        start=grpo.load_policy(model),
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        loss_type=_loss_type(settings),
        mask_truncated=bool(settings.get("mask_truncated_completions", False)),
    )


def _loss_type(settings: Mapping[str, Any]) -> str:
    """The one that is configured, or the only one that a release without a choice has."""
    import trl
    from packaging.version import Version

    if "loss_type" in trl.GRPOConfig.__dataclass_fields__:
        return str(settings.get("loss_type", "grpo"))
    return "bnpo" if Version(trl.__version__) >= Version("0.16") else "grpo"


def _rows(inputs: Mapping[str, Any]) -> list[Row]:
    """The rows of a micro-batch, without padding; masks of truncated completions may be empty, so ids decide."""
    rows = []
    for index, prompt in enumerate(inputs["prompt_ids"].tolist()):
        words = tuple(token for token in prompt if token)
        completion = tuple(token for token in inputs["completion_ids"][index].tolist() if token)
        rows.append(Row(words, completion))
    return rows


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float().cpu().clone() for name, weight in model.named_parameters()}


def _compare(moved: Mapping[str, torch.Tensor], gradient: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the right gradient; the factor by which the other one is longer along it; and their relative distance."""
    import torch

    right = torch.cat([gradient[name].flatten() for name in gradient])
    other = torch.cat([moved[name].flatten() for name in gradient])
    norm = right.norm().item()
    return {
        "norm": norm,
        "scale": (other @ right / (right @ right)).item(),
        "error": (other - right).norm().item() / norm,
    }
