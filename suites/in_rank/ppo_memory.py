"""How much of its accelerator's memory a rank uses while PPO trains: phase by phase, in bytes.

Runs inside the ranks. An update is cut into phases, as a step of GRPO is in
:mod:`.memory`:

- ``generation``: from its begin to the reference model's forward pass;
- ``reference``: that forward pass;
- ``scoring``: from there to the first forward pass that is trained: the value model's and the reward model's;
- ``training``: forward and backward passes of policy and value model;
- ``optimizer``: from there to its end.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.ppo import objects as ppo

from . import models, sharding
from .memory import COMPLETION_LENGTH, PROMPT_LENGTH, Watch, held, watch_engine

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["PHASES", "train"]

PHASES = ("generation", "reference", "scoring", "training", "optimizer")


def train(subject: str, model: TinyModel) -> dict[str, Any]:
    """Train :data:`.ppo.STEPS` updates of one mini-batch each with AdamW.

    Returns:
        As :func:`.memory.train`: ``size`` is of policy and value model together, and ``reference`` of reference and
        reward model. ``log``: by name, what was logged of each update.
    """
    import torch

    watch: Watch | None = None
    whole = ppo.load_models(model)
    measured: dict[str, Any] = {
        "size": held(whole.model) + held(whole.value_model),
        "unit": held(whole.model.model.layers[0]),
    }
    del whole
    with sharding.failure() as failed:
        trainer = ppo.build_trainer(
            subject,
            model,
            arguments={"train_dataset": ppo.queries(model.vocab_size, length=PROMPT_LENGTH)},
            response_length=COMPLETION_LENGTH,
            learning_rate=1e-4,
            optim="adamw_torch",
        )
        watch = Watch(getattr(torch, trainer.accelerator.device.type))
        _watch_phases(watch, trainer)
        trainer.add_callback(_between_updates(watch))
        trainer.train()
        measured |= {"policy": held(trainer.model), "reference": held(_reference(trainer)) + held(trainer.reward_model)}
        measured["log"] = {
            key: models.logged(trainer, key) for key in ("objective/kl", "loss/policy_avg", "loss/value_avg")
        }
    if watch is not None:
        measured |= {"rest": watch.rest, "peaks": watch.peaks, "extra": watch.extra}
    return {**measured, "failure": failed.get("text")}


def _reference(trainer: Any) -> Any:
    return trainer.ref_model if hasattr(trainer, "ref_model") else trainer.ref_policy  # before trl 0.13


def _watch_phases(watch: Watch, trainer: Any) -> None:
    _reference(trainer).register_forward_pre_hook(lambda *_: watch.enter("reference"), prepend=True)
    _reference(trainer).register_forward_hook(lambda *_: watch.enter("scoring"))

    trainer.model.register_forward_pre_hook(lambda *_: watch.enter("training"), prepend=True)
    watch_engine(watch, trainer.model)
    if not hasattr(trainer.model, "zero_optimization_stage"):  # beneath what Accelerate has wrapped
        trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: watch.enter("optimizer"))


def _between_updates(watch: Watch) -> Any:
    from transformers import TrainerCallback

    class BetweenUpdates(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.enter("generation")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.enter("")
            # After the first update, in which optimizers and libraries make their buffers.
            if not watch.rest:
                watch.forget()
            gc.collect()  # what is unreachable is nobody's choice
            watch.rest = watch.device.memory_allocated()
            watch.enter("generation")

    return BetweenUpdates()
