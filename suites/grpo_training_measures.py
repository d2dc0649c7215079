"""A whole GRPO training, measured inside a rank: hooks of ZeRO-3, evaluation, samples and weights, as plain numbers.

Imports the stack only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["EVALUATED_PROMPTS", "live_hooks", "training"]

EVALUATED_PROMPTS = 4


def training(
    subject: str, model: TinyModel, folder: str | None = None, resume: str | None = None, evaluate_first: bool = False
) -> dict[str, Any]:
    """Train three steps with an evaluation after each, then evaluate once more.

    A stage that fails is recorded and the following ones are still tried, so that one symptom does not hide another.

    Args:
        folder: where to save a checkpoint after each step; none is saved without it.
        resume: a checkpoint to go on from.
        evaluate_first: evaluate once before training as well.
    """
    seen: list[dict[str, int]] = []
    _fix_completions(model.vocab_size, seen)
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": _eval_rows()}
    if folder is not None:
        settings |= {"output_dir": folder, "save_strategy": "steps", "save_steps": 1, "seed": 7}
    losses: list[float] = []

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training:
                losses.append(loss.detach().float().item())
            return loss

    arguments = {"eval_dataset": grpo.prompts().select(range(EVALUATED_PROMPTS))}
    trainer = grpo.build_trainer(subject, model, cls=Recording, arguments=arguments, **settings)
    failures: dict[str, str] = {}
    during: dict[str, list[int]] = {}
    metrics: dict[str, Any] = {}

    def stage(name: str, run: Callable[[], Any]) -> None:
        seen.clear()
        try:
            metrics[name] = run()
        except Exception as error:
            import traceback
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
        during[name] = [call["hooks"] for call in seen]

    if evaluate_first:
        stage("evaluate_before", trainer.evaluate)
    stage("train", lambda: None if trainer.train(resume_from_checkpoint=resume) is None else None)
    after = live_hooks(trainer.model)
    stage("evaluate_after", trainer.evaluate)
    history = trainer.state.log_history
    return {
        "failures": failures,
        "hooks_in_generation": during,
        "hooks_after_training": after,
        "hooks_at_the_end": live_hooks(trainer.model),
        "losses": losses,
        "kl": [entry["kl"] for entry in history if "kl" in entry],
        "evaluations": [
            {key: entry[key] for key in entry if key.startswith("eval_") and not _is_timing(key)}
            for entry in history
            if "eval_runtime" in entry
        ],
        "steps": trainer.state.global_step,
    }


def live_hooks(model: torch.nn.Module) -> int:
    """How many forward hooks of DeepSpeed the modules of ``model`` carry."""
    return sum(
        "deepspeed" in (getattr(hook, "__module__", None) or "")
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def _is_timing(key: str) -> bool:
    return key.endswith(("_runtime", "_per_second", "_preparation_time")) or "step_time" in key


def _eval_rows() -> int:
    import os

    import trl
    from packaging.version import Version

    rows = grpo.ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    return rows // 2 if Version(trl.__version__) < Version("0.15") else rows


def _fix_completions(vocab_size: int, seen: list[dict[str, int]]) -> None:
    """Let generation run for real, then put tokens in place of its own that depend on the prompt and the row alone.

    So they are the same whatever the number of ranks, and whether training was interrupted or not.
    """
    import os

    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        seen.append({"hooks": live_hooks(self)})
        generated = generate(self, inputs, **kwargs)  # a prompt may come back as several rows
        rows, length = generated.shape[0], prompts.shape[1]
        row = torch.arange(rows, device=generated.device)[:, None] + int(os.environ.get("RANK", "0")) * rows
        column = torch.arange(grpo.COMPLETION_LENGTH, device=generated.device)
        key = generated[:, :length].sum(dim=1, keepdim=True) * 11 + row * 17 + column * (5 + row)
        return torch.cat([generated[:, :length], 3 + key % (vocab_size - 3)], dim=1)

    GenerationMixin.generate = fixed  # the rank is a process of its own and ends with the launch
