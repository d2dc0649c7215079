"""Cure of ``deepspeed-hook-registration``, ``ppo-stale-trace`` and ``grpo-lora-stale-trace``: hooks that come back.

After generation under ZeRO-3 TRL registers DeepSpeed's hooks again, by a private method that DeepSpeed has renamed. A
TRL that knows one name alone ends the first step with a DeepSpeed that has the other: ``'DeepSpeedZeRoOffload' object
has no attribute '_register_hooks_recursively'``. The cure registers them by whichever name there is.

Registering the hooks numbers the modules anew. If DeepSpeed was recording by the old numbers in which order modules are
used, it looks them up by the new ones at the next forward: ``pop from an empty deque``. It was where a step had one
forward and generation did not pass the wrapped model: PPO generates with the policy inside of it, and GRPO with what an
adapter wraps. The cure drops the record, as later releases of TRL and DeepSpeed do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ZERO3, installed, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, original, replaced
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, function_uses

__all__ = [
    "DeepSpeedHooksMixin",
    "PPODeepSpeedHooksMixin",
    "add_hooks",
    "forget_trace",
    "hooks_activity",
    "offload_of",
    "working_add_hooks",
]

OLD_REGISTER = PatchPoint(
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_hooks_recursively", "<0.16.4"
)
NEW_REGISTER = PatchPoint(
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module", ">=0.16.4"
)

_NAMES = ("_register_deepspeed_module", "_register_hooks_recursively")
"""What DeepSpeed calls the method, from 0.16.4 on and before."""


def offload_of(engine: Any) -> Any:
    """What holds an engine's hooks: its ZeRO-3 optimizer's offload, or, without an optimizer, the offload itself."""
    optimizer = getattr(engine, "optimizer", None)
    return getattr(optimizer, "parameter_offload", optimizer)


def add_hooks(engine: Any) -> None:
    """Register DeepSpeed's ZeRO-3 hooks on the module of ``engine``, by whichever method this DeepSpeed has.

    The record of the order of modules is left; see :func:`forget_trace`.

    Raises:
        RuntimeError: the engine has no ZeRO-3 hooks, or DeepSpeed has renamed the method once more.
    """
    offload = offload_of(engine)
    register = next((getattr(offload, name) for name in _NAMES if hasattr(offload, name)), None)
    if register is None:
        raise RuntimeError(
            f"asked to register ZeRO-3 hooks on {type(engine).__name__}, but {type(offload).__name__} has none of "
            f"{', '.join(_NAMES)}; is this an engine of ZeRO stage 3, and of a DeepSpeed that TRL knows?"
        )
    register(offload.module)


class DeepSpeedHooksMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` register DeepSpeed's hooks after each generation.

    It knows by trying: TRL's own function runs first, ours only where that asks DeepSpeed for a method which it has
    not, and what DeepSpeed has recorded is dropped if it is still there. The order is then recorded anew.
    """

    _kinds: ClassVar = {
        "grpo": ("ZeRO3FusedHeadMixin", "its _around_generation calls this one's"),
        "rloo": ("FSDPAdapterGenerationMixin", "its _around_generation calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.ADD_HOOKS, OLD_REGISTER, NEW_REGISTER)
    _needed: ClassVar = (ZERO3,)

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with _working_under_zero3(self), super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return hooks_activity(trainer)


class PPODeepSpeedHooksMixin(Cure):
    """The same for a subclass of TRL's PPO trainer, which generates within ``train``."""

    _kinds: ClassVar = {
        "ppo": ("PPONewerTrainerMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.ADD_HOOKS,
        OLD_REGISTER,
        NEW_REGISTER,
        *patch_points.ppo_methods("train"),
        *patch_points.ppo_methods("generate_completions"),
    )
    _needed: ClassVar = (ZERO3,)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _working_under_zero3(self):
            upstream: Any = super()
            return upstream.train(*args, **kwargs)

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        with _working_under_zero3(self):
            upstream: Any = super()
            return upstream.generate_completions(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return hooks_activity(trainer)


def hooks_activity(trainer: Any) -> Activity:
    """What :func:`working_add_hooks` comes to for a trainer, or, of ``None``, by what is installed."""
    if not installed("deepspeed"):
        return Activity(False, "DeepSpeed is not installed")
    upstream = original(patch_points.ADD_HOOKS, DeepSpeedHooksMixin.__name__)
    if upstream is None or not any(map(_registers_by, _NAMES)):
        return Activity(None, f"{ZERO3.where}: seen when hooks are registered")
    if not any(_registers_by(name) and function_uses(upstream, name) for name in _NAMES):
        return under(trainer, "TRL asks DeepSpeed for a method that it has not", ZERO3)
    if function_uses(upstream, "_invalidate_trace"):
        return Activity(False, "TRL registers DeepSpeed's hooks, and drops its record")
    return under(trainer, "TRL keeps DeepSpeed's record of the order of modules", ZERO3)


def _registers_by(name: str) -> bool:
    """Whether the installed DeepSpeed has a method of that name."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return hasattr(DeepSpeedZeRoOffload, name)


def forget_trace(engine: Any) -> None:
    """Drop DeepSpeed's record of the order in which modules are used, which the next step makes anew.

    Does nothing where there is none: ``engine`` is no engine, or not one of ZeRO stage 3.
    """
    coordinator = getattr(offload_of(engine), "param_coordinator", None)
    if coordinator is not None and not coordinator.is_invalid_trace():  # DeepSpeed refuses to drop it twice
        coordinator._invalidate_trace()


def working_add_hooks() -> AbstractContextManager[None]:
    """Lend TRL an ``add_hooks`` that works with every DeepSpeed, while the context lasts."""
    return replaced(patch_points.ADD_HOOKS, _working, DeepSpeedHooksMixin.__name__)


def _working_under_zero3(trainer: Any) -> AbstractContextManager[None]:
    return working_add_hooks() if ZERO3.holds(trainer) else nullcontext()


def _working(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
    def add_hooks_and_forget_trace(engine: Any) -> None:
        try:
            upstream(engine)
        except AttributeError as error:
            # TRL before 0.16 knows only the old name, from 1.13 on only the new one.
            if error.name not in _NAMES:
                raise
            add_hooks(engine)
        forget_trace(engine)

    return add_hooks_and_forget_trace
