"""GRPO bodies that the suites launch: they run inside the ranks and return plain numbers.

Trainers that are built like it, RLOO's and that of distillation, come by their names.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.training.aliases import accepted

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

SEQUENCE_LENGTH, COMPLETION_LENGTH = 20, 5
PROMPT_LENGTH = SEQUENCE_LENGTH - COMPLETION_LENGTH
ROWS = 4
"""Completions per step over all ranks, in groups of two."""
STEPS = 3


def trainer_class(subject: str, name: str = "GRPO") -> type:
    """TRL's trainer, or the corrected one.

    Args:
        name: that of TRL's class without its end, ``"RLOO"``.
    """
    import trl

    from pytest_trlcompat import trainers

    chosen: type = getattr(trainers if subject == "corrected" else trl, f"{name}Trainer")
    return chosen


def build_trainer(
    subject: str,
    model: TinyModel,
    cls: type | None = None,
    arguments: Mapping[str, Any] | None = None,
    name: str = "GRPO",
    **settings: Any,
) -> Any:
    """A GRPO trainer on a fresh tiny model: 3 steps, a KL term that matters, no dropout, no saving.

    Args:
        cls: a subclass to build instead of the subject's trainer.
        name: see :func:`trainer_class`.
        arguments: of the trainer, in place of those that it is given here (``model``, ``train_dataset``, ...).
        settings: of its ``GRPOConfig``; those that the release does not know are left out.
    """
    keywords = {
        **({} if name == "Distillation" else {"reward_funcs": reward}),
        "args": _config(name, **settings),
        "train_dataset": prompts(),
        "processing_class": model.tokenizer,
        **(arguments or {}),
    }
    if "model" not in keywords:
        keywords["model"] = load_policy(model)
    return (cls or trainer_class(subject, name))(**keywords)


def load_policy(model: TinyModel) -> Any:
    """The tiny model, read from its folder; a copy of what was read before, unless ZeRO-3 partitions what it reads."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return _read_policy(model.path)
    return copy.deepcopy(_read_policy_once(model.path))


def _read_policy(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


_read_policy_once = functools.cache(_read_policy)


def _config(name: str, **settings: Any) -> Any:
    import os
    import tempfile

    import trl
    import trl.trainer.utils

    values = {
        "output_dir": tempfile.mkdtemp(prefix="trlcompat-"),
        "per_device_train_batch_size": counted(ROWS // int(os.environ.get("WORLD_SIZE", "1"))),
        "num_generations": 2,
        "max_prompt_length": PROMPT_LENGTH,
        "max_completion_length": COMPLETION_LENGTH,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "beta": 0.5,
        # At 1, nothing here depends on releases that score without it: that is the matter of grpo-temperature.
        "temperature": 1.0,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        # TRL's default has become dapo, which divides by other counts of tokens (grpo-token-normalizer).
        "loss_type": "grpo",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        # Newer releases of TRL turn this and gradient checkpointing on by default.
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 7,
    }
    if hasattr(trl.trainer.utils, "create_model_from_path"):
        # These releases load the reference model with device_map="auto" where the distributed type is not MULTI_GPU or
        # DEEPSPEED, as under FSDP: every rank's lands on device 0, on GPUs too. That is no concern of these suites.
        values["model_init_kwargs"] = {"device_map": None}
    config = getattr(trl, f"{name}Config")
    return config(**accepted(config, {**values, **settings}))


def counted(rows: int) -> int:
    """The ``per_device_train_batch_size`` of so many rows: 0.14 counts prompts, later releases count completions."""
    from importlib import metadata  # trl 0.22.0 says that its version is "unknown"

    from packaging.version import Version

    return rows // 2 if Version(metadata.version("trl")) < Version("0.15") else rows


# Made once, since datasets hashes each that is made.
@functools.cache
def prompts(length: int = PROMPT_LENGTH) -> Any:
    """Prompts of equal length, so that nothing is padded.

    Args:
        length: of each, in tokens.
    """
    from datasets import Dataset

    # A vocabulary of 64 has 61 words, and three special tokens.
    texts = [" ".join(f"w{(row * 7 + column) % 61}" for column in range(length)) for row in range(16)]
    return Dataset.from_dict({"prompt": texts})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Depends on the text alone, so that it is the same on however many ranks the rows are."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def fix_completions(vocab_size: int) -> list[torch.Tensor]:
    """Let generation run for real, then replace its tokens by ones that depend on the global row alone.

    Sampling differs with the number of ranks; so the losses of one process and of several could not be compared.

    Returns:
        A list that grows by the returned ids, ``(B, S)``, with every call.
    """
    import os

    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate
    returned: list[torch.Tensor] = []

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        generated = generate(self, inputs, **kwargs)  # a prompt may come back as several rows
        rows = generated.shape[0]
        first = int(os.environ.get("RANK", "0")) * rows
        call = len(returned)
        columns = range(COMPLETION_LENGTH)
        tokens = torch.tensor(
            [[_token(call, first + row, column, vocab_size) for column in columns] for row in range(rows)],
            device=generated.device,
            dtype=generated.dtype,
        )
        returned.append(torch.cat([generated[:, : prompts.shape[1]], tokens], dim=1))
        return returned[-1]

    # For good: the rank is a process of its own, and ends with the launch.
    GenerationMixin.generate = fixed
    return returned


def with_generation_settings(kwargs: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The keyword arguments of ``generate``, with a copy of their ``generation_config`` that has ``settings``."""
    config = copy.deepcopy(kwargs["generation_config"])
    for name, value in settings.items():
        setattr(config, name, value)
    return {**kwargs, "generation_config": config}


def _token(call: int, row: int, column: int, vocab_size: int) -> int:
    """Any word of the vocabulary, never one of its three special tokens."""
    return 3 + (call * 11 + row * 17 + column * 5) % (vocab_size - 3)


def logps_method() -> str | None:
    """The name of the method that TRL's GRPO trainer calls for log-probabilities; 0.14 has none."""
    from trl import GRPOTrainer

    names = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
    return next((name for name in names if hasattr(GRPOTrainer, name)), None)
