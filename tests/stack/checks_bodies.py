"""Trainings that the tests of the checks launch, and what they say of them. Imports the stack inside functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.strategies import DISTINCT

INSTALLED = stack.installed()
# Transformers' Trainer prepares the model without the optimizer before 4.51, which Accelerate refuses under FSDP2.
TRAINS_FSDP2 = stack.satisfied({"transformers": ">=4.51", "accelerate": ">=1.6"}, INSTALLED)
STRATEGIES = DISTINCT
MODEL = tiny.qwen2(initializer_range=0.1)
TENSORS = 27
"""Of MODEL, none of which is tied."""
ADAPTED = 4
"""Layers of MODEL that ADAPTER adapts."""
ADAPTER = {"target_modules": ["q_proj", "v_proj"]}


# ---- what runs in the ranks


def build(
    folder: str, *, lora: Any = None, tied: bool = False, left_out: int = 0, factor: float = 1.0, **settings: Any
) -> Any:
    """A plain ``transformers.Trainer`` of a tiny model, or of a LoRA of it, which saves at its second step.

    Args:
        tied: let the output head share the embeddings' weights.
        left_out: trainable parameters that the optimizer lacks.
        factor: of the loss.
    """
    import transformers

    policy = tiny.qwen2(initializer_range=0.1, tie_word_embeddings=tied).new_model()
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        policy = get_peft_model(policy, LoraConfig(r=4, **lora))
    rows = [{"input_ids": [(row * 7 + column) % 60 + 3 for column in range(12)]} for row in range(16)]
    for row in rows:
        row["labels"], row["attention_mask"] = row["input_ids"], [1] * 12
    values = {
        "output_dir": folder,
        "max_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        **settings,
    }

    forgive_trl()

    class OneGroup(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:
            # The usual second group, without weight decay, is empty for an adapter; DeepSpeed drops it, and torch 2.13
            # minds that schedulers then have more groups than optimizers.
            import torch

            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trainable[left_out:], lr=self.args.learning_rate, weight_decay=0.0)
            return self.optimizer

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * factor

    return OneGroup(model=policy, args=transformers.TrainingArguments(**values), train_dataset=rows)


def build_grpo(folder: str, reward: Callable[[str], float]) -> Any:
    """GRPO of a tiny model for two steps.

    Args:
        reward: of the text of a completion.
    """
    import trl

    model = tiny.qwen2(initializer_range=0.1)
    args = trl.GRPOConfig(
        output_dir=folder,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    return trl.GRPOTrainer(
        model=model.new_model(),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=args,
        train_dataset=tiny.prompts(),
        processing_class=model.tokenizer,
    )


def forgive_trl() -> None:
    """Give all arguments what trl 0.17 and 0.18, once imported, make them look for with Transformers before 4.51."""
    import transformers

    transformers.TrainingArguments.model_init_kwargs = None


def watch(trainer: Any, *, survive: bool = False, **settings: Any) -> dict[str, Any]:
    """Train with the callback; what was checked, how it came out, and the log.

    Args:
        survive: report all the same where the training ends with an exception of its own.
    """
    import contextlib
    import dataclasses

    from pytest_trlcompat.checks import CompatCallback

    callback = CompatCallback(trainer, **{"on_failure": "raise", **settings})
    trainer.add_callback(callback)
    with contextlib.suppress(*((Exception,) if survive else ())):
        trainer.train()
    found = {
        each.check: dict(vars(each.found)) if dataclasses.is_dataclass(each.found) else each.found
        for each in callback.outcomes
        if each.unjudged is None
    }
    return {
        "checked": [(each.check, each.step) for each in callback.outcomes if each.unjudged is None],
        "unjudged": {each.check: each.unjudged for each in callback.outcomes if each.unjudged is not None},
        "errors": [each.error for each in callback.outcomes if each.error is not None],
        "said": [
            (each.check, each.step, "odd" if each.error is None else "error", each.error or each.odd)
            for each in callback.outcomes
            if not each.fine and each.unjudged is None
        ],
        "odd": [each.odd for each in callback.outcomes if each.odd is not None],
        "found": found,
        "log": trainer.state.log_history,
    }


def train(folder: str, checks: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Train with whatever cannot be right ending it, unless ``checks`` says otherwise."""
    return watch(build(folder, **settings), **(checks or {}))


def check_text(check: Any, *args: Any, **settings: Any) -> str:
    """What a check that fails says."""
    from pytest_trlcompat.checks import CheckError

    try:
        return f"passed: {check(*args, **settings)}"
    except CheckError as error:
        return str(error)


# ---- what runs in the tests


def options(strategy: str) -> dict[str, Any]:
    if strategy == "fsdp2" and not TRAINS_FSDP2:
        pytest.skip("this stack cannot train under FSDP2")
    return {"transformer_cls_to_wrap": MODEL.decoder_layer} if strategy.startswith("fsdp") else {}


def trained(launcher: Launcher, strategy: str, folder: Path, **settings: Any) -> list[Any]:
    """What :func:`train` returns on each rank."""
    return launcher(train, str(folder), strategy=strategy, options=options(strategy), **settings).values


def failure(
    launcher: Launcher, body: Any, *args: Any, strategy: str = "single", kind: str = "CheckError", **settings: Any
) -> str:
    """The text of the error that every rank raises."""
    result = launcher(body, *args, strategy=strategy, options=options(strategy), check=False, **settings)
    assert [rank.failure and rank.failure.type_name for rank in result.ranks] == [kind] * len(result.ranks)
    texts = {rank.failure.message for rank in result.ranks if rank.failure is not None}
    assert len(texts) == 1, texts  # all ranks say the same
    return str(texts.pop())
