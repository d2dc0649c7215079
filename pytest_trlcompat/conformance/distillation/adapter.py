"""Distillation's adapter: how its trainer is built, how batches are read, and the reference's settings and loss.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance.architectures import ARCHITECTURES
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.distillation import models, prompts, sampled
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised.hooks import AXES, SupervisedHooks
from pytest_trlcompat.conformance.supervised.preferences import with_dropout
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.conformance.comparison import Difference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "DistillationAdapter"]


class DistillationAdapter(SupervisedHooks):
    """``trl.DistillationTrainer``.

    Its axes: ``data``, ``prompts`` and ``tokenizer``, see :mod:`~pytest_trlcompat.conformance.distillation.prompts`;
    ``teacher`` and further values of ``model`` and ``adapter``, see
    :mod:`~pytest_trlcompat.conformance.distillation.models`; ``dropout``: the student's config, or that of its adapter,
    asks for dropout, which ``disable_dropout`` is documented to switch off.
    """

    trainer: ClassVar[str] = "distillation"
    names: ClassVar[tuple[str, str]] = ("DistillationTrainer", "DistillationConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": prompts.KINDS,
        "prompts": (32, 40),
        "prompts_of_evaluation": (8, 5, 12),
        "tokenizer": prompts.TOKENIZERS,
        "teacher": models.TEACHERS,
        "model": (*AXES["model"], "generation_settings", "two_ends", *ARCHITECTURES),
        "adapter": models.ADAPTERS,
        "dropout": ("", "attention", "adapter"),
    }
    base: ClassVar[Mapping[str, Any]] = {"max_completion_length": 5, "temperature": 1.0}
    rows: ClassVar[int] = 8
    only_in_training: ClassVar[frozenset[str]] = SupervisedHooks.only_in_training | {"step_time"}

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        adapter = models.adapter_config(setting)
        extra: dict[str, Any] = {} if adapter is None else {"peft_config": adapter}
        student = objects.policy(model, setting)
        if setting.get("dropout"):
            student = with_dropout(student, adapter, setting)
        data = prompts.of_setting(model, setting, seed, config.max_completion_length)
        if setting.get("evaluation"):
            extra["eval_dataset"] = prompts.dataset(data, setting, "evaluation")
        if setting.get("teacher") == "name_in_config":
            config.teacher_model_name_or_path = str(models.teacher_of(model).path)
        trainer = trainer_class(
            model=student,
            teacher_model=models.teacher(model, setting),
            args=config,
            train_dataset=prompts.dataset(data, setting, "training"),
            processing_class=prompts.tokenizer(model, setting),
            **extra,
        )
        if setting.get("adapter") in ("peft_config", "saved_head") and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def surrounding(
        self, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, recording: Recording
    ) -> contextlib.AbstractContextManager[None]:
        data = prompts.of_setting(model, setting, seed, config.max_completion_length)
        return sampled.watched(data, recording)

    def watched(self, trainer_class: type, recording: Recording) -> type:
        return sampled.watched_trainer(trainer_class, recording)

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        data = prompts.of_setting(model, setting, seed, int(recordings[0].arguments["max_completion_length"]))
        rows = prompts.expected_rows(model, setting, data, "training")
        dtype = str(next(models[1].parameters()).dtype)
        return sampled.differences(recordings, rows, prompts.tokenizer(model, setting), data.ends, dtype)

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        return Read(sampled.rows_of(inputs))

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        data = prompts.of_setting(model, setting, seed, int(arguments["max_completion_length"]))
        return [*prompts.expected_rows(model, setting, data, part)]

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return models.untrained(model, setting)

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.DistillationSettings:
        from pytest_trlcompat import reference

        # Only words are sampled, and the end of sequence of the setting; so both possible ends may be named.
        ends = (1, objects.OTHER_END)
        settings, undecided = reference.DistillationSettings, reference.DistillationUndecided
        return settings_from(settings, undecided, arguments, conventions, world_size, eos_token_id=ends)

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.DistillationSettings)
        return reference.DistillationObjective(models[1], settings)


ADAPTER = DistillationAdapter()
