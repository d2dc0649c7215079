"""All checks as one callback of a ``transformers.Trainer``, TRL's trainers included."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from pytest_trlcompat.checks._models import unwrapped
from pytest_trlcompat.checks._ranks import (
    AbandonedError,
    CheckError,
    OddError,
    any_rank,
    is_first_rank,
    jointly,
    together,
    world_size,
)
from pytest_trlcompat.checks.checkpoint import check_checkpoint
from pytest_trlcompat.checks.first_steps import FIRST, UNDECIDED, FirstSteps, steps_in_backward
from pytest_trlcompat.checks.later import Later
from pytest_trlcompat.checks.memory import check_memory, read_memory
from pytest_trlcompat.checks.parameters import WeightsBefore, check_trainable
from pytest_trlcompat.checks.reference import check_reference_model
from pytest_trlcompat.checks.standstill import Standstill
from pytest_trlcompat.training import begin
from pytest_trlcompat.training.aliases import value_of

__all__ = ["CHECKS", "OPTIONAL", "CompatCallback", "Outcome"]

CHECKS = (
    "trainable",
    "reference",
    "ranks",
    "logits",
    "forward",
    "gradients",
    "moved",
    "data",
    "steps",
    "schedule",
    "checkpoint",
    "memory",
)
"""The checks that run by default, in the order in which they begin; ``moved`` also reads the gradients."""
OPTIONAL = ("repeat",)
"""Checks that run only on request, since they cost more."""
logger = logging.getLogger("pytest_trlcompat.checks")


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        check: one of :data:`CHECKS` or :data:`OPTIONAL`; several, separated by commas, if these could not be run.
        step: the trainer's global step.
        error: what cannot be right, or ``None``.
        odd: what merely looks odd, or ``None``.
        unjudged: why a training ended with nothing to judge, or ``None``; such a check has not passed.
        found: what the check returned; see the function of the check.
    """

    check: str
    step: int
    error: str | None = None
    odd: str | None = None
    found: Any = field(default=None, compare=False)
    unjudged: str | None = None

    @property
    def fine(self) -> bool:
        """Whether the check passed: it was judged, and nothing is wrong or odd."""
        return self.error is None and self.odd is None and self.unjudged is None


