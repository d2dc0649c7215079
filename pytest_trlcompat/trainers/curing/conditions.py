"""Conditions that cures share: what must be true of a training, or of what is installed, for them to change anything.

A mixin decides and answers by the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from pytest_trlcompat.trainers.curing.cure import Activity, Condition, is_ours

__all__ = [
    "ACCUMULATION",
    "ADAPTER",
    "CHECKPOINTING",
    "DEEPSPEED",
    "FSDP",
    "FSDP1",
    "FSDP2",
    "LIGER",
    "REFERENCE_MODEL",
    "SEVERAL_RANKS",
    "TRANSFORMERS_GENERATES",
    "ZERO3",
    "Condition",
    "defined_by",
    "fsdp_version",
    "installed",
    "modules_held",
    "trains_adapters",
    "under",
    "zero_stage",
]


def under(trainer: Any, why: str, *conditions: Condition) -> Activity:
    """The answer of a cure that changes something, because of ``why``, where all ``conditions`` hold.

    Of a class alone (``trainer`` is ``None``) they are not known.
    """
    if absent := next(
        (condition.needs for condition in conditions if condition.needs and not installed(condition.needs)), ""
    ):
        return Activity(False, f"{_TITLES[absent]} is not installed")
    if trainer is None:
        return Activity(None, f"{', '.join(condition.where for condition in conditions)}: {why}")
    missing = next((condition for condition in conditions if not condition.holds(trainer)), None)
    return Activity(True, why) if missing is None else Activity(False, missing.otherwise)


def zero_stage(trainer: Any) -> int | None:
    """The stage of ZeRO that a trainer's accelerator has; ``None`` without DeepSpeed."""
    plugin = _deepspeed_plugin(trainer)
    return None if plugin is None else int(plugin.zero_stage)


def _deepspeed_plugin(trainer: Any) -> Any:
    return getattr(trainer.accelerator.state, "deepspeed_plugin", None)


def fsdp_version(accelerator: Any) -> int | None:
    """Version of FSDP, 1 or 2, that ``accelerator`` prepares models with; ``None`` for another strategy.

    Accelerate without a device that it can shard on (plain CPU) has FSDP settings and does not use them.
    """
    # The value of DistributedType.FSDP, without importing Accelerate.
    if accelerator.distributed_type != "FSDP":
        return None
    return getattr(accelerator.state.fsdp_plugin, "fsdp_version", None) or 1


def trains_adapters(model: Any) -> bool:
    """Whether ``model`` is a ``PeftModel``."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def modules_held(trainer: Any) -> Iterator[Any]:
    """Every module of the models that a trainer holds, its own and those that it compares with, each once."""
    seen: set[int] = set()
    # A copy, since the caller's code runs between two modules and may set attributes of the trainer.
    for value in list(vars(trainer).values()):
        if hasattr(value, "modules") and hasattr(value, "forward"):
            for module in value.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield module


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def defined_by(cls: type, method: str, behind: type | None = None) -> str:
    """The package of the first class that defines ``method``, leaving out this package's; empty if none does.

    Args:
        behind: the mixin that asks which method it calls by ``super``: classes in front of it do not count.
    """
    bases = cls.__mro__ if behind is None else cls.__mro__[cls.__mro__.index(behind) + 1 :]
    owners = (base for base in bases if method in vars(base) and not is_ours(base))
    return next((base.__module__.partition(".")[0] for base in owners), "")


_TITLES = {"deepspeed": "DeepSpeed", "liger_kernel": "Liger", "peft": "PEFT", "vllm": "vLLM"}

DEEPSPEED = Condition(
    "under DeepSpeed", "not under DeepSpeed", lambda trainer: _deepspeed_plugin(trainer) is not None, needs="deepspeed"
)
ZERO3 = Condition("under ZeRO-3", "not under ZeRO-3", lambda trainer: zero_stage(trainer) == 3, needs="deepspeed")
FSDP = Condition(
    "under FSDP", "the strategy is not FSDP", lambda trainer: fsdp_version(trainer.accelerator) is not None
)
FSDP1 = Condition("under FSDP1", "the strategy is not FSDP1", lambda trainer: fsdp_version(trainer.accelerator) == 1)
FSDP2 = Condition("under FSDP2", "the strategy is not FSDP2", lambda trainer: fsdp_version(trainer.accelerator) == 2)
REFERENCE_MODEL = Condition(
    "with a reference model",
    "there is no reference model",
    lambda trainer: callable(getattr(trainer, "ref_model", None)),
)
ADAPTER = Condition(
    "with an adapter", "no adapter is trained", lambda trainer: trains_adapters(trainer.model), needs="peft"
)
CHECKPOINTING = Condition(
    "with gradient checkpointing",
    "gradient_checkpointing is off",
    lambda trainer: bool(trainer.args.gradient_checkpointing),
)
ACCUMULATION = Condition(
    "where gradients are accumulated",
    "gradient_accumulation_steps is 1",
    lambda trainer: trainer.args.gradient_accumulation_steps > 1,
)
LIGER = Condition(
    "with use_liger_kernel or use_liger_loss",
    "Liger's loss is not used",
    lambda trainer: any(type(value).__module__.startswith("liger_kernel.") for value in vars(trainer).values()),
    needs="liger_kernel",
)
"""TRL's trainers keep Liger's loss as an attribute, under a name that has changed."""
SEVERAL_RANKS = Condition(
    "on several ranks", "one process alone", lambda trainer: trainer.accelerator.num_processes > 1
)
TRANSFORMERS_GENERATES = Condition(
    "without vLLM", "vLLM generates elsewhere", lambda trainer: not getattr(trainer.args, "use_vllm", False)
)
