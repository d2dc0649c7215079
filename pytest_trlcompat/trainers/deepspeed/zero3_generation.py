"""Cure of ``grpo-zero3-optimizer``: generation under ZeRO-3 with DeepSpeed's hooks lifted, whoever asks.

To generate, TRL gathers the parameters once and takes DeepSpeed's hooks off the modules, which would partition and
gather them again for every token. The hooks belong to the engine's optimizer, and TRL looks for it on whatever it is
given. Given the bare module, it ends in ``object has no attribute 'optimizer'``, or leaves every hook in place without
a word; and its own GRPO trainer may give it the bare module. The cure finds the engine. Of ``strategy-memory`` as well:
where the trainer does not hand ``ds3_gather_for_generation`` on, everything is gathered though the user said no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import TRANSFORMERS_GENERATES, ZERO3, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, class_uses
from pytest_trlcompat.trainers.deepspeed.deepspeed_hooks import offload_of, working_add_hooks

__all__ = ["ZeRO3GenerationMixin", "engine_of", "unwrap_model_for_generation"]

REMOVE_HOOKS = PatchPoint("trl.models.utils:remove_hooks")


def engine_of(model: Any, accelerator: Any) -> Any:
    """The DeepSpeed engine that trains ``model``; ``model`` itself where it is one, or where there is none."""
    if hasattr(model, "optimizer"):
        return model
    wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)
    engine = getattr(wrapper, "engine", None)
    return engine if engine is not None and engine.module is model else model


@contextmanager
def unwrap_model_for_generation(model: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """``trl.models.utils.unwrap_model_for_generation``, right for a bare module and with every DeepSpeed.

    Takes what TRL's takes and yields what it yields. Under ZeRO-3 DeepSpeed's hooks are off while the context lasts,
    and back afterwards, also when generation has failed.
    """
    upstream = import_module("trl.models.utils").unwrap_model_for_generation
    unwrap = _right_for_bare_modules(upstream)
    with working_add_hooks(), unwrap(model, accelerator, *args, **kwargs) as unwrapped:
        yield unwrapped


class ZeRO3GenerationMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` generate under ZeRO-3 without DeepSpeed's hooks.

    It knows by looking at what TRL passes; where that is the engine, all that is left to do is to put the hooks back
    when generation fails. What goes with putting them back is :mod:`.deepspeed_hooks`' matter.
    """

    _kinds: ClassVar = {
        "grpo": ("FSDPOffloadGenerationMixin", "its _around_generation calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION, patch_points.ADD_HOOKS, REMOVE_HOOKS)
    _needed: ClassVar = (ZERO3, TRANSFORMERS_GENERATES)
    accelerator: Any
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._hooks_lifted_in_generation(), super()._around_generation():
            yield

    @contextmanager
    def _hooks_lifted_in_generation(self) -> Iterator[None]:
        if not _is_zero3(self.accelerator):
            yield
            return
        cure = ZeRO3GenerationMixin.__name__
        with (
            working_add_hooks(),
            self._unwrapping(_gathering_as_asked(self.args), cure),
            self._unwrapping(_right_for_bare_modules, cure),
        ):
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if class_uses(trainer_class, "model_wrapped", but=("transformers.",)):
            return under(trainer, "hooks come back also when generation fails", *cls._needed)
        return under(trainer, "TRL generates with the bare module", *cls._needed)


def _gathering_as_asked(arguments: Any) -> Callable[..., Any]:
    """Hand ``ds3_gather_for_generation`` on where TRL says nothing of gathering, as its trainer of 0.15 to generate."""

    def heeding(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def unwrap(model: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and hasattr(arguments, "ds3_gather_for_generation"):
                kwargs.setdefault("gather_deepspeed3_params", arguments.ds3_gather_for_generation)
            return upstream(model, accelerator, *args, **kwargs)

        return unwrap

    return heeding


def _right_for_bare_modules(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap(model: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not _is_zero3(accelerator):
            with upstream(model, accelerator, *args, **kwargs) as unwrapped:
                yield unwrapped
            return
        # TRL looks for the optimizer on what it is given: on a bare module trl 0.14 raises, later ones lift no hook.
        engine = engine_of(model, accelerator)
        with _hooks_restored(engine), _nothing_to_lift(engine), upstream(engine, accelerator, *args, **kwargs) as whole:
            yield whole

    return unwrap


@contextmanager
def _hooks_restored(engine: Any) -> Iterator[None]:
    """Put the hooks back when generation has failed, after which TRL does not."""
    offload = offload_of(engine)
    lifted = bool(getattr(offload, "forward_hooks", None))
    try:
        yield
    except BaseException:
        if lifted and not offload.forward_hooks:
            import_module("trl.models.utils").add_hooks(engine)
        raise


@contextmanager
def _nothing_to_lift(engine: Any) -> Iterator[None]:
    """Let trl 0.14.0 gather the parameters of a module that no engine trains, and lift nothing."""
    if hasattr(engine, "optimizer"):
        yield
        return
    with (
        replaced(REMOVE_HOOKS, _doing_nothing, ZeRO3GenerationMixin.__name__),
        replaced(patch_points.ADD_HOOKS, _doing_nothing, ZeRO3GenerationMixin.__name__),
    ):
        yield


def _doing_nothing(_upstream: Callable[..., None]) -> Callable[..., None]:
    return lambda model: None


def _is_zero3(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3
