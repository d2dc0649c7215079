"""All checks as one callback of a ``transformers.Trainer``, TRL's trainers included. Imports torch and Transformers.

Checks before a step hook into the step itself: that of torch's optimizer, and under DeepSpeed that of the engine, since
there Accelerate's ``backward`` steps as well. ``on_pre_optimizer_step`` comes too late under DeepSpeed, and neither PPO
nor older Transformers call it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from pytest_trlcompat.checks._models import is_engine, unwrapped
from pytest_trlcompat.checks._ranks import CheckError, is_first_rank
from pytest_trlcompat.checks.checkpoint import check_checkpoint
from pytest_trlcompat.checks.gradients import GradientReport, check_gradients
from pytest_trlcompat.checks.logits import LogitsCalls
from pytest_trlcompat.checks.memory import check_memory, read_memory
from pytest_trlcompat.checks.parameters import WeightsBefore, check_moved, check_trainable
from pytest_trlcompat.checks.reference import check_reference_model

__all__ = ["CHECKS", "CompatCallback", "Outcome"]

CHECKS = ("trainable", "reference", "logits", "gradients", "moved", "checkpoint", "memory")
"""What can be chosen, in the order in which it runs; ``moved`` cannot do without looking at gradients, too."""

logger = logging.getLogger("pytest_trlcompat.checks")


@dataclass(frozen=True)
class Outcome:
    """What one check came to.

    Attributes:
        check: one of :data:`CHECKS`.
        step: the trainer's global step.
        error: what does not hold, or ``None``.
        found: what the check returned: see each function.
    """

    check: str
    step: int
    error: str | None = None
    found: Any = field(default=None, compare=False)


class CompatCallback(TrainerCallback):
    """Checks a training as it runs, and logs memory::

        trainer.add_callback(CompatCallback(trainer))

    At train begin: something is trainable and the optimizer holds it, and the reference model is placed and sharded
    like the policy. At the first step, before the weights change: requests for the last logits were honoured,
    and gradients reach every trainable parameter; after it: these changed, and the frozen ones did not. At the first
    save: the checkpoint equals the live model. At every step this rank's memory, in bytes, is logged as a separate
    entry of ``log_history`` and to every reporter.

    Gradients that are all zeros (GRPO: equal rewards), loss scaling that overflows, and a learning rate of 0 put off
    what they leave undecided to the next step. Ranks decide together. After the first steps the callback costs what
    reading and logging memory costs.

    Args:
        trainer: whose callback it is.
        checks: some of :data:`CHECKS`; by default all.
        on_failure: ``"raise"`` a :class:`CheckError`, on all ranks, or ``"warn"``: the first rank logs a warning.
        ignore: shell patterns of the names of parameters that need no gradient, such as ``"*.experts.*"``.
        patience: steps within which gradients must differ from zero.
        every_save: compare every checkpoint, not only the first. A comparison reads all that was saved.
        memory_every: steps between two logs of memory; 0 for none.
        accelerator_limit: most bytes of accelerator memory; checked at every step, with a small collective.
        host_limit: most resident bytes of each process, likewise.

    Attributes:
        outcomes: what was checked so far, a list of :class:`Outcome`.

    Raises:
        ValueError: a name in ``checks``, or ``on_failure``, is unknown.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        checks: Collection[str] = CHECKS,
        on_failure: str = "raise",
        ignore: Sequence[str] = (),
        patience: int = 8,
        every_save: bool = False,
        memory_every: int = 1,
        accelerator_limit: int | None = None,
        host_limit: int | None = None,
    ) -> None:
        if unknown := sorted(set(checks) - set(CHECKS)):
            raise ValueError(f"unknown checks {', '.join(unknown)}; known are {', '.join(CHECKS)}")
        if on_failure not in ("raise", "warn"):
            raise ValueError(f"on_failure={on_failure!r} is neither 'raise' nor 'warn'")
        self.trainer: Any = trainer
        self.checks = frozenset(checks)
        self.on_failure = on_failure
        self.ignore = tuple(ignore)
        self.patience = patience
        self.every_save = every_save
        self.memory_every = memory_every
        self.limits = {"accelerator_limit": accelerator_limit, "host_limit": host_limit}
        self.outcomes: list[Outcome] = []
        self._first_step: _FirstStep | None = None
        self._saves = 0

    # ---- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_first_step()
        self._saves = 0
        model, optimizer = self.live_model(), self.trainer.optimizer
        if "trainable" in self.checks:
            held = None if _steps_in_backward(optimizer) else optimizer
            self.run("trainable", lambda: check_trainable(model, held, ignore=self.ignore))
        # PPO called it ref_policy before trl 0.14.
        reference = getattr(self.trainer, "ref_model", None) or getattr(self.trainer, "ref_policy", None)
        if "reference" in self.checks and isinstance(reference, nn.Module):
            self.run("reference", lambda: check_reference_model(reference, model))
        self._first_step = _FirstStep(self, model, optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first_step is not None:
            self._first_step.after()
        if "memory" not in self.checks:
            return
        if any(limit is not None for limit in self.limits.values()):
            within = self.run("memory", lambda: check_memory(**self.limits), remember=False)
            if within is None:  # peaks stay, and one warning is enough
                self.limits = dict.fromkeys(self.limits)
        if self.memory_every and state.global_step % self.memory_every == 0:
            self._log_memory(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves += 1
        if "checkpoint" not in self.checks or (self._saves > 1 and not self.every_save):
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if getattr(self.trainer, "hp_search_backend", None) is not None or _is_in_parts(folder):
            logger.warning("%s is not compared: it has no weights that can be loaded as a whole", folder)
            return
        model = self.live_model()
        prefix = "policy." if _has_policy(model) else ""
        self.run("checkpoint", lambda: check_checkpoint(folder, model, prefix=prefix))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_first_step()

    # ---- what the events share

    def live_model(self) -> nn.Module:
        """The model as it trains: wrapped and sharded."""
        model: nn.Module = getattr(self.trainer, "model_wrapped", None) or self.trainer.model
        return model

    def run(self, check: str, function: Callable[[], Any], remember: bool = True) -> Any:
        """Run a check and remember what it came to; what it found, or ``None`` where it failed and only warns."""
        step = self.trainer.state.global_step
        try:
            found = function()
        except CheckError as error:
            self.outcomes.append(Outcome(check, step, str(error)))
            if self.on_failure == "raise":
                self.end_first_step()
                raise
            if is_first_rank():
                logger.warning("step %d: %s", step, error)
            return None
        if remember:
            self.outcomes.append(Outcome(check, step, found=found))
        return found

    def end_first_step(self) -> None:
        """Take away every hook."""
        if self._first_step is not None:
            self._first_step.close()
        self._first_step = None

    def _log_memory(self, control: Any) -> None:
        # Not the subclass's log: TRL's empties its metrics into whatever is logged next. And logging takes back a
        # request to log, which the trainer has not served yet.
        should_log = control.should_log
        Trainer.log(self.trainer, read_memory().as_logs())
        control.should_log = should_log


class _FirstStep:
    """What is checked around the optimizer's first steps, until it is decided: logits, gradients, movement."""

    def __init__(self, callback: CompatCallback, model: nn.Module, optimizer: Any) -> None:
        self.callback = callback
        self.model = model
        self.optimizer = optimizer
        self.attempts = 0
        wanted = callback.checks
        in_backward = _steps_in_backward(optimizer)
        self.undecided = {"logits", "gradients", "moved"} & wanted - ({"gradients", "moved"} if in_backward else set())
        self.before = WeightsBefore(model) if "moved" in self.undecided else None
        self.gradients: GradientReport | None = None
        self.logits = LogitsCalls(model) if "logits" in self.undecided and not _is_compiled(callback) else None
        self._unhook = _before_each_step(model, optimizer, self.before_step) if self.undecided else lambda: None

    def before_step(self) -> None:
        """Gradients are there, and weights still those that made them."""
        self.attempts += 1
        self._check_logits()
        if self.undecided & {"gradients", "moved"}:
            self._check_gradients()

    def after(self) -> None:
        """A step was made, or several."""
        self._check_logits()
        if "moved" in self.undecided and self.gradients is not None and self.before is not None:
            before, gradients = self.before, self.gradients
            self.undecided.discard("moved")
            run = self.callback.run
            run("moved", lambda: check_moved(self.model, before, gradients, ignore=self.callback.ignore))
        if not self.undecided or self.attempts >= self.callback.patience:
            self.callback.end_first_step()

    def close(self) -> None:
        self._unhook()
        if self.logits is not None:
            self.logits.close()
        self.before = None

    def _check_logits(self) -> None:
        self.undecided.discard("logits")
        if self.logits is not None:
            calls, self.logits = self.logits, None
            calls.close()
            self.callback.run("logits", calls.check)

    def _check_gradients(self) -> None:
        scaled = self.callback.trainer.accelerator.mixed_precision == "fp16"

        def check() -> GradientReport:
            return check_gradients(
                self.model,
                ignore=self.callback.ignore,
                allow_zero=self.attempts < self.callback.patience,
                allow_overflow=scaled and self.attempts < self.callback.patience,
            )

        report: GradientReport | None = self.callback.run("gradients", check, remember=False)
        if report is None:
            self.undecided -= {"gradients", "moved"}
        elif not report.all_zero and not report.not_finite:
            if "gradients" in self.undecided:
                self.undecided.discard("gradients")
                self.callback.outcomes.append(
                    Outcome("gradients", self.callback.trainer.state.global_step, found=report)
                )
            if any(group["lr"] > 0 for group in self.optimizer.param_groups):
                self.gradients = report


def _before_each_step(model: nn.Module, optimizer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called before each step of the optimizer; returns what ends that."""
    if is_engine(model):
        return _before_each_step_of(model, call)
    while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper
        optimizer = optimizer.optimizer
    handle = optimizer.register_step_pre_hook(lambda *_: call())
    return lambda: handle.remove()


def _before_each_step_of(engine: Any, call: Callable[[], None]) -> Callable[[], None]:
    original = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            call()
        return original(*args, **kwargs)

    def end() -> None:
        vars(engine).pop("step", None)

    engine.step = step
    return end


def _steps_in_backward(optimizer: Any) -> bool:
    """Whether an optimizer steps while gradients come and keeps none: LOMO, and GaLore layer by layer."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return any("LayerWiseDummy" in base.__name__ or "Lomo" in base.__name__ for base in type(optimizer).__mro__)


def _is_compiled(callback: CompatCallback) -> bool:
    """A hook would make a compiled model compile again."""
    return bool(getattr(callback.trainer.args, "torch_compile", False))


def _has_policy(model: nn.Module) -> bool:
    """Whether it is PPO's pair of policy and value model, of which the policy alone is saved."""
    return type(unwrapped(model)).__name__ == "PolicyAndValueWrapper"


def _is_in_parts(folder: Path) -> bool:
    """Whether a checkpoint has only what each rank wrote for itself, because the user chose that."""
    from pytest_trlcompat.checks._saved import open_saved

    parts = [*folder.glob("global_step*"), *folder.glob("pytorch_model_fsdp*_rank*.bin")]
    return bool(parts) and open_saved(folder) is None
