"""Trainers whose trainings begin in ranks, and what was said of them."""

from __future__ import annotations

import logging
from typing import Any

from pytest_trlcompat import tiny
from pytest_trlcompat.training.aliases import accepted

from .checks_bodies import forgive_trl


def build_dpo(folder: str, dropout: float, cls: Any = None) -> Any:
    """DPO of a tiny model for one step."""
    import trl

    forgive_trl()
    cls = cls or trl.DPOTrainer
    model = tiny.qwen2(initializer_range=0.1)
    policy, reference = model.new_model(), model.new_model()
    policy.config.attention_dropout = dropout
    args = trl.DPOConfig(
        output_dir=folder, max_steps=1, per_device_train_batch_size=2, bf16=False, report_to="none", save_strategy="no"
    )
    return cls(
        model=policy,
        ref_model=reference,
        args=args,
        train_dataset=tiny.preferences(),
        **accepted(cls, {"processing_class": model.tokenizer}),
    )


def train_plainly(folder: str, dropout: float) -> None:
    build_dpo(folder, dropout).train()


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.issues: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.issues.append(vars(record)["known_issue"])


def said(folder: str, how: str, *, twice: bool = False) -> list[str]:
    """The issues that the log names of a training with ``callback``, of a ``cured`` one, or of ``both``."""
    import trl

    from pytest_trlcompat.checks import CompatCallback
    from pytest_trlcompat.trainers import cured
    from pytest_trlcompat.training.begin import LOGGER

    handler = _Logged()
    logging.getLogger(LOGGER).addHandler(handler)
    trainer = build_dpo(folder, 0.1, trl.DPOTrainer if how == "callback" else cured(trl.DPOTrainer))
    if how != "cured":
        trainer.add_callback(CompatCallback(trainer))
    trainer.train()
    if twice:
        trainer.train()
    return handler.issues


def agreement(folder: str) -> tuple[set[str], set[str], set[str]]:
    """What is said of a GRPO training, what the doctor says, and what is said of the same trainer, cured."""
    import trl

    from pytest_trlcompat import stack
    from pytest_trlcompat.catalog import known_issues, measurements
    from pytest_trlcompat.doctor.stack_spec import Mention, of_mentions
    from pytest_trlcompat.doctor.training_diagnosis import diagnose_training
    from pytest_trlcompat.trainers import cured
    from pytest_trlcompat.training.begin import biting
    from pytest_trlcompat.training.training import Training

    forgive_trl()
    catalog = known_issues.load()
    mentions = [Mention.of_version(*item, "installed here") for item in stack.installed().items()]
    spec = of_mentions(mentions, "installed here", complete=True)
    answers = []
    for cls in (trl.GRPOTrainer, cured(trl.GRPOTrainer)):
        model = tiny.qwen2(initializer_range=0.1)
        args = trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=2, num_generations=2, bf16=False, report_to="none"
        )
        trainer = cls(
            model=model.new_model(),
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=args,
            train_dataset=tiny.prompts(),
            processing_class=model.tokenizer,
        )
        answers.append(({issue.id for issue in biting(trainer)}, trainer))
    training = Training.of(answers[0][1])
    doctors = diagnose_training(spec, catalog, measurements.published(catalog), training).bite
    return answers[0][0], {found.issue.id for found in doctors}, answers[1][0]
