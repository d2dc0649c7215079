"""ORPO's adapter: how a trainer is built, how its batches are read, and what the reference is asked for.

Pairs are DPO's, and there is no reference model. Encoder-decoder models are not tried. Runs inside a rank; imports the
stack only inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.dpo import adapter as dpo
from pytest_trlcompat.conformance.dpo import pairs
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised.preferences import PREFERENCE_AXES, PreferenceAdapter, auxiliary_weight
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "ORPOAdapter"]

_READINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"": {}, "responses": {"nll_tokens": "completion"}, "pairs": {"nll_mean": "pairs"}}
)
"""What of :class:`~pytest_trlcompat.reference.ORPOUndecided` the axis ``nll`` reads as paper and documentation do."""


class ORPOAdapter(PreferenceAdapter):
    """``trl.ORPOTrainer``, or that of ``trl.experimental.orpo``.

    Its axes: ``data``, ``tokenizer`` and ``template`` as DPO's, see :mod:`~pytest_trlcompat.conformance.dpo.pairs`;
    ``nll``: where paper and documentation say of the negative log-likelihood what no release does, it is compared with
    them, and everywhere else with what releases do: ``responses``, over the tokens of chosen responses; ``pairs``, the
    mean of the pairs' means; and :data:`~pytest_trlcompat.conformance.supervised.preferences.PREFERENCE_AXES`.
    """

    trainer: ClassVar[str] = "orpo"
    names: ClassVar[tuple[str, str]] = ("ORPOTrainer", "ORPOConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": ("plain", "implicit", "ended", "zero", "empty", "conversational", "conversational_implicit", "turns"),
        "pairs": (16, 12, 6),
        "pairs_of_evaluation": (8, 6),
        "tokenizer": ("", "eos_padding", "bos", "other_zero"),
        "template": ("", "bos", "generation"),
        "nll": tuple(_READINGS),
        **PREFERENCE_AXES,
    }
    base: ClassVar[Mapping[str, Any]] = {"beta": 0.5, "remove_unused_columns": False, "max_length": 64}
    own_state: ClassVar[Version] = Version("0")

    def dataset(self, model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
        return pairs.dataset(model, setting, seed, part)

    def tokenizer(self, model: TinyModel, setting: Mapping[str, Any]) -> Any:
        return pairs.tokenizer(model, setting)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return (objects.untrained(model, setting)[0],)

    def after_step(self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings) -> None:
        return None

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        if "chosen_input_ids" not in inputs:
            # The collator was given texts, and what follows ends in an error.
            return Read([])
        return dpo.ADAPTER.read(inputs, arguments)

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat import reference

        processing_class = pairs.tokenizer(model, setting)
        undecided = reference.PreferenceUndecided()
        limits = pairs.limits(arguments)
        rows = [
            reference.orpo_row(*pairs.sequences(processing_class, pair, undecided), **limits)
            for pair in pairs.pairs(model, setting, seed, part)
        ]
        # A pair of which no token of an answer is left teaches nothing, and has no mean.
        return [row for row in rows if any(row["chosen_mask"]) and any(row["rejected_mask"])]

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.ORPOSettings:
        from pytest_trlcompat import reference

        read_as = {**conventions.undecided, **_READINGS[arguments["nll"]]}
        return settings_from(
            reference.ORPOSettings,
            reference.ORPOUndecided,
            arguments,
            dataclasses.replace(conventions, undecided=read_as),
            world_size,
            router_aux_loss_coef=auxiliary_weight(models[0], arguments),
        )

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.ORPOSettings)
        return reference.ORPOObjective(settings, getattr(models[0].config, "num_experts_per_tok", 1))

    def surrounding(
        self, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, recording: Recording
    ) -> AbstractContextManager[None]:
        recording.arguments["nll"] = setting.get("nll", "")
        return nullcontext()

    def watched(self, trainer_class: type, recording: Recording) -> type:
        """With the mean log-probabilities of completions, which its loss is given."""
        upstream: Any = trainer_class

        def odds_ratio_loss(self: Any, chosen: Any, rejected: Any) -> Any:
            if recording.micro_batches:
                for name, logps in (("chosen", chosen), ("rejected", rejected)):
                    recording.micro_batches[-1].values[f"logps[{name}]"] = logps.detach().float().cpu().tolist()
            return upstream.odds_ratio_loss(self, chosen, rejected)

        return type(trainer_class.__name__, (trainer_class,), {"odds_ratio_loss": odds_ratio_loss})


ADAPTER = ORPOAdapter()
