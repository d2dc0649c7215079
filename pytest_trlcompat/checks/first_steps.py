"""What is checked around the optimizer's first steps, until it is decided.

Checks before a step hook into the step itself: that of torch's optimizer, or under DeepSpeed that of the engine, where
Accelerate's ``backward`` steps as well. ``on_pre_optimizer_step`` comes too late under DeepSpeed, and neither PPO nor
older releases of Transformers call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_trlcompat.checks._models import is_engine, scales_loss
from pytest_trlcompat.checks._ranks import CheckError, OddError, any_rank, listed, together
from pytest_trlcompat.checks.batches import check_batches, shares_batches
from pytest_trlcompat.checks.forwards import BATCHES, Forwards
from pytest_trlcompat.checks.gradients import (
    ADVICE,
    GradientReport,
    Owners,
    complaint,
    read_gradients,
    zero_beside_others,
)
from pytest_trlcompat.checks.logits import LogitsCalls
from pytest_trlcompat.checks.parameters import TOO_SMALL, WeightsBefore, check_finite, check_moved, steps_show
from pytest_trlcompat.checks.repeat import check_repeatable

__all__ = ["FIRST", "UNDECIDED", "FirstSteps", "steps_in_backward"]

UNDECIDED: Any = object()
"""What a check returns while it cannot judge yet."""
FIRST = frozenset({"logits", "gradients", "moved", "data", "forward", "steps"})
"""The checks that begin here."""
_STEPS = 3
"""Steps after which it is known whether gradients are cleared: what the first leaves, and the second."""


class FirstSteps:
    """From the beginning of a training until every check of its first steps is decided."""

    def __init__(self, callback: Any, model: nn.Module, optimizer: Any) -> None:
        self.callback = callback
        self.model = model
        self.optimizer = optimizer
        self.attempts = 0
        """Steps that the optimizer was about to make."""
        self.attempts_per_step: list[int] = []
        """Attempts within each step of the trainer."""
        self.looks = 0
        """How often the gradients could be judged."""
        self.stepless = 0
        self.unmoved = 0
        self.rewarded = False
        """Whether equal rewards may leave gradients at zero for any number of steps."""
        enabled = callback.checks
        in_backward = steps_in_backward(optimizer)
        # Such an optimizer keeps no gradients, and changes weights before all of them have come.
        self.undecided = set(FIRST & enabled) - ({"gradients", "moved", "steps"} if in_backward else set())
        self.before: WeightsBefore | None = None
        self.gradients: GradientReport | None = None
        self.poisoned: GradientReport | None = None
        self.logits: LogitsCalls | None = None
        self._batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.forwards: Forwards | None = None
        self._unhook: Callable[[], None] = lambda: None
        try:
            self._begin()
        except Exception:
            self.close()  # leave no hook behind
            raise

    def _begin(self) -> None:
        trainer, enabled = self.callback.trainer, self.callback.checks
        self.before = WeightsBefore(self.model) if "moved" in self.undecided else None
        compiled = bool(getattr(trainer.args, "torch_compile", False))  # a hook would make it compile again
        self.logits = LogitsCalls(self.model) if "logits" in self.undecided and not compiled else None
        repeat = self._keep_batch if "repeat" in enabled else None
        if self.undecided - {"logits"} or repeat is not None:
            self.forwards = Forwards(trainer, self.model, modules=not compiled, on_first=repeat)
        if self.forwards is not None or self.logits is not None:
            self._unhook = _before_each_step(self.model, self.optimizer, self.before_step)

    # ---- events

    def before_step(self) -> None:
        """Look while the gradients are there and the weights are still those that gave them."""
        self.attempts += 1
        if self.forwards is not None:
            self.forwards.stepped()
        if self.logits is not None or self._batch is not None or self._is_worth_a_look():
            self.callback.guard_first_steps(self._look)

    def _look(self) -> None:
        self._check_logits()
        if self._batch is not None:
            (args, kwargs), self._batch = self._batch, None
            self.callback.run("repeat", lambda: check_repeatable(self.model, *args, **kwargs))
        if self._is_worth_a_look():
            self._look_at_gradients()

    def after(self) -> None:
        """The trainer has made a step; the optimizer made one, several or, where loss scaling skips it, none."""
        if not self.undecided:
            self.callback.end_first_steps()
            return
        self.attempts_per_step.append(self.attempts - sum(self.attempts_per_step))
        if self.forwards is not None and self.forwards.error is not None:
            raise self.forwards.error
        self._check_logits()
        self._check_weights()
        if self.forwards is not None:
            self._check_forwards(self.forwards)
        self._check_steps()
        if self.forwards is not None:
            self.forwards.next_step()
        waits_for_gradients = self.undecided & {"gradients", "moved"}
        if len(self.attempts_per_step) >= self.callback.patience or not self.undecided:
            self._stop_listening()
            self.undecided &= waits_for_gradients
        if not self.undecided:
            self.callback.end_first_steps()

    def give_up(self) -> None:
        """Stop looking. Hooks are removed at the end of the step, since the optimizer is running them now."""
        self.undecided.clear()
        self._batch = None
        if self.logits is not None:
            self.logits.close()
            self.logits = None

    def close(self) -> None:
        self._unhook()
        self._stop_listening()
        self.before = None

    def _stop_listening(self) -> None:
        if self.logits is not None:
            self.logits.close()
            self.logits = None
        if self.forwards is not None:
            self.rewarded = self.forwards.reuses_batches
            self.forwards.close()
            self.forwards = None

    def _keep_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch = args, kwargs

    def _is_worth_a_look(self) -> bool:
        """Every step at first; after ``patience`` steps at powers of two, as when all rewards stay equal."""
        patience = self.callback.patience
        if not self.undecided & {"gradients", "moved"}:
            return False
        return self.attempts <= patience or self.attempts & (self.attempts - 1) == 0

    # ---- logits, gradients

    def _check_logits(self) -> None:
        self.undecided.discard("logits")
        if self.logits is not None:
            calls, self.logits = self.logits, None
            calls.close()
            self.callback.run("logits", calls.check)

    def _look_at_gradients(self) -> None:
        if self.forwards is not None and not any_rank([self.forwards.informative])[0]:
            # All rewards of each group are equal, so gradients may be zeros.
            return
        outcome = self.callback.run(
            "gradients", lambda: read_gradients(self.model, ignore=self.callback.ignore), quiet=True
        )
        report: GradientReport | None = outcome.found
        if report is None:
            self.undecided -= {"gradients", "moved"}
        elif report.all_zero and self.forwards is None and self.rewarded:
            return
        elif report.not_finite:
            self.poisoned = None if self._scales_loss() else report
        else:
            self.looks += 1
            if not report.all_zero and any(group["lr"] > 0 for group in self.optimizer.param_groups):
                self.gradients = report
            if "gradients" in self.undecided:
                self._judge(report)

    def _judge(self, report: GradientReport) -> None:
        """Gradients of zeros may be right once, but not for many steps."""
        missing, zero = self._cut_off(report)
        waits = self.looks < self.callback.patience if report.all_zero else zero and not self._has_moved()
        if waits and not missing:
            return
        problems = []
        if missing:
            problems.append(f"none came to {listed(missing)}: the graph does not lead there; {ADVICE}")
        if report.all_zero:
            problems.append(
                f"nothing but zeros came to {listed(report.zero)} in {self.looks} steps: is the loss constant or "
                "detached?"
            )
        elif zero:
            problems.append(f"nothing but zeros came to {listed(zero)} while others were reached; {ADVICE}")

        def say() -> GradientReport:
            if problems:
                raise OddError(complaint(report, problems), report)
            return report

        self.undecided.discard("gradients")
        self.callback.run("gradients", say)

    def _has_moved(self) -> bool:
        return "moved" not in self.undecided if self.before is not None else self.looks > 1

    def _cut_off(self, report: GradientReport) -> tuple[list[str], list[str]]:
        """Parameters without a gradient, and with zeros, of modules that took part and got nothing else.

        An expert that no token chose and a vision tower without an image took no part. All tokens of an expert that did
        may be masked, so experts count only if none of them is reached.
        """
        owners = Owners(self.model)
        reached = {owners.of(name) for name in report.reached}
        suspects = [name for name in report.missing if owners.of(name) not in reached]
        zero = zero_beside_others(self.model, report)
        if not suspects and not zero:
            return [], []
        used = None if self.forwards is None else self.forwards.used
        names = sorted({*suspects, *zero})
        flags = any_rank([used is not None and owners.of(name) in used for name in names])
        taking_part = {name for name, flag in zip(names, flags, strict=True) if flag}
        if any("expert" in name for name in report.reached):
            taking_part = {name for name in taking_part if "expert" not in name}
        return [name for name in suspects if name in taking_part], [name for name in zero if name in taking_part]

    def _scales_loss(self) -> bool:
        return scales_loss(self.callback.trainer, self.model)

    # ---- weights

    def _check_weights(self) -> None:
        if self.poisoned is not None:
            report, self.poisoned = self.poisoned, None
            self.undecided -= {"gradients", "moved"}
            self.callback.run("gradients", lambda: self._judge_poisoned(report))
        if "moved" not in self.undecided or self.before is None:
            return
        if self.gradients is None:
            self._check_stepless()
            return
        before, gradients = self.before, self.gradients
        self.unmoved += 1

        def check() -> Any:
            try:
                return check_moved(self.model, before, gradients, optimizer=self.optimizer, ignore=self.callback.ignore)
            except OddError:
                raise
            except CheckError as error:  # one small step may change no weight of type bfloat16
                if self.unmoved < self.callback.patience:
                    return UNDECIDED
                text = f"{error}. {self.unmoved} steps were made with gradients and a learning rate"
                norm = self.callback.gradient_norm()
                if not steps_show(self.model, self.optimizer, norm, ignore=self.callback.ignore):
                    raise OddError(f"{text}, {TOO_SMALL}", error.found) from error
                raise CheckError(text, error.found) from error

        # Whether it waits is the same on every rank, since ranks have exchanged what moved.
        if self.callback.run("moved", check).found is not UNDECIDED:
            self.undecided.discard("moved")

    def _judge_poisoned(self, report: GradientReport) -> GradientReport:
        text = complaint(report, [f"NaN or infinity came to {listed(report.not_finite)}"])
        try:
            check_finite(self.model, ignore=self.callback.ignore)
        except OddError:
            raise
        except CheckError as error:
            raise CheckError(f"{text}; {error}", report) from error
        raise OddError(f"{text}; weights are finite, so the step was skipped", report)

    def _check_stepless(self) -> None:
        """The trainer makes steps, but its optimizer makes none."""
        skipped = bool(getattr(self.callback.trainer.accelerator, "optimizer_step_was_skipped", False))
        self.stepless = 0 if self.attempts_per_step[-1] or skipped else self.stepless + 1
        if self.stepless != self.callback.patience or self.before is None:
            return
        before, count = self.before, self.stepless

        def check() -> None:
            with together("the weights after several steps"):
                moved = bool(before.moved(self.model))
            if any_rank([moved])[0]:
                raise OddError(
                    f"expected the trainer's optimizer to make steps, but weights change without one in {count}: what "
                    "another optimizer does is not checked"
                )
            raise CheckError(
                f"expected the optimizer to make a step for each of the trainer's, but it made none in {count}, and no "
                "weight changed"
            )

        self.undecided -= {"moved", "gradients", "steps"}
        self.callback.run("moved", check)

    # ---- forwards, steps

    def _check_forwards(self, forwards: Forwards) -> None:
        run = self.callback.run
        if "forward" in self.undecided and (forwards.losses or len(self.attempts_per_step) > 1):
            self.undecided.discard("forward")
            if forwards.losses:
                run("forward", lambda: self._judge_forwards(forwards))
        if "data" in self.undecided and (len(forwards.batches) >= BATCHES or not forwards.losses):
            self.undecided.discard("data")
            if forwards.losses and not shares_batches(self.callback.trainer):
                run("data", lambda: check_batches(forwards.batches, may_repeat=forwards.reuses_batches))

    def _judge_forwards(self, forwards: Forwards) -> dict[str, Any]:
        with together("the first forwards"):
            report = {
                "losses": forwards.losses,
                "precisions": sorted(str(precision).removeprefix("torch.") for precision in forwards.precisions),
            }
            problems = []
            if forwards.not_finite and not self._scales_loss():
                problems.append(f"{forwards.not_finite} of {forwards.losses} losses are NaN or infinite")
            if forwards.in_eval_mode:
                problems.append(
                    "the model is in eval mode while it trains: dropout is off, and what it does in train(), such as "
                    "freezing a part, is not done; call model.train()"
                )
            asked = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
                self.callback.trainer.accelerator.mixed_precision
            )
            if asked is not None and forwards.precisions and asked not in forwards.precisions:
                problems.append(
                    f"mixed precision in {asked} was asked for, and the linear layers returned {report['precisions']} "
                    "alone"
                )
            if problems:
                raise OddError("expected forwards as asked for, but " + "; ".join(problems), report)
        return report

    def _check_steps(self) -> None:
        """Whether gradients are cleared after a step, and whether there is one step at a time."""
        if "steps" not in self.undecided or self.forwards is None or len(self.attempts_per_step) < _STEPS:
            return
        self.undecided.discard("steps")
        forwards, attempts = self.forwards, self.attempts_per_step[:_STEPS]
        if not forwards.losses:
            # A training loop that calls no compute_loss, like PPO's, makes several steps at a time.
            return

        def check() -> dict[str, Any]:
            with together("the optimizer's steps"):
                report = {"made": attempts, "left_over": forwards.left_over}
                if len(forwards.left_over) > 1 and all(forwards.left_over):
                    raise CheckError(
                        f"expected gradients to be cleared after a step, but {forwards.left_over[-1]} parameters still "
                        f"had those of the step before when the next backward began, {len(forwards.left_over)} times "
                        "in succession: they add up. Call zero_grad() after each step",
                        report,
                    )
                if max(attempts) > 1:
                    raise OddError(
                        f"expected one step of the optimizer for each of the trainer's, but it made {attempts}: its "
                        "state and the schedule run ahead",
                        report,
                    )
            return report

        self.callback.run("steps", check)


def _before_each_step(model: nn.Module, optimizer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before each step of the optimizer; returns a function that ends that."""
    if is_engine(model):
        return _before_each_step_of(model, call, model.is_gradient_accumulation_boundary)
    while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "register_step_pre_hook"):  # none of torch's
        return _before_each_step_of(optimizer, call, lambda: True)
    handle = optimizer.register_step_pre_hook(lambda *_: call())
    return lambda: handle.remove()


def _before_each_step_of(stepping: Any, call: Callable[[], None], steps: Callable[[], bool]) -> Callable[[], None]:
    original, was_replaced = stepping.step, "step" in vars(stepping)

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        # DeepSpeed's engine.step is called for each micro-batch; it steps at boundaries of accumulation alone.
        if steps():
            call()
        return original(*args, **kwargs)

    def end() -> None:
        if vars(stepping).get("step") is not step:
            # Other code has replaced the step since, and may call ours.
            return
        if was_replaced:
            stepping.step = original
        else:
            del stepping.step

    stepping.step = step
    return end


def steps_in_backward(optimizer: Any) -> bool:
    """Whether an optimizer steps while gradients come and keeps none: LOMO, and GaLore layer by layer."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return any("LayerWiseDummy" in base.__name__ or "Lomo" in base.__name__ for base in type(optimizer).__mro__)
