"""PyTorch's Fully Sharded Data Parallel, of both versions.

FSDP1 is ``FullyShardedDataParallel``, whose units hold a flat parameter each; FSDP2 is ``fully_shard``, which makes
each parameter a ``DTensor`` and wraps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pytest_trlcompat.strategies.family import Family, Need, Settings, StrategyError, families

__all__ = ["FSDP1", "FSDP2"]

_DEFAULTS: Settings = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "offload_params": False,
    "activation_checkpointing": False,
    "cpu_ram_efficient_loading": False,
}
_MORE = {"min_num_params", "transformer_cls_to_wrap", "activation_checkpointing_offload", "ignored_modules"}
_NAMES_IN_FILES = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}
"""Settings with other names in Accelerate's configuration files than in the environment, without the prefixes."""
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP1, in the order of their numbers."""


class FSDP(Family):
    """Settings are the ``FSDP_*`` variables without their prefix, lower case.

    Attributes:
        version: Accelerate's.
        defaults: of this version alone.
    """

    version: ClassVar[int]
    defaults: ClassVar[Mapping[str, Any]]
    is_made_of_parts = True
    accelerate_type = "FSDP"
    # Until there is an Accelerator, it cannot be distinguished from DDP.
    has_type_at_first = False
    section = "fsdp_config"
    flag = "use_fsdp"

    def settings(self, name: str, options: Mapping[str, Any]) -> Settings:
        known = frozenset(_DEFAULTS) | frozenset(self.defaults) | _MORE
        if unknown := sorted(set(options) - known):
            raise StrategyError(f"unknown option of {name}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return {**_DEFAULTS, **self.defaults, **options}

    def variables(self, name: str, settings: Settings | None, folder: Path) -> dict[str, str]:
        variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(self.version)}
        return variables | {f"FSDP_{key.upper()}": _text(value) for key, value in (settings or {}).items()}

    def launcher_section(self, name: str, settings: Settings | None, folder: Path) -> dict[str, Any]:
        section: dict[str, Any] = {"fsdp_version": self.version}
        return section | {f"fsdp_{_NAMES_IN_FILES.get(key, key)}": value for key, value in (settings or {}).items()}

    def read_section(self, section: Mapping[str, Any], path: Path, folder: Path) -> tuple[str, Settings]:
        from pytest_trlcompat.strategies.config_keys import section_key

        settings = {section_key(self.section, name): value for name, value in section.items()}
        version = str(settings.pop("fsdp_version", 1))
        names = {str(family.version): family.names[0] for family in families() if isinstance(family, FSDP)}
        if version not in names:
            raise StrategyError(f"fsdp_version {version} cannot be launched (known: {', '.join(names)})")
        described = {name.removeprefix("fsdp_"): value for name, value in settings.items()}
        # Accelerate's own default; FSDP2 has no such setting.
        return names[version], {"sharding_strategy": "FULL_SHARD", **described}

    def describe(self, name: str, settings: Settings | None) -> str:
        return name

    def describe_variables(self, variables: Mapping[str, str]) -> str | None:
        if "ACCELERATE_USE_FSDP" not in variables or variables.get("FSDP_VERSION", "1") != str(self.version):
            return None
        return self.describe(
            self.names[0], {key.removeprefix("FSDP_").lower(): value for key, value in variables.items()}
        )


class FSDP1(FSDP):
    """What is sharded, ``sharding_strategy`` says."""

    names = ("fsdp1",)
    position = 40
    version = 1
    defaults = {  # noqa: RUF012 (declared in the base)
        "sharding_strategy": "FULL_SHARD",
        "state_dict_type": "FULL_STATE_DICT",
        "use_orig_params": True,
        "sync_module_states": True,
        "forward_prefetch": False,
        "backward_prefetch": "BACKWARD_PRE",
    }
    kind = "fsdp1"
    engine = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")

    def describe(self, name: str, settings: Settings | None) -> str:
        return f"{name} with {str((settings or {})['sharding_strategy']).upper()}"

    def shards_parameters(self, name: str, settings: Settings | None) -> bool:
        # Accelerate takes the number of a strategy as well; 1 is FULL_SHARD.
        return str((settings or {})["sharding_strategy"]).upper() in ("FULL_SHARD", "1")

    def required(self, name: str, settings: Settings | None, world_size: int) -> dict[str, Any]:
        """The sharding strategy, which settings have by name or by number, as PyTorch names it."""
        # FSDP then shards nothing, whatever it is asked.
        if world_size == 1:
            return {}
        # PyTorch's own name for one of them begins so: _HYBRID_SHARD_ZERO2.
        text = str((settings or {})["sharding_strategy"]).upper().removeprefix("_")
        numbers = {str(number): strategy for number, strategy in enumerate(_SHARDING_STRATEGIES, 1)}
        return {"sharding_strategy": numbers.get(text, text)}

    def measure(self, engine: Any, entry: dict[str, Any]) -> None:
        handle = getattr(engine, "_handle", None)
        if handle is None:  # a root whose parameters all belong to nested units
            return
        flat = handle.flat_param
        # Until the first forward pass has set it, the flat parameter itself is this rank's part.
        sharded = getattr(flat, "_local_shard", flat)
        entry["local"] += sharded.numel()
        entry["total"] += int(flat._unpadded_unsharded_size.numel())
        entry["device_type"] = handle.device.type
        entry["sharding_strategy"] = handle._sharding_strategy.name
        entry["sharding_strategies"] = sorted({*entry.get("sharding_strategies", ()), handle._sharding_strategy.name})

    def differences(self, required: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[str]:
        requested = required.get("sharding_strategy")
        strategies = {name.removeprefix("_") for name in engine.get("sharding_strategies", ())}
        if requested is not None and strategies != {requested}:
            names = ", ".join(sorted(strategies))
            yield f"differs: the sharding strategy {requested} was requested, {names} was found"


class FSDP2(FSDP):
    """Each parameter is sharded. The engine is a group of parameters, and belongs to the module it is applied to."""

    names = ("fsdp2",)
    position = 50
    version = 2
    # The first releases of Accelerate that know FSDP2 refuse any other type of state dict.
    defaults = {"reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}  # noqa: RUF012 (see FSDP)
    needs = (
        Need("accelerate", "1.6", "Accelerate knows FSDP2 from 1.6.0 on, and takes FSDP1 before without a word"),
        Need(
            "transformers",
            "4.51",
            "the Trainer prepares its model without the optimizer, which Accelerate refuses under FSDP2",
            except_for=("ppo", "rloo", "first_rloo"),  # which prepare both; RLOO did until TRL 0.21
        ),
        Need(
            "torch",
            "2.6",
            "torch.distributed.fsdp.fully_shard came with torch 2.6; Accelerate uses no other",
            is_assumed=True,
        ),
    )
    kind = "fsdp2"
    engine = ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup")
    applied_by = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")

    def shards_parameters(self, name: str, settings: Settings | None) -> bool:
        return True

    def measure(self, engine: Any, entry: dict[str, Any]) -> None:
        for parameter in engine.fsdp_params:
            entry["local"] += parameter.sharded_size.numel()
            entry["total"] += parameter._orig_size.numel()
        entry["device_type"] = engine.device.type

    def module_of(self, engine: Any) -> Any:
        return engine.modules[0]

    def model_of(self, engine: Any) -> Any:
        return engine


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