class CompatCallback(TrainerCallback):
    """Checks a training as it runs, and logs memory::

        trainer.add_callback(CompatCallback(trainer))

    It reports two kinds of things. Only the first can end a training, and only on request:

    - an **error** cannot be right: nothing is trainable; the optimizer has none of the trainable parameters, makes no
      step, or its steps change nothing although there are gradients; gradients are never cleared; NaN reached the
      weights; ranks that hold the same parameter disagree; a tensor of a checkpoint is missing, empty or wrong; the
      reference model is on another device than the policy, and nothing moves it there; two forwards of one batch differ
      (``repeat``); a memory limit is exceeded;
    - an **odd** thing may be intended, or costs only memory or time: a module that took part in the loss and got no
      gradient, nothing but zeros as gradients for :attr:`patience` steps, frozen weights that changed by more than
      rounding, a model in eval mode, losses that are not finite, ranks with the same batches, a learning rate that does
      not follow its schedule, a reference model that is whole or gathered whole, a keyword for few logits that the
      model ignores, a training that ended without moving anything. A check that itself fails is odd, too.

    The checks run at these times:

    - *at train begin*: which known issues bite this very training and are not cured, a line each in the log of the main
      process; what is trainable, the optimizer, the reference model, and whether ranks hold the same weights;
    - *around the first steps*, each until it is decided: logits, forwards, gradients before the weights change, what
      changed, batches of ranks, steps and cleared gradients;
    - *after steps 1, 2, 4, 8 and so on, and every* ``every`` *steps*, by a sample of each parameter: ranks again,
      whether weights still move, the schedule;
    - *at the first save*: the checkpoint;
    - *at train end*: whether anything moved at all, unless an earlier outcome says so. The reason is named if learning
      rates, labels, advantages or gradient norms show it. A check that had nothing to judge by then has an outcome that
      says why (:attr:`Outcome.unjudged`), and has not passed.

    The memory of this rank, in bytes, joins the rows that the trainer logs anyway.

    A check waits while it cannot judge: all gradients are zeros because all rewards of each group are equal (GRPO),
    loss scaling skips steps, the learning rate is 0, a zero elsewhere cuts a module off for one step (a new LoRA, a
    closed gate), or a module took no part (experts that no token chose, a vision tower without an image). Ranks decide
    together.

    Args:
        trainer: the trainer that the callback checks.
        checks: some of :data:`CHECKS` and :data:`OPTIONAL`; by default all of the former.
        on_failure: ``"warn"``: the first rank logs a warning for whatever is wrong or odd. ``"raise"``: an error raises
            :class:`CheckError` on all ranks; what is odd is still a warning.
        ignore: shell patterns of the names of parameters to leave out, such as ``"*.experts.*"``.
        patience: steps within which gradients must differ from zero, and weights change.
        every: steps between two looks at ranks, weights and schedule, in addition to powers of two; 0 for none.
        every_save: compare every checkpoint, not only the first. A comparison reads all that was saved.
        memory_every: fewest steps between two logged rows to which memory is added; 0 for none. It adds no rows.
        accelerator_limit: most bytes of accelerator memory; checked at every step, with a small collective.
        host_limit: most resident bytes of each process; checked in the same way.

    Attributes:
        outcomes: the results so far, a list of :class:`Outcome`.

    Raises:
        ValueError: a name in ``checks``, or ``on_failure``, is unknown.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        checks: Collection[str] = CHECKS,
        on_failure: str = "warn",
        ignore: Sequence[str] = (),
        patience: int = 8,
        every: int = 100,
        every_save: bool = False,
        memory_every: int = 1,
        accelerator_limit: int | None = None,
        host_limit: int | None = None,
    ) -> None:
        known = (*CHECKS, *OPTIONAL)
        if unknown := sorted(set(checks) - set(known)):
            raise ValueError(f"unknown checks {', '.join(unknown)}; known are {', '.join(known)}")
        if on_failure not in ("raise", "warn"):
            raise ValueError(f"on_failure={on_failure!r} is neither 'raise' nor 'warn'")
        self.trainer: Any = trainer
        self.checks = frozenset(checks)
        self.on_failure = on_failure
        self.ignore = tuple(ignore)
        self.patience = patience
        self.every = every
        self.every_save = every_save
        self.memory_every = memory_every
        self.limits = {"accelerator_limit": accelerator_limit, "host_limit": host_limit}
        self.outcomes: list[Outcome] = []
        self._first_steps: FirstSteps | None = None
        self._later: Later | None = None
        self._standstill: Standstill | None = None
        self._began_with = 0
        self._saves = 0
        self._logged = 0
        self._log: Any = None
        self._log_replaced = False
        begin.prepare(trainer)

    # ---- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin.tell(self.trainer)
        with self._guarded("what trains, and the reference model", {"trainable", "reference"}):
            # An earlier training may have ended in an exception, and left its hooks.
            self._end()
            self._later = self._standstill = None
            self._began_with = len(self.outcomes)
            self._saves = self._logged = 0
            self._check_beginning()
        with self._guarded("the training as it goes on", {"ranks", "schedule"}, self._end_later):
            self._later = Later(self, self._reference())
        with self._guarded("the first steps", FIRST, self.end_first_steps):
            self._first_steps = FirstSteps(self, self.live_model(), self.trainer.optimizer)
        if "moved" in self.checks:
            with self._guarded("what moves until the end", {"moved"}):
                first = self._first_steps
                before = None if first is None else first.before
                before = WeightsBefore(self.live_model()) if before is None else before
                self._standstill = Standstill(before, None if first is None else first.forwards, state.global_step)
        if "memory" in self.checks and self.memory_every:
            self._log, self._log_replaced = self.trainer.log, "log" in vars(self.trainer)
            self.trainer.log = self._log_with_memory

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._standstill is not None:
            self._standstill.step_begins(self.trainer.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first_steps is not None:
            with self._guarded("the first steps", self._first_steps.undecided, self.end_first_steps):
                self._first_steps.after()
        if self._later is not None and self._later.is_due(state.global_step):
            with self._guarded("the training as it goes on", self._later.undone, self._end_later):
                self._later.look(state.global_step)
        limited = "memory" in self.checks and any(limit is not None for limit in self.limits.values())
        if limited and not self.run("memory", lambda: check_memory(**self.limits), quiet=True).fine:
            self.limits = dict.fromkeys(self.limits)  # peaks stay, and one warning is enough

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._standstill is not None:
            self._standstill.logged(logs or {})
        if self._later is None:
            return
        try:
            self._later.logged(logs or {})
        except Exception as error:  # it only ever says what is odd, and no rank waits for another here
            self._say(Outcome("forward", state.global_step, odd=f"the log could not be checked: {error!r}"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves += 1
        if "checkpoint" not in self.checks or (self._saves > 1 and not self.every_save):
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with self._guarded("the checkpoint", {"checkpoint"}):
            self.run("checkpoint", lambda: self._check_saved(folder))

    def _check_saved(self, folder: Path) -> Any:
        with together(f"the checkpoint {folder}"):
            in_parts = is_first_rank() and _is_in_parts(folder)
            if is_first_rank() and not folder.is_dir():
                raise OddError(
                    f"expected a checkpoint in {folder}, but there is no such folder: what was saved elsewhere is not "
                    "compared; call check_checkpoint with its folder"
                )
        if any_rank([in_parts or getattr(self.trainer, "hp_search_backend", None) is not None])[0]:
            logger.warning("%s is not compared: it has no weights that can be loaded as a whole", folder)
            return UNDECIDED
        model = self.live_model()
        return check_checkpoint(folder, model, prefix="policy." if _has_policy(model) else "")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        standstill, self._standstill = self._standstill, None
        about = {outcome.check for outcome in self.outcomes[self._began_with :]}
        told = any(not outcome.fine and outcome.check == "gradients" for outcome in self.outcomes[self._began_with :])
        if standstill is not None and "moved" not in about and not told:
            with self._guarded("whether anything moved", {"moved"}):
                model, ignore = self.live_model(), self.ignore
                self.run("moved", lambda: standstill.check(model, state.global_step, ignore))
        self._end()
        self._say_unjudged(state.global_step)

    def _say_unjudged(self, step: int) -> None:
        """An outcome for each check that came to nothing in this training; what is absent has not passed."""
        about = {name for outcome in self.outcomes[self._began_with :] for name in outcome.check.split(", ")}
        reasons = {
            "reference": "there is no reference model",
            "ranks": "there is one rank",
            "checkpoint": "no checkpoint was saved that can be loaded as a whole",
            "memory": "no limit was given",
            "schedule": "too few steps were made, or the scheduler counts none",
        }
        late = "until the training ended there was nothing to judge"
        for check in (*CHECKS, *OPTIONAL):
            if check in self.checks and check not in about:
                self.outcomes.append(Outcome(check, step, unjudged=reasons.get(check, late)))

    # ---- what the events share

    def _check_beginning(self) -> None:
        model, optimizer, reference = self.live_model(), self.trainer.optimizer, self._reference()
        if "trainable" in self.checks:
            held = None if steps_in_backward(optimizer) else optimizer
            self.run("trainable", lambda: check_trainable(model, held, ignore=self.ignore))
        if reference is not None and "reference" in self.checks:
            self.run("reference", lambda: check_reference_model(reference, model))

    def _reference(self) -> nn.Module | None:
        reference = value_of(self.trainer, "ref_model")
        return reference if isinstance(reference, nn.Module) else None

    @contextmanager
    def _guarded(
        self, what: str, checks: Collection[str], give_up: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """A check that itself fails says nothing of the training, and never ends it; all ranks give it up together."""
        try:
            with jointly(what):
                yield
        except AbandonedError as error:
            names = ", ".join(name for name in (*CHECKS, *OPTIONAL) if name in self.checks and name in checks)
            self._say(Outcome(names, self.trainer.state.global_step, odd=str(error)))
            give_up()

    def live_model(self) -> nn.Module:
        """The model as it trains: wrapped and sharded."""
        model: nn.Module = getattr(self.trainer, "model_wrapped", None) or self.trainer.model
        return model

    def gradient_norm(self) -> float | None:
        """The norm of all gradients, as it was last logged."""
        return None if self._later is None else self._later.norm

    def run(self, check: str, function: Callable[[], Any], *, quiet: bool = False) -> Outcome:
        """Run a check and keep its outcome, unless it returns ``UNDECIDED``, or passes and is ``quiet``.

        Raises:
            CheckError: the check raised one that is not an :class:`OddError`, and ``on_failure`` is ``"raise"``.
        """
        step = self.trainer.state.global_step
        try:
            result = function()
        except OddError as error:
            return self._say(Outcome(check, step, odd=str(error), found=error.found))
        except CheckError as error:
            outcome = Outcome(check, step, error=str(error), found=error.found)
            if self.on_failure == "warn":
                return self._say(outcome)
            self.outcomes.append(outcome)
            self._end()
            raise
        except AbandonedError:
            raise
        except Exception as error:  # a check that fails says nothing of the training
            if world_size() > 1:
                # Other ranks may be waiting: :func:`jointly` tells them.
                raise
            return self._say(Outcome(check, step, odd=f"{check} could not be checked: {type(error).__name__}: {error}"))
        outcome = Outcome(check, step, found=result)
        if result is not UNDECIDED and not quiet:
            self.outcomes.append(outcome)
        return outcome

    def _say(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        if is_first_rank():
            kind = "looks odd" if outcome.error is None else "cannot be right"
            logger.warning("step %d: %s: %s", outcome.step, kind, outcome.error or outcome.odd)
        return outcome

    def guard_first_steps(self, look: Callable[[], None]) -> None:
        """Run what looks at the first steps while the optimizer makes one."""
        first = self._first_steps
        if first is not None:
            with self._guarded("the first steps", first.undecided, first.give_up):
                look()

    def end_first_steps(self) -> None:
        """Remove every hook."""
        if self._first_steps is not None:
            self._first_steps.close()
        self._first_steps = None

    def _end_later(self) -> None:
        self._later = None

    def _end(self) -> None:
        self.end_first_steps()
        # Not `is`: each access to a method makes another object.
        if self._log is not None and vars(self.trainer).get("log") == self._log_with_memory:
            if self._log_replaced:
                self.trainer.log = self._log
            else:
                del self.trainer.log  # uncovers the method of the class
        self._log = None

    def _log_with_memory(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """The trainer's ``log``, with memory in each row of training, but not of evaluation, nor in the summary."""
        step = self.trainer.state.global_step
        is_training = "train_runtime" not in logs and not any(name.startswith("eval_") for name in logs)
        if is_training and step >= self._logged + self.memory_every:
            self._logged = step
            logs.update(read_memory().as_logs())
        return self._log(logs, *args, **kwargs)


def _has_policy(model: nn.Module) -> bool:
    """Whether it is PPO's pair of policy and value model, of which the policy alone is saved."""
    return type(unwrapped(model)).__name__ == "PolicyAndValueWrapper"


def _is_in_parts(folder: Path) -> bool:
    """Whether a checkpoint has only what each rank wrote for itself, because the user chose that."""
    from pytest_trlcompat.checks._saved import open_saved

    parts = [*folder.glob("global_step*"), *folder.glob("pytorch_model_fsdp*_rank*.bin")]
    adapters = folder.glob("*/adapter_model.*")  # of other names than PEFT's own
    return bool(parts) and open_saved(folder) is None and not any(adapters)
