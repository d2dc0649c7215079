"""Trainers of the legacy RLOO, which TRL has until 0.21, on tiny models. Runs inside the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.conformance.ppo import objects as ppo
from pytest_trlcompat.training.aliases import renamed

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["absence", "build_trainer", "config_class", "takes_functions", "trainer_class"]

_CONFIG = "RLOOConfig"


def absence() -> str:
    """Why the installed release of TRL has another RLOO trainer; empty where it has this one."""
    has_it = stack.satisfied({"trl": ">=0.9.6,<0.22"}, stack.installed())
    return "" if has_it else "the RLOO trainer that is made as PPO's is in TRL until 0.21"


def trainer_class(subject: str) -> Any:
    """TRL's RLOO trainer, which ``trl`` itself exports from 0.11 on, or the same with its cures."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    from pytest_trlcompat import trainers

    return trainers.cured(RLOOTrainer) if subject == "corrected" else RLOOTrainer


def config_class() -> Any:
    """TRL's configuration of it, changed so that it can be made after GRPO's configuration was imported.

    ``RLOOConfig`` itself cannot, where TRL enters GRPO's ``model_init_kwargs`` into a list that all configurations
    share. That is the known issue ``ppo-config-after-grpo``, and is not tried here.
    """
    from trl.trainer.rloo_config import RLOOConfig

    # A module attribute, so that the arguments of a checkpoint can be unpickled.
    if _CONFIG not in globals():
        globals()[_CONFIG] = type(_CONFIG, (RLOOConfig,), {"model_init_kwargs": None})
    return globals()[_CONFIG]


def takes_functions() -> bool:
    """Whether this release documents a function in place of the reward model."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    return "Callable" in str(inspect.signature(inspect.unwrap(RLOOTrainer.__init__)).parameters["reward_model"])


def build_trainer(subject: str, model: TinyModel, arguments: Mapping[str, Any], **settings: Any) -> Any:
    """An RLOO trainer on fresh tiny models.

    Args:
        arguments: of the trainer by TRL's newest names, in place of the default ones.
        settings: of its configuration; those that the release does not know are left out.
    """
    models = ppo.load_models(model)  # before the configuration
    trainer_arguments = {
        "config": ppo.config(config_class(), **settings),
        "processing_class": model.tokenizer,
        "policy": models.model,
        "ref_policy": models.ref_model,
        "reward_model": models.reward_model,
        "eval_dataset": ppo.queries(model.vocab_size, rows=ppo.ROWS),
        **arguments,
    }
    chosen = trainer_class(subject)
    return chosen(**renamed(trainer_class("upstream"), trainer_arguments))
