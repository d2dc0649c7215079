"""How much of its accelerator's memory a rank uses while GRPO trains: phase by phase, in bytes.

Runs inside the ranks. Every step is cut into phases, and the peak is read and
reset where one ends:

- ``generation``: from the step's begin to the first forward pass after it;
- ``reference``: the forward pass of the reference model;
- ``training``: what remains, forward and backward pass;
- ``optimizer``: from there to the step's end.

Where there is a second step, the first does not count, since optimizers and libraries make their buffers in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import grpo, models, sharding

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["PHASES", "Watch", "held", "train", "watch_engine", "watch_generation"]

STEPS = 2
ROWS_OF_A_RANK = 2
PROMPT_LENGTH, COMPLETION_LENGTH = 3, 2
"""In words: few, so that parameters and not activations fill the memory."""
PHASES = ("generation", "reference", "training", "optimizer")


@dataclass
class Watch:
    """Reads the peak of a phase when the next one begins.

    Attributes:
        device: ``torch.npu`` or ``torch.cuda``.
        phase: the one that is going on; empty between steps.
        peaks: by phase, the most bytes that were allocated while it went on, of all steps so far.
        extra: by phase, how much that is above what was allocated when it began.
        rest: bytes allocated between steps, after the latest.
    """

    device: Any
    phase: str = ""
    generating: bool = False
    peaks: dict[str, int] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    rest: int = 0
    _begin: int = 0

    def enter(self, phase: str) -> None:
        """End a phase, and begin this one."""
        ended, peak = self.phase, self.device.max_memory_allocated()
        if ended:
            self.peaks[ended] = max(self.peaks.get(ended, 0), peak)
            self.extra[ended] = max(self.extra.get(ended, 0), peak - self._begin)
        self.phase, self._begin = phase, self.device.memory_allocated()
        self.device.reset_peak_memory_stats()

    def forget(self) -> None:
        self.peaks.clear()
        self.extra.clear()


def train(subject: str, model: TinyModel, **settings: Any) -> dict[str, Any]:
    """Train :data:`STEPS` steps with AdamW.

    Args:
        settings: of the ``GRPOConfig``, in addition to those chosen here.

    Returns:
        ``failure``: a text, or ``None``. ``size`` and ``unit``: bytes of a whole model, and of one of its layers.
        ``policy`` and ``reference``: bytes of the parameters of each that this rank holds after training. And
        ``grad_norm``, as logged. ``rest``, ``peaks`` and ``extra``: see :class:`Watch`; after a failure, of what was
        done before.
    """
    import torch

    watch: Watch | None = None
    whole = model.new_model()
    measured: dict[str, Any] = {"size": held(whole), "unit": held(whole.model.layers[0])}
    del whole
    with sharding.failure() as failed:
        trainer = grpo.build_trainer(
            subject,
            model,
            # Looked up later: the watch is made when the trainer knows its device.
            cls=_watching(subject, lambda: watch),
            arguments={"train_dataset": _prompts()},
            **{**_settings(), **settings},
        )
        watch = Watch(getattr(torch, trainer.accelerator.device.type))
        watch_generation(watch)
        trainer.add_callback(_between_steps(watch))
        trainer.train()
        measured |= {"policy": held(trainer.model), "reference": held(trainer.ref_model)}
        measured["grad_norm"] = models.logged(trainer, "grad_norm")
    if watch is not None:
        measured |= {"rest": watch.rest, "peaks": watch.peaks, "extra": watch.extra}
    return {**measured, "failure": failed.get("text")}


def _settings() -> dict[str, Any]:
    return {
        "max_steps": STEPS,
        "per_device_train_batch_size": grpo.counted(ROWS_OF_A_RANK),
        "max_prompt_length": PROMPT_LENGTH,
        "max_completion_length": COMPLETION_LENGTH,
        "optim": "adamw_torch",
        "learning_rate": 1e-4,
    }


def _prompts() -> Any:
    from datasets import Dataset

    texts = [" ".join(f"w{(row * 7 + column) % 61}" for column in range(PROMPT_LENGTH)) for row in range(16)]
    return Dataset.from_dict({"prompt": texts})


def held(module: Any) -> int:
    """Bytes of the parameters that this rank holds."""
    shards = (getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters())
    here = (shard.to_local() if hasattr(shard, "to_local") else shard for shard in shards)
    return sum(shard.numel() * shard.element_size() for shard in here)


def _watching(subject: str, watched: Callable[[], Watch | None]) -> type:
    """The subject's trainer, which tells the watch where a step and a forward pass begin and end."""

    class Watching(grpo.trainer_class(subject)):  # type: ignore[misc]
        _hooked = False

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            watch = watched()
            assert watch is not None
            if not self._hooked:
                self._hooked = True
                # One object where nothing wraps the model.
                for module in {id(wrapper): wrapper for wrapper in (self.model_wrapped, self.model)}.values():
                    # Before the hooks of a strategy: what these gather belongs to the phase that begins.
                    module.register_forward_pre_hook(lambda *_: _policy_begins(watch), prepend=True)
                watch_engine(watch, self.model_wrapped)
                self.ref_model.register_forward_pre_hook(lambda *_: _reference_begins(watch), prepend=True)
                self.ref_model.register_forward_hook(lambda *_: _reference_ends(watch))
            watch.enter("generation")
            loss = super().training_step(*args, **kwargs)
            watch.enter("optimizer")
            return loss

    return Watching


def watch_engine(watch: Watch, model: Any) -> None:
    """DeepSpeed's makes the optimizer's step within the backward pass that Accelerate calls."""
    if not hasattr(model, "zero_optimization_stage"):
        return
    step = model.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        watch.enter("optimizer")
        return step(*args, **kwargs)

    model.step = watched


def _policy_begins(watch: Watch) -> None:
    if watch.phase == "generation" and not watch.generating:
        watch.enter("training")


def _reference_begins(watch: Watch) -> None:
    watch.enter("reference")


def _reference_ends(watch: Watch) -> None:
    watch.enter("training")


def watch_generation(watch: Watch) -> None:
    """Tell the forward passes of a generation from others."""
    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.generating = True
        try:
            return generate(self, *args, **kwargs)
        finally:
            watch.generating = False

    # For good: the rank is a process of its own, and ends with the launch.
    GenerationMixin.generate = watched


def _between_steps(watch: Watch) -> Any:
    from transformers import TrainerCallback

    class BetweenSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.enter("")
            if state.global_step == 1:
                watch.forget()
            gc.collect()  # what is unreachable is nobody's choice
            watch.rest = watch.device.memory_allocated()

    return BetweenSteps()
