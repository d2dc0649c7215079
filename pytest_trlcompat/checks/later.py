"""What is checked as long as a training goes on, by samples, and less and less often."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from pytest_trlcompat.checks._models import named_parameters, scales_loss, without
from pytest_trlcompat.checks._ranks import CheckError, OddError, any_rank, together, world_size
from pytest_trlcompat.checks.parameters import TOO_SMALL, WeightsBefore, steps_show
from pytest_trlcompat.checks.replicas import check_replicas
from pytest_trlcompat.checks.schedule import check_schedule, scheduler_steps

__all__ = ["Later"]

_FIRST_SAMPLE, _SAMPLE = 1 << 16, 1 << 12
"""Elements of each parameter that are read around the first step, and later."""
_FIRST_SCHEDULE = 4
"""Steps after which the schedule is first checked."""


class Later:
    """Looks at ranks, weights and schedule when a training begins, and after 1, 2, 4, 8 and so on steps of it.

    It reports a problem once; of a check that passes, only the first outcome is kept.

    Args:
        callback: the callback that runs the checks.
        reference: the reference model, if there is one.
    """

    def __init__(self, callback: Any, reference: nn.Module | None) -> None:
        self.callback = callback
        self.trainer = callback.trainer
        self.undone = set(callback.checks)
        self.began_at = self.trainer.state.global_step
        self.scheduled = scheduler_steps(getattr(self.trainer, "lr_scheduler", None))
        self.skipped = 0
        self.norm: float | None = None
        """The norm of the gradients, as it was last logged."""
        self._before: WeightsBefore | None = None
        self._still = self._said_still = False
        self._stepped = 0
        self._check_ranks(_FIRST_SAMPLE, quiet=False)
        if reference is not None and "ranks" in self.undone and world_size() > 1:
            what = "the reference model"
            callback.run("ranks", lambda: check_replicas(reference, most=_FIRST_SAMPLE, what=what), quiet=True)

    def is_due(self, step: int) -> bool:
        """Note that the trainer made a step, and say whether :meth:`look` is due after it."""
        self.skipped += bool(getattr(self.trainer.accelerator, "optimizer_step_was_skipped", False))
        steps, every = step - self.began_at, self.callback.every
        # The first term holds for powers of two.
        return steps >= 1 and (steps & (steps - 1) == 0 or bool(every and steps % every == 0))

    def look(self, step: int) -> None:
        """Look, after a step for which :meth:`is_due` said so."""
        steps = step - self.began_at
        self._check_ranks(_FIRST_SAMPLE if steps == 1 else _SAMPLE, quiet=True)
        self._check_moves(steps - self.skipped)
        if steps >= _FIRST_SCHEDULE:
            self._check_schedule(steps)

    def logged(self, logs: dict[str, Any]) -> None:
        """Look for losses and norms in the log that are not finite."""
        norm = logs.get("grad_norm")
        self.norm = float(norm) if isinstance(norm, int | float) else self.norm
        if "forward" not in self.undone:
            return
        names = ["loss"]
        # With a scaled loss norms may overflow, and the step is skipped.
        if not scales_loss(self.trainer, self.callback.live_model()):
            names.append("grad_norm")
        bad = [
            f"{name} is {logs[name]}"
            for name in names
            if isinstance(logs.get(name), float) and not math.isfinite(logs[name])
        ]
        if bad:
            self.undone.discard("forward")
            self.callback.run(
                "forward", lambda: _say_odd(f"expected finite numbers in the log, but {' and '.join(bad)}")
            )

    def _check_ranks(self, most: int, quiet: bool) -> None:
        if "ranks" not in self.undone or world_size() == 1:
            return
        model, ignore = self.callback.live_model(), self.callback.ignore
        outcome = self.callback.run("ranks", lambda: check_replicas(model, ignore=ignore, most=most), quiet=quiet)
        if not outcome.fine:
            self.undone.discard("ranks")

    def _check_moves(self, stepped: int) -> None:
        """Whether weights go on moving.

        A small learning rate may leave a sample as it was, so the next look reads every element.
        """
        if "moved" not in self.undone:
            return
        model, before = self.callback.live_model(), self._before
        if before is not None and stepped == self._stepped:
            return  # loss scaling has skipped every step since
        self._before, self._stepped = None, stepped
        if not any(group["lr"] > 0 for group in self.trainer.optimizer.param_groups):
            return
        if before is not None:
            named = without(named_parameters(model), self.callback.ignore)
            trainable = {name for name, parameter in named if parameter.requires_grad}
            moved = any_rank([bool(before.moved(model) & trainable)])[0] or self._may_have_overflowed()
            if not moved and self._still:
                outcome = self.callback.run("moved", self._say_still, quiet=True)
                self._said_still |= outcome.odd is not None
                if outcome.error is not None:
                    self.undone.discard("moved")
                    return
            self._still = not moved and not self._still
        self._before = WeightsBefore(model, most=None if self._still else _SAMPLE)

    def _may_have_overflowed(self) -> bool:
        """Whether the loss is scaled and no finite norm in the log shows that steps are made."""
        finite = self.norm is not None and math.isfinite(self.norm)
        return not finite and scales_loss(self.trainer, self.callback.live_model())

    def _say_still(self) -> None:
        """Gradients of zeros move nothing, which is right; other gradients have to move weights.

        What is odd is reported once, and the check goes on: the learning rate may rise, and the norm become known.
        """
        model, ignore = self.callback.live_model(), self.callback.ignore
        shows = steps_show(model, self.trainer.optimizer, self.norm, ignore=ignore)
        with together("whether weights go on moving"):
            if self.norm == 0.0:
                return
            text = (
                "expected steps to go on changing weights, but for two looks in succession no trainable one has "
                "changed, with a learning rate that is not 0"
            )
            known = self.norm is not None and math.isfinite(self.norm)
            if known:
                text += f" and gradients of norm {self.norm:.3g}"
            if known and shows:
                raise CheckError(text)
            if not self._said_still:
                raise OddError(f"{text}, {TOO_SMALL}" if known else text)

    def _check_schedule(self, steps_made: int) -> None:
        scheduler = getattr(self.trainer, "lr_scheduler", None)
        now = scheduler_steps(scheduler)
        if "schedule" not in self.undone or now is None or self.scheduled is None:
            return
        steps, planned = now - self.scheduled, steps_made - self.skipped
        outcome = self.callback.run(
            "schedule",
            lambda: check_schedule(self.trainer.optimizer, scheduler, made=steps, planned=planned),
            quiet=steps_made > _FIRST_SCHEDULE,
        )
        if not outcome.fine:
            self.undone.discard("schedule")


def _say_odd(text: str) -> None:
    raise OddError(text)
