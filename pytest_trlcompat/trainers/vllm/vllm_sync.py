"""Cure of how weights reach vLLM: it gets all of them as they are, and the policy stays as it is.

Of ``grpo-vllm-weights``, ``grpo-vllm-merge-drift``, ``grpo-vllm-server-weights``, ``grpo-vllm-dora``,
``grpo-vllm-trained-tokens``, ``grpo-vllm-tied-embeddings`` and ``grpo-vllm-sync-memory``, and of the first three with
RLOO (``rloo-vllm-weights``, ``rloo-vllm-merge-drift``, ``rloo-vllm-server-weights``) and distillation
(``distillation-vllm-weights``, ``distillation-vllm-merge-drift``, ``distillation-vllm-server-weights``). TRL walks the
policy's parameters and hands each to vLLM.

- Under FSDP1 it walks the model beneath FSDP's root, whose parameters (embeddings, final norm, output head) belong to
  no layer and are skipped: the engine generates with those of the checkpoint for good. An adapter is merged while its
  layers are sharded: ``inconsistent tensor size``.
- An adapter is merged into the policy and taken out again, which rounds the frozen weights twice each time: in bfloat16
  they drift away (trl 6688). Under ZeRO-3 all parameters are gathered for that, on each rank (trl 5766).
- Of releases whose trainers hand the weights over themselves, some hand over nothing under FSDP2, or an adapter's
  weights under PEFT's names. The first ones hand over what FSDP1 has flattened, and their engine completes a prompt
  that came before from keys and values of earlier weights (``grpo-vllm-batches``).
- A server's client keeps what it is handed until it has a gibibyte or the last weight, and sends it then. An adapter
  has been taken out of the policy by that time, so that the server generates with the model without it; under FSDP1 the
  memory of the weights has been freed.
- DoRA is merged by an assignment to a weight's data, which changes nothing where FSDP2 has made a DTensor of it: the
  engine generates with the model without its adapter. Rows of the embeddings that PEFT trains by themselves
  (``trainable_token_indices``) go by PEFT's names, which vLLM does not know.
- vLLM has one weight for tied embeddings. An adapter that changes input embeddings or output head alone makes two of
  it: the engine generates with one for both. This cannot be handed over, and is refused.

The cure walks from the root, a layer at a time, merges into a copy of each weight (``_vllm_weights``), and hands a
server copies under FSDP1. It takes the place of TRL's iterator over the weights. Where TRL has none, and walks in the
method that hands them over, that method is given what the cure walks as if it were a plain model. Where it would ask
that for all weights at once, the cure hands them to the engine, which the main process has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import Condition, fsdp_version, trains_adapters, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure, is_ours
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, owner_of
from pytest_trlcompat.trainers.curing.upstream import method_uses
from pytest_trlcompat.trainers.vllm._vllm_weights import (
    Gather,
    is_untied,
    merges,
    parameters_for_engine,
    parameters_of_fsdp1,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["VLLMSyncMixin"]

VLLM_PARAMETERS = PatchPoint("trl.generation.vllm_generation:VLLMGeneration._iter_named_params", ">=1.11")
VLLM_SYNC = PatchPoint("trl.generation.vllm_generation:VLLMGeneration.sync_weights", ">=0.28,<1.11")
VLLM_OF_TRAINERS = (
    patch_points.in_grpo("GRPOTrainer._move_model_to_vllm", ">=0.15,<0.28"),
    PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer._move_model_to_vllm", ">=0.22,<0.28"),
)

_METHOD = "_iter_named_params"
_EARLIER_METHOD = "sync_weights"
_TRAINERS_METHOD = "_move_model_to_vllm"
_FORGET = "reset_prefix_cache"


class VLLMSyncMixin(Cure):
    """Hands vLLM all weights of a policy, under FSDP too, and merges LoRA without touching the policy.

    Of any trainer that generates with TRL's ``VLLMGeneration``, and of GRPO and RLOO where they hand weights over
    themselves, in either mode of vLLM. LoRA of linear layers, DoRA of them and trained tokens are merged here; other
    adapters, and several with DoRA at a time, by TRL as ever. Where TRL does not reset the engine's prefix cache, the
    cure does. Does nothing without vLLM; where TRL hands over the weights as they are; and where a subclass hands them
    over by a method of its own.

    Raises:
        CureError: an adapter makes two weights of tied embeddings, for which vLLM has one. Of a trainer that hands
            weights over itself also: under FSDP, of an adapter that is not merged here TRL would hand over something
            else; or vLLM cannot forget keys and values of earlier weights.
    """

    _kinds: ClassVar = {
        "trainer": ("OwnLogitsMixin", "its __init__ calls this one's"),
        "grpo": ("AdapterReferenceMixin", "its _prepare_inputs calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        VLLM_PARAMETERS,
        VLLM_SYNC,
        *VLLM_OF_TRAINERS,
        patch_points.PREPARE_INPUTS,
        patch_points.FSDP1_LAZY_INIT,
    )
    _needed: ClassVar = (
        Condition(
            "with vLLM",
            "vLLM gets no weights by TRL's VLLMGeneration, nor by a method of TRL's GRPO or RLOO",
            lambda trainer: _generation_of(trainer) is not None or _trainers_point(trainer) is not None,
            needs="vllm",
        ),
        Condition(
            "under FSDP, with LoRA, or where TRL keeps the prefix cache",
            "TRL hands over the weights as they are: neither FSDP1 nor LoRA that is merged here is used, nor FSDP2 "
            "before TRL 0.28",
            lambda trainer: _is_walked_wrongly(trainer) or _keeps_prefixes(trainer),
        ),
    )
    accelerator: Any
    llm: Any
    model: Any
    model_wrapped: Any
    vllm_generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generation = _generation_of(self)
        if (generation is not None or _trainers_point(self) is not None) and is_untied(self.model):
            raise CureError(
                VLLMSyncMixin.__name__,
                expected="an adapter that leaves tied embeddings tied",
                seen="this one makes two weights of them, and vLLM has one",
                packages=("trl", "peft"),
                remedy="Keep them tied (ensure_weight_tying=True in LoraConfig, with modules_to_save), or untie them "
                f"in the checkpoint before{leaving_out(VLLMSyncMixin.__name__)}",
            )
        if not VLLMSyncMixin._activity(type(self), self).active:
            return
        if generation is None:
            self._check()
            self._hand_over_by(self, _TRAINERS_METHOD)
        elif owner_of(VLLM_PARAMETERS, VLLMSyncMixin.__name__) is not None:
            walk = getattr(generation, _METHOD)
            setattr(generation, _METHOD, lambda: self._parameters_for_engine(walk))
        elif owner_of(VLLM_SYNC, VLLMSyncMixin.__name__) is not None:
            self._hand_over_by(generation, _EARLIER_METHOD)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Before 0.16 a reference without the adapter is computed in inference mode, by which FSDP1 must not begin."""
        upstream: Any = super()
        if fsdp_version(self.accelerator) == 1 and _trainers_point(self) is not None and _asks_for_all(self):
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.fsdp import _runtime_utils as fsdp1  # frozen; nothing public does it

            root: Any = self._root()
            if isinstance(root, FullyShardedDataParallel):
                fsdp1._lazy_init(root, root)
        return upstream._prepare_inputs(inputs)

    def _hand_over_by(self, holder: Any, method: str) -> None:
        upstream = getattr(holder, method)
        setattr(holder, method, lambda: self._synchronise(upstream))

    def _check(self) -> None:
        """
        Raises:
            CureError: see the class.
        """
        if _is_walked_wrongly(self) and not self._is_walked:
            raise CureError(
                VLLMSyncMixin.__name__,
                expected="LoRA or DoRA of linear layers, to merge it into copies of what FSDP has sharded",
                seen="it is another one",
                packages=("trl", "peft"),
                remedy="Train LoRA of linear layers, or without FSDP" + leaving_out(VLLMSyncMixin.__name__),
            )
        engine = getattr(self, "llm", None)  # the main process alone has one
        if _keeps_prefixes(self) and engine is not None and not hasattr(engine, _FORGET):
            raise CureError(
                VLLMSyncMixin.__name__,
                expected=f"LLM.{_FORGET} of vLLM, for keys and values that were computed with earlier weights",
                seen="it is not there",
                packages=("trl", "vllm"),
            )

    def _parameters_for_engine(self, upstream: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        generation = self.vllm_generation
        walked = self._walked(generation._dist.gather_params) if self._is_walked else upstream()
        if not self._is_walked or fsdp_version(self.accelerator) != 1 or generation.mode != "server":
            return walked
        # A server's client sends a weight some time after the next has been asked for.
        return ((name, value.clone()) for name, value in walked)

    def _synchronise(self, upstream: Callable[[], None]) -> None:
        """What TRL's method does, with a model that is neither sharded nor adapted."""
        if not self._is_walked:
            upstream()
        elif _asks_for_all(self):
            self._hand_over()
        else:
            holder = _generation_of(self) or self
            with _as_plain_model(holder, self._walked(_gathering(self.accelerator))):
                upstream()
        if _keeps_prefixes(self) and self.accelerator.is_main_process:
            getattr(self.llm, _FORGET)()

    def _hand_over(self) -> None:
        """One weight at a time to the engine, which the main process alone has."""
        is_main = self.accelerator.is_main_process
        engine = self.llm.llm_engine.model_executor.driver_worker.model_runner.model if is_main else None
        for weight in self._walked(_gathering(self.accelerator)):
            if engine is not None:
                engine.load_weights([weight])

    @property
    def _is_walked(self) -> bool:
        """Whether TRL has to be helped, and the cure can merge what is adapted; else TRL walks."""
        model = self._policy
        return _is_walked_wrongly(self) and (not trains_adapters(model) or merges(model))

    @property
    def _policy(self) -> Any:
        return (_generation_of(self) or self).model

    def _walked(self, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
        if fsdp_version(self.accelerator) == 1:
            return parameters_of_fsdp1(self._root())
        return parameters_for_engine(self._policy, gather)

    def _root(self) -> nn.Module:
        """FSDP1's root; before anything is wrapped, the policy."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        candidates = (self.model_wrapped, self.model)
        return next(
            (candidate for candidate in candidates if isinstance(candidate, FullyShardedDataParallel)), self.model
        )

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the engine gets every weight, merged into a copy", *cls._needed)


def _generation_of(trainer: Any) -> Any:
    """TRL's ``VLLMGeneration``, which 0.28 and later have."""
    return getattr(trainer, "vllm_generation", None)


def _trainers_point(trainer: Any) -> PatchPoint | None:
    """The method by which a trainer hands weights over itself; ``None`` without vLLM, and where it is not TRL's own."""
    if not getattr(trainer.args, "use_vllm", False):
        return None
    known = {point.where: point for point in VLLM_OF_TRAINERS}
    for base in type(trainer).__mro__:
        if not is_ours(base):
            point = known.get(f"{base.__module__}:{base.__qualname__}.{_TRAINERS_METHOD}")
            if point is not None and expected(point):
                return point
            if _TRAINERS_METHOD in vars(base):
                return None
    return None


def _is_walked_wrongly(trainer: Any) -> bool:
    """Whether TRL hands over something else than the policy's weights, or changes the policy for that."""
    version = fsdp_version(trainer.accelerator)
    return version == 1 or (version == 2 and _generation_of(trainer) is None) or merges(trainer.model)


def _keeps_prefixes(trainer: Any) -> bool:
    """Whether the engine's prefix cache outlives the weights that it was computed with."""
    return _generation_of(trainer) is None and not method_uses(type(trainer), _TRAINERS_METHOD, _FORGET)


def _asks_for_all(trainer: Any) -> bool:
    """Whether TRL's method asks the model for all weights at once, as before 0.16."""
    return _generation_of(trainer) is None and method_uses(type(trainer), _TRAINERS_METHOD, "state_dict")


def _gathering(accelerator: Any) -> Gather:
    """A context manager in which a list of parameters is whole."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None or plugin.zero_stage != 3:
        return lambda parameters: nullcontext()
    import deepspeed

    gather: Gather = deepspeed.zero.GatheredParameters
    return gather


@contextmanager
def _as_plain_model(holder: Any, walked: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Let TRL's method find these weights in the place of the model, and nothing that is sharded."""
    from torch import nn

    plain = nn.Module()
    vars(plain)["named_parameters"] = lambda: walked
    instead: dict[str, Any] = {"model": plain}
    if hasattr(holder, "_dist"):  # from TRL 1.6 on
        whole: Gather = lambda parameters: nullcontext()  # noqa: E731 (an attribute)
        instead["_dist"] = SimpleNamespace(is_fsdp=False, fsdp_version=None, gather_params=whole)
    else:
        instead["is_fsdp_enabled"] = False
    before = {name: getattr(holder, name) for name in instead}
    try:
        vars(holder).update(instead)
        yield
    finally:
        vars(holder).update(before)
