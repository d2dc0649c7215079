"""KTO's adapter: how its trainer is built, how its batches are read, and the reference's settings and loss.

Runs inside a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.conventions import Conventions, of_installed
from pytest_trlcompat.conformance.kto import unpaired
from pytest_trlcompat.conformance.supervised.preferences import PREFERENCE_AXES, PreferenceAdapter, auxiliary_weight
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "KTOAdapter"]


class KTOAdapter(PreferenceAdapter):
    """``trl.KTOTrainer``.

    Its axes: ``data``, ``labels``, see :mod:`~pytest_trlcompat.conformance.kto.unpaired`; ``pairs``: rows, as DPO's;
    ``tokenizer`` and ``template`` as DPO's; and
    :data:`~pytest_trlcompat.conformance.supervised.preferences.PREFERENCE_AXES`.
    """

    trainer: ClassVar[str] = "kto"
    names: ClassVar[tuple[str, str]] = ("KTOTrainer", "KTOConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": unpaired.KINDS,
        "labels": ("", "desirable", "undesirable"),
        "pairs": (16, 6),
        "pairs_of_evaluation": (8, 6),
        "tokenizer": ("", "no_padding", "eos_padding", "bos"),
        "template": ("", "bos", "generation", "behind_end"),
        **PREFERENCE_AXES,
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        **{("data", kind): "trl>=0.12" for kind in unpaired.KINDS if kind not in ("plain", "ended", "empty")},
        ("data", "iterable"): "trl>=1.9",
        ("data", "tools"): "trl>=0.19",
        ("data", "template_kwargs"): "trl>=0.24",
        # "If `None`, no truncation is applied."
        ("max_length", "None"): "trl>=1.2",
        ("evaluation", "streamed"): "trl>=1.3",
        ("max_length", 8): "trl>=0.12",
        ("tokenizer", "no_padding"): "trl>=1.9",
        ("model", "name"): "trl>=0.12",
    }
    choices: ClassVar[tuple[str, ...]] = ("loss_type",)
    base: ClassVar[Mapping[str, Any]] = {"beta": 0.5, "max_length": 64}
    own_state: ClassVar[Version] = Version("1.2")
    """From this release on the reference is "the model state before KTO training starts", adapter included."""

    def dataset(self, model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
        return unpaired.dataset(model, setting, seed, part)

    def tokenizer(self, model: TinyModel, setting: Mapping[str, Any]) -> Any:
        return unpaired.tokenizer(model, setting)

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        labels = [bool(label) for label in inputs["label"]]
        columns, kl = _sequences(inputs, ""), _sequences(inputs, "KL_")
        if not columns:
            # The collator got texts, and the training ends in an error.
            return Read([])
        read = Read([{"label": (float(label),), **sequence} for label, sequence in zip(labels, columns, strict=True)])
        if kl:
            mismatched = [{f"kl_{name}": values for name, values in sequence.items()} for sequence in kl]
            read.rows = [{**row, **other} for row, other in zip(read.rows, mismatched, strict=True)]
            read.problems += _from_elsewhere(columns, kl, arguments)
        for name in ("ref", "reference"):
            if f"{name}_logps" in inputs:
                values = [float(logprob) for logprob in inputs[f"{name}_logps"]]
                for kind, desirable in (("chosen", True), ("rejected", False)):
                    kind_values = [value for value, label in zip(values, labels, strict=True) if label is desirable]
                    read.values[f"logps[reference_{kind}]"] = kind_values
            if inputs.get(f"{name}_KL_logps") is not None:
                read.values["logps[reference_kl]"] = [float(logprob) for logprob in inputs[f"{name}_KL_logps"]]
        return read

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat import reference

        undecided = reference.KTOUndecided(**of_installed(self.trainer).undecided)
        settings = reference.KTOSettings(loss_type=arguments.get("loss_type", "kto"), undecided=undecided)
        size = arguments[f"per_device_{'train' if part == 'training' else 'eval'}_batch_size"]
        rows = unpaired.rows(model, setting, seed, part)
        processing_class, most = unpaired.tokenizer(model, setting), arguments["max_length"]
        return [self.compared(row) for row in unpaired.expected_rows(processing_class, rows, settings, int(size), most)]

    def compared(self, row: Row) -> Row:
        """The row, without the mismatched completion in releases that shuffle rows before they exchange completions."""
        if Version(metadata.version("trl")) < _SHUFFLES_UNTIL:
            return {name: values for name, values in row.items() if not name.startswith("kl_")}
        return row

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """Sequences of which more is cut off than what exceeds ``max_length``."""
        yield from super().extra_differences(recordings, models, model, setting, seed)
        if isinstance(setting.get("max_length"), int):
            processing_class = unpaired.tokenizer(model, setting)
            yield from _overcut(
                recordings, unpaired.tokens(processing_class, unpaired.rows(model, setting, seed, "training"))
            )

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.KTOSettings:
        from pytest_trlcompat import reference

        return settings_from(
            reference.KTOSettings,
            reference.KTOUndecided,
            arguments,
            conventions,
            world_size,
            router_aux_loss_coef=auxiliary_weight(models[0], arguments),
        )

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.KTOSettings)
        return reference.KTOObjective(models[1], settings)

    def watched(self, trainer_class: type, recording: Recording) -> type:
        """A subclass that records log-probabilities, where a method of its own computes the loss from them."""
        loss: Any = getattr(trainer_class, "kto_loss", None)
        if loss is None:
            return trainer_class

        def kto_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recording.micro_batches:
                for stage, values in zip(_GIVEN, args, strict=False):
                    if values is not None:
                        numbers = values.detach().float().cpu().tolist()
                        recording.micro_batches[-1].values.setdefault(stage, numbers)
            return loss(self, *args, **kwargs)

        return type(trainer_class.__name__, (trainer_class,), {"kto_loss": kto_loss})


ADAPTER = KTOAdapter()
_ADDED = 2
"""How many tokens of a sequence a release may replace by those that begin and end one."""
_SHUFFLES_UNTIL = Version("0.12")
"""The first release that does not shuffle rows before it exchanges completions."""
_GIVEN = (
    *("logps[chosen]", "logps[rejected]", "logps[kl]"),
    *("logps[reference_chosen]", "logps[reference_rejected]", "logps[reference_kl]"),
)
"""The quantities that are arguments of ``kto_loss``, in its order."""


def _sequences(inputs: Mapping[str, Any], prefix: str) -> list[dict[str, tuple[float, ...]]]:
    """Ids and mask of the completion of each sequence, without padding; empty where no input has this prefix.

    Releases until 1.7 have other names for ids and attention mask, and those until 1.5 have labels.
    """
    ids = inputs.get(f"{prefix}input_ids", inputs.get(f"{prefix}completion_input_ids"))
    if ids is None:
        return []
    real = inputs.get(f"{prefix}attention_mask", inputs.get(f"{prefix}completion_attention_mask"))
    labels = inputs.get(f"{prefix}completion_labels")
    counted = inputs[f"{prefix}completion_mask"] if labels is None else labels != -100
    sequences = []
    for row_ids, row_mask, counts in zip(ids.tolist(), real.tolist(), counted.tolist(), strict=True):
        places = [place for place, is_real in enumerate(row_mask) if is_real]
        sequences.append(
            {
                "ids": tuple(float(row_ids[place]) for place in places),
                "mask": tuple(float(counts[place]) for place in places),
            }
        )
    return sequences


def _overcut(
    recordings: Sequence[Recording], whole: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[Difference]:
    """The first sequence that is shorter than both ``max_length`` and its uncut length by more than :data:`_ADDED`.

    Args:
        whole: token ids of prompts and of their completions, before anything is cut.
    """
    for rank, recording in enumerate(recordings):
        most = int(recording.arguments["max_length"])
        for number, batch in enumerate(recording.training):
            for row in batch.rows:
                ids = [int(token) for token in row["ids"]]
                lengths = [len(prompt) + len(answer) for prompt, answer in whole if ids[: len(prompt)] == [*prompt]]
                if lengths and len(ids) < min([*lengths, most]) - _ADDED:
                    where = f"training, rank {rank}, micro-batch {number}"
                    yield Difference("data[kept]", where, [min([*lengths, most])], [len(ids)], math.inf, _ADDED)
                    return


def _from_elsewhere(
    sequences: list[dict[str, tuple[float, ...]]],
    mismatched: list[dict[str, tuple[float, ...]]],
    arguments: Mapping[str, Any],
) -> list[tuple[str, Any, Any]]:
    """Where nothing was cut, the estimate of the divergence must have the completions of its own batch."""

    def completions(rows: list[dict[str, tuple[float, ...]]]) -> list[tuple[float, ...]]:
        return sorted(tuple(token for token, mask in zip(row["ids"], row["mask"], strict=True) if mask) for row in rows)

    most = arguments.get("max_length")
    if most is not None and max(len(row["ids"]) for row in [*sequences, *mismatched]) >= most:
        return []
    expected, seen = completions(sequences), completions(mismatched)
    return [] if expected == seen else [("data[kl_completions]", str(expected), str(seen))]
