"""Cure of ``grpo-adapter-reference``: a trained adapter is held to itself as it was given.

GRPO holds the policy to the model that it was before the training. Of a ``PeftModel`` older releases of TRL disable
the adapter to compute that, which is right for an adapter that TRL adds itself, and wrong for one that was trained
before. The cure keeps a copy of the adapter as it was given, frozen, as newer releases of TRL do, and computes the
reference with that. PEFT's list of adapters does not have the copy, so that it is not saved: where a checkpoint has a
second adapter, many releases of Transformers resume from that one alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, trains_adapters, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced_in
from pytest_trlcompat.trainers.curing.upstream import definitions, function_uses

__all__ = ["AdapterReferenceMixin"]

DISABLE_ADAPTER = PatchPoint("peft.peft_model:PeftModel.disable_adapter")

_NAME = "trlcompat_as_given"
"""Of the copy, in the layers of the policy."""


class AdapterReferenceMixin(Cure):
    """Computes the reference of a ``PeftModel`` that a subclass of ``trl.GRPOTrainer`` is given with its adapter.

    A training that is resumed must be given the same adapter as the one before: the copy is not saved. Without
    ``beta``, with a ``peft_config``, and with a LoRA that does nothing yet, nothing is changed.

    Raises:
        CureError: the adapter is of a kind of which PEFT has no second one, or which has no layers that can be
            switched, such as prompts; or it has whole modules, which TRL would send to vLLM twice; or the reference is
            to follow the policy; or it is computed otherwise.
    """

    _kinds: ClassVar = {
        "grpo": ("CheckpointedGenerationMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.GRPO_CONSTRUCTOR,
        patch_points.PREPARE_INPUTS,
        patch_points.COMPUTE_LOSS,
        DISABLE_ADAPTER,
        patch_points.PER_TOKEN_LOGPS,
        patch_points.PER_TOKEN_LOGPS_AND_ENTROPIES,
    )
    _stands_before: ClassVar = {
        "LogitsToKeepMixin": "that one computes log-probabilities without calling the next one",
    }
    accelerator: Any
    ref_model: Any
    _given: Any = None
    _referred: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        needed = _disables_adapters(type(self), *_methods(type(self)))
        # No point is needed where TRL does not disable adapters for the reference, as from 0.27 on.
        with replaced_in((patch_points.GRPO_CONSTRUCTOR,) * needed, self._keeping, AdapterReferenceMixin.__name__):
            super().__init__(*args, **kwargs)

    def _keeping(self, upstream: Callable[..., None]) -> Callable[..., None]:
        # With the parameters, which another cure may ask for.
        @functools.wraps(upstream)
        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
            if instance is self:
                import trl

                # A user passes the model and the settings by position or by name.
                arguments = inspect.signature(upstream).bind(instance, *args, **kwargs).arguments
                policy, settings = arguments.get("model"), arguments.get("args") or trl.GRPOConfig
                is_own = trains_adapters(policy) and arguments.get("peft_config") is None
                if is_own and settings.beta and not _does_nothing(policy):
                    _refuse(policy, settings)
                    _add_copy(policy)
                    self._given = policy
            upstream(instance, *args, **kwargs)
            if instance is self and self._given is not None:
                # Under ZeRO-3 TRL has loaded a reference model, which has no adapter either.
                self.ref_model = None

        return __init__

    def _get_per_token_logps(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with self._as_given():
            return upstream._get_per_token_logps(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with self._as_given():
            return upstream._get_per_token_logps_and_entropies(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        prepared = upstream._prepare_inputs(*args, **kwargs)
        has_reference = isinstance(prepared, Mapping) and prepared.get("ref_per_token_logps") is not None
        if has_reference and self._given is not None and not self._referred:
            raise _error(
                "the call that computes the reference with adapters disabled",
                "there is a reference, and no such call was seen",
            )
        return prepared

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        in_loss = self._given is not None and _disables_adapters(type(self), "compute_loss")  # trl 0.14
        points = (DISABLE_ADAPTER,) * in_loss
        with replaced_in(points, self._switching, AdapterReferenceMixin.__name__):
            return upstream.compute_loss(*args, **kwargs)

    def _switching(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """``disable_adapter`` that uses the copy where TRL calls it, which is before rewards are computed."""
        asked: list[Any] = []

        @contextmanager
        def disable_adapter(policy: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            # Reward functions may disable the adapter too, but later than TRL.
            is_trls = policy is self._given and not asked
            asked.append(policy)
            # In this order: `_as_given` acts only on adapters that are disabled.
            with upstream(policy, *args, **kwargs), self._as_given() if is_trls else nullcontext():
                yield

        return disable_adapter

    @contextmanager
    def _as_given(self) -> Iterator[None]:
        """Use the copy instead wherever adapters are disabled."""
        policy = self._given
        if policy is None or not any(_disabled(policy)):
            yield
            return
        self._referred += 1
        trained, trainable = (
            policy.active_adapter,
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
        )
        policy.base_model.enable_adapter_layers()
        policy.base_model.set_adapter(_NAME)
        _train_only(policy, trainable)
        try:
            yield
        finally:
            # The caller is still within PEFT's `disable_adapter`, which enables the layers itself when it ends.
            policy.base_model.set_adapter(trained)
            policy.base_model.disable_adapter_layers()
            _train_only(policy, trainable)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _disables_adapters(trainer_class, *_methods(trainer_class)):
            return Activity(False, "TRL disables no adapter to compute a reference")
        if trainer is not None and trainer._given is None and ADAPTER.holds(trainer):
            return Activity(False, "no trained adapter was given, or beta is 0")
        return under(trainer, "TRL computes the reference of a PeftModel without its adapter", ADAPTER)


def _methods(cls: type) -> set[str]:
    """All of TRL's: releases compute the reference in one or another of them."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "trl"
        for name, member in vars(base).items()
        if inspect.isfunction(member)
    }


