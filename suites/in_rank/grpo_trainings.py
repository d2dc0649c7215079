"""Whole GRPO trainings, measured inside a rank: DeepSpeed's hooks, evaluation, samples, resuming; as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts

from . import grpo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "ACCUMULATED",
    "RESUMED_STEPS",
    "fix_completions",
    "live_hooks",
    "resumed",
    "saving_once",
    "single",
    "training",
]

EVALUATED_PROMPTS = 4
COMPLETION_LENGTH = 3
"""Shorter than elsewhere: these trainings generate most, and no number here depends on it."""
ACCUMULATED = 2
"""Gradients that are accumulated where that is the point; evaluation must not depend on it."""
RESUMED_STEPS = 2
"""One before the checkpoint, one after it."""


@dataclass
class _Seen:
    """What the patched generation and the trainer write down."""

    hooks: list[int] = field(default_factory=list)
    hooks_in_loss: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    prompts: list[list[str]] = field(default_factory=list)


def training(subject: str, model: TinyModel, evaluate_first: bool = False, eval_steps: int = 2) -> dict[str, Any]:
    """Train three steps with an evaluation after every ``eval_steps``, then evaluate once more; maybe also once before.

    A stage that fails is recorded and the following ones are still tried, so that one symptom does not hide another.
    Beside the trainer's own generation, the subject's ``unwrap_model_for_generation`` is called directly: on the bare
    module before training and after, and on what wraps it.
    """
    seen = _Seen()
    fix_completions(model.vocab_size, seen.hooks)
    trainer = _build(subject, model, seen, evaluating=True, eval_steps=eval_steps)
    trainer.add_callback(_evaluating_every(eval_steps))
    stages = _Stages(trainer, seen)
    direct = {"before": _direct(subject, trainer, trainer.model)}
    if evaluate_first:
        stages.run("evaluate_before", trainer.evaluate)
    stages.run("train", trainer.train)
    direct["after"] = _direct(subject, trainer, trainer.model)
    stages.run("evaluate_after", trainer.evaluate)
    at_the_end = live_hooks(trainer.model)
    # Last, since it may leave no hook behind.
    direct["engine"] = _direct(subject, trainer, trainer.model_wrapped)
    return {
        "failures": stages.failures,
        "hooks_in_generation": stages.hooks,
        "hooks_in_loss": seen.hooks_in_loss,
        "hooks_at_the_end": at_the_end,
        "direct": direct,
        "losses": seen.losses,
        "prompts": seen.prompts,
        "grad_norm": [float(norm) for norm in _logged(stages.logs["train"], "grad_norm")],
        "eval_losses": {
            name: {entry["step"]: entry["eval_loss"] for entry in logs if entry.get("eval_loss") is not None}
            for name, logs in stages.logs.items()
        },
        "logs": stages.logs,
    }


def single(subject: str, model: TinyModel) -> dict[str, Any]:
    """Everything that one process can show: a plain training, and two with accumulated gradients and rare logs.

    Of the latter, ``evaluating`` is evaluated before, during and after training, and ``undisturbed`` never.
    """
    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate
    measured = {"training": _caught(lambda: training(subject, model, eval_steps=1))}
    for name in ("evaluating", "undisturbed"):
        GenerationMixin.generate = generate  # each training wraps it again
        measured[name] = _caught(lambda: _accumulating(subject, model, evaluating=name == "evaluating"))  # noqa: B023
    return measured


def _accumulating(subject: str, model: TinyModel, evaluating: bool) -> dict[str, Any]:
    seen = _Seen()
    fix_completions(model.vocab_size, seen.hooks)
    settings: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATED, "logging_steps": grpo.STEPS}
    trainer = _build(subject, model, seen, evaluating, **settings)
    stages = _Stages(trainer, seen)
    if evaluating:
        stages.run("evaluate_before", trainer.evaluate)
        # A failed evaluation leaves metrics behind, which would count in the next.
        if stages.failures:
            trainer = stages.trainer = _build(subject, model, seen, evaluating, **settings)
    stages.run("train", trainer.train)
    if evaluating:
        stages.run("evaluate_after", trainer.evaluate)
    return {
        "failures": stages.failures,
        "logs": stages.logs,
        "beta": trainer.args.beta,
        "losses": seen.losses,
        "prompts": seen.prompts,
        "accumulated": ACCUMULATED,
    }


def resumed(subject: str, model: TinyModel) -> dict[str, Any]:
    """Losses of an uninterrupted training, and of one that goes on from its first checkpoint in a new trainer."""
    from accelerate.utils import broadcast_object_list

    seen, later = _Seen(), _Seen()
    fix_completions(model.vocab_size)
    steps: dict[str, Any] = {"max_steps": RESUMED_STEPS}
    trainer = _build(subject, model, seen, save_strategy="steps", save_steps=1, **steps)
    trainer.add_callback(saving_once())
    [folder] = broadcast_object_list([trainer.args.output_dir])  # each rank has made a folder of its own
    trainer.args.output_dir = folder
    trainer.train()
    trainer.accelerator.wait_for_everyone()  # rank 0 writes the trainer's state
    again = _build(subject, model, later, **steps)
    again.args.output_dir = folder
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return {
        "losses": seen.losses,
        "losses_resumed": later.losses,
        "grad_norm": [float(norm) for norm in _logged(trainer.state.log_history, "grad_norm")],
        "grad_norm_resumed": [float(norm) for norm in _logged(again.state.log_history, "grad_norm")],
        "steps": again.state.global_step,
    }


def saving_once() -> Any:
    """A callback that leaves the first checkpoint to be saved, and none of the others: nobody reads them."""
    from transformers import TrainerCallback

    class SavingOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 1

    return SavingOnce()


def _evaluating_every(steps: int) -> Any:
    """A callback that leaves out the evaluation which newer releases of Transformers add at the end: one follows."""
    from transformers import TrainerCallback

    class EvaluatingEvery(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = control.should_evaluate and state.global_step % steps == 0

    return EvaluatingEvery()


def live_hooks(model: torch.nn.Module) -> int:
    """How many forward hooks of DeepSpeed the modules of ``model`` carry."""
    return sum(
        (getattr(hook, "__module__", None) or "").startswith("deepspeed.")
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def fix_completions(vocab_size: int, hooks: list[int] | None = None) -> None:
    """Let generation run for real, then put tokens in place of its own that depend on the prompt and its copy alone.

    It runs for one token. Those in its place are the same whatever the number of ranks and the order of the prompts,
    and whether training was interrupted or not. The two copies of a prompt get different completions, and so different
    rewards.

    Args:
        hooks: grows, with every call, by the number of DeepSpeed's hooks that are alive during it.
    """
    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        if hooks is not None:
            hooks.append(live_hooks(self))
        # For one token, since none of its own is kept. A prompt may come back as several rows.
        generated = generate(self, inputs, **grpo.with_generation_settings(kwargs, max_new_tokens=1))
        length = prompts.shape[1]
        member = torch.arange(generated.shape[0], device=generated.device)[:, None] % 2
        column = torch.arange(COMPLETION_LENGTH, device=generated.device)
        key = generated[:, :length].sum(dim=1, keepdim=True) * 11 + (member + 1) * (17 + column * 5)
        return torch.cat([generated[:, :length], 3 + key % (vocab_size - 3)], dim=1)

    # For good: the rank is a process of its own, and ends with the launch.
    GenerationMixin.generate = fixed


class _Stages:
    """Runs the stages of a training one after the other, each with its failure, its hooks and its logs."""

    def __init__(self, trainer: Any, seen: _Seen) -> None:
        self.trainer, self.seen = trainer, seen
        self.failures: dict[str, str] = {}
        self.hooks: dict[str, list[int]] = {}
        self.logs: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, stage: Callable[[], Any]) -> None:
        self.seen.hooks.clear()
        known = len(self.trainer.state.log_history)
        try:
            stage()
        except Exception as error:
            self.failures[name] = artefacts.error_text(error)
        self.hooks[name] = list(self.seen.hooks)
        history = self.trainer.state.log_history
        self.logs[name] = history[known if name != "train" else 0 :]  # train() starts a new history


def _build(subject: str, model: TinyModel, seen: _Seen, evaluating: bool = False, **settings: Any) -> Any:
    settings["max_completion_length"] = COMPLETION_LENGTH
    if evaluating:
        evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": _eval_rows()}
        settings = evaluation | settings

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            training = self.model.training
            if training:
                seen.hooks_in_loss.append(live_hooks(self.model))
            loss = super().compute_loss(*args, **kwargs)
            if training:
                seen.losses.append(loss.detach().float().item())
            return loss

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        seen.prompts.append(list(prompts))
        return grpo.reward(completions, **more)

    arguments: dict[str, Any] = {"reward_funcs": reward}
    if evaluating:
        arguments["eval_dataset"] = grpo.prompts().select(range(EVALUATED_PROMPTS))
    return grpo.build_trainer(subject, model, cls=Recording, arguments=arguments, **settings)


def _direct(subject: str, trainer: Any, model: Any) -> dict[str, Any]:
    """Hooks before, during and after a direct use of the subject's function on ``model``, bare or an engine."""
    from trl.models import utils

    from pytest_trlcompat.trainers.deepspeed import zero3_generation

    unwrap = (zero3_generation if subject == "corrected" else utils).unwrap_model_for_generation
    before = live_hooks(trainer.model)
    try:
        with unwrap(model, trainer.accelerator) as unwrapped:
            during = live_hooks(unwrapped)
    except Exception as error:
        return {"failure": artefacts.error_text(error)}
    return {"failure": None, "hooks": [before, during, live_hooks(trainer.model)]}


def _caught(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:
        return {"failures": {"construction": artefacts.error_text(error)}}


def _logged(entries: list[dict[str, Any]], key: str) -> list[Any]:
    return [entry[key] for entry in entries if entry.get(key) is not None]


def _eval_rows() -> int:
    import os
    from importlib import metadata

    from packaging.version import Version

    rows = grpo.ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    return rows // 2 if Version(metadata.version("trl")) < Version("0.15") else rows
