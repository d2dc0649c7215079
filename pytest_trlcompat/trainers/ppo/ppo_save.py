"""Cure of ``ppo-zero3-save``, ``ppo-config-get`` and ``ppo-ddp-save``: the policy saved.

TRL's PPO trainer trains a wrapper around policy and value model and saves the policy alone, by putting the policy in
the place of the model, and of the DeepSpeed engine, and calling ``Trainer.save_model``. But it is the wrapper that
DeepSpeed, FSDP and DDP have taken over, and the policy knows nothing of them:

- ZeRO-3: ``'...ForCausalLM' object has no attribute 'zero_gather_16bit_weights_on_model_save'``;
- any ZeRO stage, with Transformers 5: ``'...Config' object has no attribute 'get'``;
- DDP: ``'DistributedDataParallel' object has no attribute 'policy'``, in later releases ``Some tensors share memory``;
- ranks that write nothing: ``no attribute 'is_distributed_loading_by_transformers'``;
- FSDP1: ``KeyError: None``; FSDP with sharded state dicts writes nothing at all, and PEFT an empty adapter;
- before ``train()``, DeepSpeed: ``'PPOTrainer' object has no attribute 'deepspeed'``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

from accelerate.utils import DistributedType

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import original, replaced
from pytest_trlcompat.trainers.curing.trl_ppo import ppo_module, ppo_trainer_class
from pytest_trlcompat.trainers.curing.upstream import function_uses
from pytest_trlcompat.trainers.fsdp.fsdp_adapter_save import adapter_found, shards_adapter
from pytest_trlcompat.trainers.fsdp.fsdp_save import full_state_dict, gathered_for_rank_0

__all__ = ["PPOSaveMixin"]

_PREFIX = "policy."
_WRAPPED = Condition(
    "under every strategy but one process alone",
    "nothing wraps the model",
    lambda trainer: trainer.accelerator.distributed_type != DistributedType.NO,
)


def _stepped_over(_upstream: Callable[..., None]) -> Callable[..., None]:
    def save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        # What comes after TRL's own trainer is transformers.Trainer.
        super(ppo_trainer_class(), self).save_model(*args, **kwargs)

    return save_model


class PPOSaveMixin(Cure):
    """Saves the policy of a subclass of TRL's PPO trainer: by ``save_model``, in checkpoints and when pushing.

    ``Trainer.save_model`` runs with the wrapper, so that it gathers what there is to gather, and the policy takes its
    place only when the files are written. Which files there are, and when, is as upstream.

    Where upstream gathers by itself, known by looking at its code, its own method runs. A ``save_model`` of a user's
    runs in any case.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOObjectiveEntropyMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (
        *patch_points.ppo_methods("save_model"),
        patch_points.SAVE_MODEL,
        patch_points.GET_STATE_DICT,
        patch_points.trainer_method("_save"),
        patch_points.trainer_method("create_model_card"),
    )

    # Transformers 5 asks for it on ranks that write nothing. Its Trainer.__init__ sets it, which upstream never calls.
    is_distributed_loading_by_transformers = False

    accelerator: Any
    args: Any
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            # Upstream's train() does so, which is too late for whoever saves before it.
            self.deepspeed = self.model_wrapped = self.model

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the policy is saved by the wrapper that the strategy knows", _WRAPPED)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the policy for ``from_pretrained``, as ``Trainer.save_model`` does; to be called on all ranks."""
        upstream: Any = super()
        point = patch_points.ppo_method("save_model", ppo_module().__name__)
        gathers = function_uses(original(point), "get_state_dict")
        # FSDP has one type of state dict that ``from_pretrained`` can read; under any other ``Trainer`` writes nothing.
        with (
            full_state_dict(self.accelerator),
            gathered_for_rank_0(),
            nullcontext() if gathers else replaced(point, _stepped_over),
        ):
            upstream.save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        upstream: Any = super()
        policy = getattr(self.accelerator.unwrap_model(self.model), "policy", None)
        if policy is None:  # upstream has put it there already
            upstream._save(output_dir, state_dict=state_dict)
            return
        if state_dict is not None:
            of_policy = {name: tensor for name, tensor in state_dict.items() if name.startswith(_PREFIX)}
            state_dict = {name[len(_PREFIX) :]: tensor for name, tensor in of_policy.items()}
        # PEFT from 0.21 on would find no tensor of an adapter that FSDP1 has sharded (``lora-fsdp-save``).
        seeing_adapter = adapter_found(policy) if shards_adapter(policy, self.accelerator) else nullcontext()
        with mock.patch.object(self, "model", policy), seeing_adapter:
            upstream._save(output_dir, state_dict=state_dict)

    def create_model_card(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which from 0.19 on writes one with each checkpoint and asks DDP's wrapper for its ``config``."""
        upstream: Any = super()
        with mock.patch.object(self, "model", self.accelerator.unwrap_model(self.model)):
            return upstream.create_model_card(*args, **kwargs)
