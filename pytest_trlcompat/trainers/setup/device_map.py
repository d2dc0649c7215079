"""Reference models that are loaded onto other devices than the policy; no entry of the catalogue has it yet.

TRL loads models by name with ``device_map="auto"``, but not under DeepSpeed and ``MULTI_GPU``.
When the reference model is loaded, Accelerate reports ``FSDP`` under FSDP: so each of several ranks that see the same
GPUs loads it onto device 0, and FSDP1 refuses, ``Inconsistent compute device and `device_id```
(https://github.com/oumi-ai/oumi/pull/2673 meets it with DPO). On an XPU or another accelerator the same happens to the
policy where a name is given, under DDP too; a single process that sees several devices spreads its reference model over
them and fails at the first KL term.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from accelerate import PartialState

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import replaced_in
from pytest_trlcompat.trainers.curing.upstream import points_of

__all__ = ["OneDevicePerRankMixin"]

CREATE_MODEL = patch_points.in_grpo("create_model_from_path", ">=0.26")


class OneDevicePerRankMixin(Cure):
    """Loads the models of any trainer of TRL onto one device per rank, where Accelerate puts them.

    A policy that was itself spread over several devices, and a ``device_map`` in ``model_init_kwargs``, are respected.
    Does nothing where TRL has no ``create_model_from_path``.
    """

    _kinds: ClassVar = {
        "trainer": ("AdapterSeedMixin", "its __init__ calls this one's"),
        "grpo": ("AdapterSeedMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (CREATE_MODEL,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        policy = args[0] if args else kwargs.get("model")
        points = points_of(type(self), CREATE_MODEL)
        with replaced_in(points, partial(_without_device_map, policy), OneDevicePerRankMixin.__name__):
            super().__init__(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not points_of(trainer_class, CREATE_MODEL):
            return Activity(False, "upstream does not choose devices for models that it loads")
        return Activity(None, "changes something where upstream loads a model by its name")


def _without_device_map(policy: Any, upstream: Callable[..., Any]) -> Callable[..., Any]:
    def create_model_from_path(*args: Any, **kwargs: Any) -> Any:
        if PartialState().num_processes > 1 or _is_on_one_device(policy):
            kwargs.setdefault("device_map", None)
        return upstream(*args, **kwargs)

    return create_model_from_path


def _is_on_one_device(policy: Any) -> bool:
    """Whether a policy is there already, and not spread over devices; one that is yet to be loaded by name is not."""
    device_map = getattr(policy, "hf_device_map", {})
    return not isinstance(policy, str) and len(set(device_map.values())) <= 1
