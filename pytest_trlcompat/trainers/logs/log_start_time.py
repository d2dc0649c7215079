"""Cure of ``dpo-log-start`` and ``kto-log-start``: logs for each Transformers, whether or not it passes when training
began.

A newer Transformers calls ``log(logs, start_time)``. An older TRL defines that method with the logs alone, and training
ends with its first log: ``DPOTrainer.log() takes 2 positional arguments but 3 were given``.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["LogStartTimeMixin"]


class LogStartTimeMixin(Cure):
    """Lets a trainer whose ``log`` takes nothing but logs be trained by a Transformers that passes a time with them.

    It knows by the signature of the trainer's method. With the time, which is dropped, Transformers would log how many
    tokens were trained in a second where ``include_num_input_tokens_seen`` asks for it.
    """

    # GRPO's logs have always taken a time.
    _kinds: ClassVar = {
        "trainer": ("TrainSamplerMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("log"),)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        upstream: Any = super()
        if (args or kwargs) and not _takes_more(upstream.log):
            args, kwargs = (), {}
        upstream.log(logs, *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import Trainer

        upstream: Any = super(LogStartTimeMixin, trainer_class)
        if _takes_more(partial(upstream.log, None)):
            return Activity(False, "the trainer's log takes the time")
        if not _takes_more(partial(Trainer.log, None)):
            return Activity(False, "Transformers passes no time")
        return Activity(True, "Transformers passes a time to the trainer's log, which takes none")


def _takes_more(method: Any) -> bool:
    """Whether a bound ``log`` takes anything but logs."""
    return len(inspect.signature(method).parameters) > 1
