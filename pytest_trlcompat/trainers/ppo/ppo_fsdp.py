"""Cure of ``ppo-fsdp-rollout``: PPO under FSDP1 and FSDP2, with the root's parameters at hand.

TRL's PPO trainer shards one wrapper around policy and value model, then generates with the policy and scores with the
value model by themselves. The wrapper's own parameters (embeddings, final norms, heads) are gathered only when the
wrapper is called: ``'weight' must be 2-D``, under FSDP2 ``got mixed torch.Tensor and DTensor``. And it names no layer
class, so that everything is in the wrapper's one unit, which some releases of Accelerate refuse under FSDP2: ``no
attribute '_no_split_modules'``. Where the user names the class, the value model's layers are met twice, as the wrapper
registers their parent once more, as ``critic_backbone``: ``is already wrapped by``. The cure gathers those parameters
for the rollout, and gives the wrapper the layer classes and one registration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP, fsdp_version, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced
from pytest_trlcompat.trainers.curing.trl_ppo import ppo_module
from pytest_trlcompat.trainers.fsdp.fsdp_generation import root_parameters_gathered
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import is_sharded

__all__ = ["PPOFSDPMixin", "root_parameters_unsharded"]


@contextmanager
def root_parameters_unsharded(model: nn.Module) -> Iterator[None]:
    """Gather the root unit's parameters of an FSDP1 or FSDP2 ``model`` while the context lasts; collective.

    In the dtype in which the mixed precision policy computes. The units below stay sharded and are gathered one at a
    time, when called. Not to be trained with. Does nothing for a model that is not sharded.
    """
    if isinstance(model, FullyShardedDataParallel):
        with root_parameters_gathered(model):
            yield
    elif is_sharded(model):
        root: Any = model
        # Or the first unit below that is called takes itself for the root. FSDP2 has no public way to say it.
        root._get_fsdp_state()._lazy_init()
        root.unshard()
        try:
            yield
        finally:
            root.reshard()
    else:
        yield


class PPOFSDPMixin(Cure):
    """Lets a subclass of TRL's PPO trainer train under FSDP1 and FSDP2. Does nothing under any other strategy.

    Layers are sharded one by one, as those of the policy alone would be; ``transformer_cls_to_wrap`` is respected.
    Reference and reward model stay whole on each rank.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOSaveMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        *patch_points.in_ppo("PolicyAndValueWrapper.__init__"),
        *patch_points.in_ppo("unwrap_model_for_generation"),
        *patch_points.in_ppo("get_reward"),
        *patch_points.ppo_methods("train"),
        *patch_points.ppo_methods("generate_completions"),
        *patch_points.FSDP1_ROOT,
    )
    accelerator: Any
    model: Any
    _rolls_out = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(_point("PolicyAndValueWrapper.__init__"), _made_for_fsdp, PPOFSDPMixin.__name__):
            super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._rollout_unsharded():
            upstream: Any = super()
            return upstream.train(*args, **kwargs)

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._rollout_unsharded():
            upstream: Any = super()
            return upstream.generate_completions(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "upstream rolls out beneath the wrapper that FSDP shards", FSDP)

    @contextmanager
    def _rollout_unsharded(self) -> Iterator[None]:
        if fsdp_version(self.accelerator) is None or self._rolls_out:
            yield
            return
        once = _Once(self.model)
        with (
            replaced(_point("unwrap_model_for_generation"), once.around_context, PPOFSDPMixin.__name__),
            replaced(_point("get_reward"), once.around_call, PPOFSDPMixin.__name__),
        ):
            self._rolls_out = True  # train calls generate_completions
            try:
                yield
            finally:
                self._rolls_out = False


class _Once:
    """Gathers a model's root parameters around what it is asked to, unless they are gathered already."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gathered = False

    @contextmanager
    def _gather(self) -> Iterator[None]:
        # Up to TRL 0.10 values are computed while the model is unwrapped, and so gathered already.
        if self._gathered:
            yield
            return
        with root_parameters_unsharded(self._model):
            self._gathered = True
            try:
                yield
            finally:
                self._gathered = False

    def around_context(self, unwrap: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with unwrap(*args, **kwargs) as unwrapped, self._gather():
                yield unwrapped

        return unwrap_model_for_generation

    def around_call(self, score: Callable[..., Any]) -> Callable[..., Any]:
        def get_reward(*args: Any, **kwargs: Any) -> Any:
            with self._gather():
                return score(*args, **kwargs)

        return get_reward


def _point(name: str) -> PatchPoint:
    return patch_points.ppo(name, ppo_module().__name__)


def _made_for_fsdp(upstream: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        upstream(self, *args, **kwargs)
        # Upstream has made its accelerator by now.
        if AcceleratorState().distributed_type == DistributedType.FSDP:
            trainer_class: Any = type(self)
            self.__class__ = _for_fsdp(trainer_class)
            # The value model has registered it, too: FSDP would wrap its layers a second time.
            del self._modules["critic_backbone"]

    return __init__


@functools.cache
def _for_fsdp(upstream: Any) -> type[nn.Module]:
    class PolicyAndValueWrapper(upstream):
        """Upstream's, with the layers that FSDP shall shard, each of them registered once."""

        # Accelerate before 1.2 asks every model that it wraps; up to trl 0.11 the wrapper has no such attribute.
        _tied_weights_keys = None

        @property
        def critic_backbone(self) -> nn.Module:
            backbone: nn.Module = getattr(self.value_model, self.value_model.base_model_prefix)
            return backbone

        @property
        def _no_split_modules(self) -> list[str]:
            return sorted({*(self.policy._no_split_modules or ()), *(self.value_model._no_split_modules or ())})

    return PolicyAndValueWrapper
