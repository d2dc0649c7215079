"""Each renamed argument is one that the installed stack takes, by one of its names."""

from __future__ import annotations

import contextlib

import pytest

from pytest_trlcompat.training.aliases import RENAMED, accepted, name_in, names_taken, renamed


def _takers() -> list[frozenset[str]]:
    """What the installed releases take: configs, trainers, a model's configuration."""
    import transformers
    import trl

    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    takers = [names_taken(each) for each in (trl.GRPOConfig, transformers.Trainer, trl.GRPOTrainer, trl.DPOTrainer)]
    with contextlib.suppress(ImportError, AttributeError):  # a release without PPO
        takers.append(names_taken(ppo_trainer_class()))
    return [*takers, frozenset(vars(transformers.PretrainedConfig()))]


@pytest.mark.parametrize("newest", RENAMED)
def test_the_installed_stack_takes_a_renamed_argument(newest: str) -> None:
    names = [name_in(taken, newest) for taken in _takers()]
    assert set(names) - {None} <= {newest, *RENAMED[newest]}
    assert set(names) != {None}, newest


def test_a_config_and_a_trainer_take_what_is_given_by_the_newest_name() -> None:
    import transformers
    import trl

    arguments = {"output_dir": "unused", "bf16": False, "eval_strategy": "steps", "eval_steps": 1}
    config = trl.GRPOConfig(**accepted(trl.GRPOConfig, arguments))
    assert config.eval_strategy == "steps"
    assert set(renamed(transformers.Trainer, {"processing_class": None})) <= {"processing_class", "tokenizer"}
