"""What Accelerate's and DeepSpeed's files, and the fields of a config that name them, say of how ranks share the work.

Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.axes import PARALLELISM
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.facts import deepspeed_facts, fsdp_facts, section_of
from pytest_trlcompat.training.reading.files import read_mapping
from pytest_trlcompat.training.training import Training

__all__ = ["is_accelerate", "is_deepspeed", "of_accelerate", "of_arguments", "of_deepspeed"]

_ONE_BATCH_EACH = ("MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU", "MULTI_MUSA")


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether these are the keys of Accelerate's file."""
    return "distributed_type" in document or ("compute_environment" in document and "num_processes" in document)


def is_deepspeed(document: Mapping[str, Any]) -> bool:
    """Whether these are the keys of DeepSpeed's config."""
    return "zero_optimization" in document or "train_micro_batch_size_per_gpu" in document


def of_accelerate(document: Mapping[str, Any], source: str, folder: Path | None = None) -> Training:
    """A training as Accelerate's file starts it.

    Args:
        folder: from which the path of DeepSpeed's config counts; the current one by default.

    Raises:
        TrainingError: a ``distributed_type`` or a ``zero_stage`` that is none, or DeepSpeed's config cannot be read.
    """
    kind = str(document.get("distributed_type", "NO")).upper()
    values: dict[str, Any] = {}
    processes = document.get("num_processes")
    if isinstance(processes, int):
        values["parallel.processes"] = processes
    if document.get("mixed_precision") not in (None, ""):
        # YAML takes a bare no for a truth.
        precision = document["mixed_precision"]
        values["engine.mixed_precision"] = "no" if precision is False else str(precision)
    parts = [Training(values=values, source=source)]
    if kind in ("NO", "FALSE"):
        values["parallel.strategy"] = "single"
    elif kind in _ONE_BATCH_EACH:
        values["parallel.strategy"] = "ddp" if processes != 1 else "single"
    elif kind == "DEEPSPEED":
        parts.append(_of_plugin(section_of(document, "deepspeed_config", source), source, folder))
    elif kind == "FSDP":
        parts.append(Training(values=fsdp_facts(section_of(document, "fsdp_config", source), source)))
    else:
        raise TrainingError(
            f"{source}: distributed_type NO, MULTI_GPU, DEEPSPEED or FSDP was expected, {kind} was found"
        )
    parts.append(_of_parallelism(section_of(document, "parallelism_config", source), source))
    merged = {name: value for part in parts for name, value in part.values.items()} | values
    return Training(values=merged, source=source, notes=tuple(note for part in parts for note in part.notes))


def _of_plugin(section: Mapping[str, Any], source: str, folder: Path | None) -> Training:
    file = section.get("deepspeed_config_file")
    if file:
        return of_deepspeed(read_mapping((folder or Path()) / str(file)), str(file))
    stage = section.get("zero_stage", 2)  # as Accelerate has it
    config = {
        "zero_optimization": {
            "stage": stage,
            **{
                option: {"device": section[key]}
                for option, key in (
                    ("offload_param", "offload_param_device"),
                    ("offload_optimizer", "offload_optimizer_device"),
                )
                if section.get(key) not in (None, "none")
            },
        },
        **({"gradient_clipping": section["gradient_clipping"]} if "gradient_clipping" in section else {}),
    }
    return of_deepspeed(config, source)


def of_deepspeed(document: Mapping[str, Any], source: str) -> Training:
    """A training under DeepSpeed with this config.

    Raises:
        TrainingError: as :func:`~pytest_trlcompat.training.facts.deepspeed_facts`.
    """
    return Training(values=deepspeed_facts(document, source), source=source)


def _of_parallelism(section: Mapping[str, Any], source: str) -> Training:
    plain = {name.removeprefix("parallelism_config_"): value for name, value in section.items()}
    values = {PARALLELISM[name]: value for name, value in plain.items() if name in PARALLELISM}
    unknown = sorted(set(plain) - set(PARALLELISM))
    notes = (f"{source}: parallelism_config has {', '.join(unknown)}, which is not known here",) if unknown else ()
    return Training(values=values, source=source, notes=notes)


def of_arguments(arguments: Mapping[str, Any], source: str, folder: Path | None = None) -> Training:
    """What the fields ``deepspeed``, ``fsdp`` and ``fsdp_config`` of a config say; nothing where they are not given.

    Raises:
        TrainingError: as the files that they name.
    """
    deepspeed, fsdp = arguments.get("deepspeed"), arguments.get("fsdp")
    if isinstance(deepspeed, Mapping):
        return of_deepspeed(deepspeed, source)
    if deepspeed:
        path = (folder or Path()) / str(deepspeed)
        return of_deepspeed(read_mapping(path), str(deepspeed))
    if fsdp and str(fsdp).casefold() not in ("false", "none", "[]"):
        words = fsdp if isinstance(fsdp, (list, tuple)) else str(fsdp).split()
        section = arguments.get("fsdp_config") or {}
        if isinstance(section, str):
            section = read_mapping((folder or Path()) / section)
        sharding = next((word for word in map(str, words) if word.endswith(("_shard", "_op", "no_shard"))), "")
        facts = fsdp_facts({**({"sharding_strategy": sharding} if sharding else {}), **section}, source)
        return Training(values=facts, source=source)
    return Training(source=source)
