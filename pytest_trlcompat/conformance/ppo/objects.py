"""PPO trainers on tiny models, for conformance and for suites.

Runs inside the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.training.aliases import accepted, renamed

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

OMITTED = object()
"""The value of a trainer's argument that is left out."""
PROMPT_LENGTH, RESPONSE_LENGTH = 6, 3
ROWS = 4
"""Rows of a batch over all ranks."""
STEPS = 2


@dataclass
class Models:
    """The models of PPO. Build them before the configuration.

    Under ZeRO-3 a model that is built after it is partitioned at once, and an embedding with a pad token then fails:
    ``IndexError: index 0 is out of bounds``.
    """

    model: Any
    ref_model: Any
    reward_model: Any
    value_model: Any


def absence() -> str:
    """Why the installed release of TRL has no PPO trainer; empty where it has one."""
    has_it = stack.satisfied({"trl": ">=0.9.6,<1.13"}, stack.installed())
    return "" if has_it else "PPO is in TRL from 0.9.6 (as PPOv2) to 1.12.0"


def trainer_class(subject: str) -> type:
    """TRL's PPO trainer wherever this release keeps it, or the corrected one."""
    from pytest_trlcompat import trainers
    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    chosen: type = trainers.PPOTrainer if subject == "corrected" else ppo_trainer_class()
    return chosen


def load_models(model: TinyModel) -> Models:
    """A policy and its reference from the folder, and a reward and a value model whose heads are not zero."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policy = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager")
    scorer = AutoModelForSequenceClassification.from_pretrained(model.path, num_labels=1, attn_implementation="eager")

    def scoring(seed: int) -> Any:
        scoring = copy.deepcopy(scorer)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            scoring.score.weight.uniform_(-0.5, 0.5, generator=generator)
        return scoring

    return Models(model=policy, ref_model=copy.deepcopy(policy), reward_model=scoring(1), value_model=scoring(2))


def build_trainer(
    subject: str,
    model: TinyModel,
    cls: type | None = None,
    arguments: Mapping[str, Any] | None = None,
    before: Callable[[], None] | None = None,
    config_cls: Any = None,
    **settings: Any,
) -> Any:
    """A PPO trainer on fresh tiny models: 2 batches, no dropout, no saving, no samples printed.

    Args:
        cls: a subclass to build instead of the subject's trainer.
        arguments: of the trainer by TRL's newest names, in place of the default ones; :data:`OMITTED` leaves one out.
        before: called between the configuration and the trainer.
        config_cls: the configuration's class; ours by default, see :func:`config`.
        settings: of its configuration; those that the release does not know are left out.
    """

    models = load_models(model)  # before the configuration
    trainer_arguments = {
        "args": config(config_cls, **settings),
        "processing_class": model.tokenizer,
        **vars(models),
        "train_dataset": queries(model.vocab_size),
        "eval_dataset": queries(model.vocab_size, rows=ROWS),
        **(arguments or {}),
    }
    if before is not None:
        before()
    trainer_arguments = {name: value for name, value in trainer_arguments.items() if value is not OMITTED}
    chosen = cls or trainer_class(subject)
    return chosen(**renamed(trainer_class(subject), trainer_arguments))


def config(cls: Any = None, /, **settings: Any) -> Any:
    """The release's PPO configuration for :data:`STEPS` batches of :data:`ROWS` rows.

    It is our ``PPOConfig`` for both subjects unless ``cls`` is given: TRL's cannot be made in some releases
    (``ppo-config-after-grpo``), and is the same in all others.
    """
    import os
    import tempfile

    from pytest_trlcompat.trainers import PPOConfig

    rows = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    values = {
        "output_dir": tempfile.mkdtemp(prefix="trlcompat-"),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "total_episodes": ROWS * STEPS,
        "response_length": RESPONSE_LENGTH,
        "local_rollout_forward_batch_size": rows,
        "num_sample_generations": 0,
        "temperature": 1.0,
        "kl_coef": 0.1,
        "learning_rate": 2e-2,
        # TRL's trainer does not clip (ppo-max-grad-norm), and both subjects are compared.
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 7,
    }
    cls = cls or PPOConfig
    return cls(**accepted(cls, {**values, **settings}))


def config_class(subject: str) -> Any:
    """The subject's own configuration: TRL's, or the corrected one."""
    from pytest_trlcompat import trainers
    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_config_class

    return trainers.PPOConfig if subject == "corrected" else ppo_config_class()


def configure_after_grpo(subject: str) -> None:
    """Make the subject's PPO configuration after GRPO's was imported, where there is one."""
    import contextlib
    import tempfile

    with contextlib.suppress(ImportError):
        from trl import GRPOConfig  # noqa: F401
    config_class(subject)(output_dir=tempfile.mkdtemp(prefix="trlcompat-"), report_to=[])


def gathered_policy(trainer: Any) -> dict[str, Any]:
    """The weights of the policy: whole tensors on the CPU by their names in it; on rank 0 at least. Collective."""
    state = trainer.accelerator.get_state_dict(trainer.model) or {}
    return {
        name[len("policy.") :]: tensor.detach().cpu().clone()
        for name, tensor in state.items()
        if name.startswith("policy.")
    }


def logged(trainer: Any) -> list[dict[str, float]]:
    """The numbers of each step that do not depend on the clock."""
    return [
        {key: value for key, value in entry.items() if isinstance(value, (int, float)) and key != "eps"}
        for entry in trainer.state.log_history
        if "objective/kl" in entry
    ]


def queries(vocab_size: int, rows: int = 16, length: int = PROMPT_LENGTH) -> Any:
    """Tokenised prompts of equal length; every word of them is known."""
    from datasets import Dataset

    words = vocab_size - 3
    ids = [[3 + (row * 7 + column * 5) % words for column in range(length)] for row in range(rows)]
    return Dataset.from_dict({"input_ids": ids})


def lora(**settings: Any) -> Any:
    """An adapter with large random weights: the policy is far from its reference from the beginning."""
    from peft import LoraConfig

    targets = ["q_proj", "v_proj", "down_proj"]
    fixed = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(target_modules=targets, **fixed, **settings)