def _disables_adapters(cls: type, *methods: str) -> bool:
    """Whether TRL's trainer disables adapters in one of these methods."""
    return any(
        function_uses(defined, "disable_adapter")
        for method in methods
        for package, defined, _ in definitions(cls, method)
        if package == "trl"
    )


def _disabled(policy: Any) -> list[bool]:
    """For each layer with adapters, whether they are disabled.

    A model of Transformers has a method of the same name as such a layer's attribute.
    """
    flags = (getattr(module, "disable_adapters", None) for module in policy.modules())
    return [flag for flag in flags if isinstance(flag, bool)]


def _does_nothing(policy: Any) -> bool:
    """Whether a ``PeftModel`` is the model without its adapter: a LoRA that nobody has trained yet."""
    config = policy.peft_config.get(str(policy.active_adapter))
    # Trained biases change what the model computes, even where the LoRA's matrices do not.
    if config is None or config.peft_type != "LORA" or config.bias != "none":
        return False
    if any(getattr(config, name, None) for name in ("modules_to_save", "trainable_token_indices")):
        return False
    factors = [
        parameter for name, parameter in policy.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name
    ]
    # Values that are not on this rank (on the meta device, or in other ranks' shards) may be anything.
    return bool(factors) and not any(factor.is_meta or not factor.numel() or factor.any() for factor in factors)


_WANTED = "a second adapter with the weights of the first"


def _refuse(policy: Any, settings: Any) -> None:
    """What a copy does not serve.

    Raises:
        CureError: with the reason.
    """
    if getattr(settings, "sync_ref_model", False):
        raise _error("a reference that follows the policy", "TRL syncs reference models, and no adapters")
    if getattr(settings, "use_vllm", False) and any(
        "modules_to_save." in name for name, _ in policy.named_parameters()
    ):
        raise _error(_WANTED, "TRL would send the copy of whole modules to vLLM")


def _add_copy(policy: Any) -> None:
    """Give the layers of a ``PeftModel`` a frozen copy of its adapter.

    Raises:
        CureError: it cannot have one, or it could not be switched to.
    """
    trained = policy.active_adapter
    if list(getattr(policy, "active_adapters", [trained])) != [trained]:
        raise _error(_WANTED, f"several are active: {policy.active_adapters}")
    if not _disabled(policy):
        raise _error(_WANTED, f"{policy.peft_config[trained].peft_type} has no layers that can be switched")
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    try:
        policy.add_adapter(_NAME, copy.deepcopy(policy.peft_config[trained]))
    except (ValueError, TypeError) as error:
        raise _error(_WANTED, f"PEFT refuses it: {error}") from error
    # Not in PEFT's list: saved with it, a checkpoint would have two adapters, and many releases of Transformers resume
    # from the second one alone.
    del policy.peft_config[_NAME]
    named = dict(policy.named_parameters())
    for name, parameter in named.items():
        # A dot at the end, because some names, `lora_embedding_A.default`, end with that of the adapter.
        if f".{trained}." in f"{name}.":
            _copy(parameter, named.get(f"{name}.".replace(f".{trained}.", f".{_NAME}.")[:-1]), name)
    _train_only(policy, trainable)


def _copy(parameter: Any, into: Any, name: str) -> None:
    shards = [hasattr(tensor, "ds_tensor") for tensor in (parameter, into)]
    shapes = None if into is None else [getattr(tensor, "ds_shape", tensor.shape) for tensor in (parameter, into)]
    if shapes is None or shapes[0] != shapes[1] or shards[0] != shards[1]:
        raise _error(f"a copy of {name}", "the second adapter has none, or one of another size")
    if parameter.is_meta or into.is_meta:
        # Another rank has it, and gives it to this one.
        return
    if shards[0]:
        # Each rank copies its own shard of ZeRO-3, so nothing has to be gathered.
        into.ds_tensor.copy_(parameter.ds_tensor)
    else:
        into.data = parameter.data.clone()


def _train_only(policy: Any, trainable: list[Any]) -> None:
    """PEFT trains whichever adapter it is switched to."""
    to_train = {id(parameter) for parameter in trainable}
    for parameter in policy.parameters():
        if parameter.requires_grad != (id(parameter) in to_train):
            parameter.requires_grad_(id(parameter) in to_train)


def _error(
    expected: str, seen: str, remedy: str = "Merge the adapter into the model, and pass peft_config"
) -> CureError:
    return CureError(
        "AdapterReferenceMixin",
        expected=expected,
        seen=seen,
        packages=("trl", "peft"),
        remedy=f"{remedy}, take trl >=0.27{leaving_out('AdapterReferenceMixin')}",
    )
