"""Has anything that trains moved by the end of a training, and if not, why?

Each rank examines its own shards, and ranks exchange a byte for each question, once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from pytest_trlcompat.checks._models import named_parameters, without
from pytest_trlcompat.checks._ranks import OddError, any_rank, together
from pytest_trlcompat.checks.forwards import Forwards
from pytest_trlcompat.checks.parameters import WeightsBefore

__all__ = ["Standstill"]


class Standstill:
    """What a training did since it began, judged at its end.

    It is not judged before, since a warmup may begin with a learning rate of 0, and rewards may be equal for a while.

    Args:
        before: the weights when the training began.
        forwards: the listener to the first batches, or ``None`` if there is none.
        step: the trainer's global step when the training began.
    """

    def __init__(self, before: WeightsBefore, forwards: Forwards | None, step: int) -> None:
        self._before = before
        self._forwards = forwards
        self._began_at = step
        # The largest learning rate so far; empty while no step has begun.
        self._rates: list[float] = []
        self._norm: float | None = None

    def step_begins(self, optimizer: Any) -> None:
        """Note the largest learning rate of a step."""
        self._rates = [max([*self._rates, *(float(group["lr"]) for group in optimizer.param_groups)])]

    def logged(self, logs: dict[str, Any]) -> None:
        """Note the largest gradient norm; one that is not finite counts as infinite."""
        norm = logs.get("grad_norm")
        if isinstance(norm, int | float):
            self._norm = max(self._norm or 0.0, float(norm) if math.isfinite(norm) else math.inf)

    def check(self, model: nn.Module, step: int, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """Some trainable weight differs from its value at the beginning; collective if there are several ranks.

        Args:
            step: the trainer's global step now.

        Returns:
            ``steps``, how many the trainer made.

        Raises:
            OddError: on every rank: no step was made, or no trainable weight changed. The message names the reason if
                the rates, labels, advantages or norms show it.
        """
        report = {"steps": step - self._began_at}
        with together("whether anything moved"):
            trainable = {
                name for name, parameter in without(named_parameters(model), ignore) if parameter.requires_grad
            }
            here = self._signals(bool(self._before.moved(model) & trainable))
        moved, rated, has_labels, labelled, has_advantages, advantage, normed, not_zero = any_rank(here)
        if moved:
            return report
        with together("whether anything moved"):
            if not report["steps"]:
                raise OddError(
                    "expected steps, but the trainer made none: look at max_steps, num_train_epochs, the number of "
                    "rows, and where a training is resumed",
                    report,
                )
            if not rated and self._rates:
                reason = "the learning rate was 0 in every step"
            elif has_labels and not labelled:
                reason = "every label was masked (-100) in all batches that were looked at"
            elif has_advantages and not advantage:
                reason = (
                    "every advantage was 0 in all batches that were looked at, as where all rewards of each group are "
                    "equal"
                )
            elif normed and not not_zero:
                reason = "every gradient norm in the log is 0"
            else:
                reason = "why cannot be told from learning rates, labels, advantages and logged gradient norms"
            raise OddError(
                f"expected training to change weights, but in {report['steps']} steps no trainable one has changed: "
                f"{reason}",
                report,
            )

    def _signals(self, moved: bool) -> list[int]:
        heard = self._forwards
        labels, advantages = (None, None) if heard is None else (heard.counts_a_label, heard.has_an_advantage)
        return [
            moved,
            any(rate != 0 for rate in self._rates),
            labels is not None,
            bool(labels),
            advantages is not None,
            bool(advantages),
            self._norm is not None,
            bool(self._norm),
        ]
