"""DPO's adapter: how its trainer is built, how its batches are read, and the reference's settings and loss.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance import images, liger
from pytest_trlcompat.conformance.conventions import Conventions, of_installed
from pytest_trlcompat.conformance.dpo import pairs
from pytest_trlcompat.conformance.supervised.preferences import PREFERENCE_AXES, PreferenceAdapter, auxiliary_weight
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "DPOAdapter", "cut"]


class DPOAdapter(PreferenceAdapter):
    """``trl.DPOTrainer``.

    Its axes: ``data`` and ``tokenizer``, see :mod:`~pytest_trlcompat.conformance.dpo.pairs`; ``template``: another chat
    template; and :data:`~pytest_trlcompat.conformance.supervised.preferences.PREFERENCE_AXES`.
    """

    trainer: ClassVar[str] = "dpo"
    names: ClassVar[tuple[str, str]] = ("DPOTrainer", "DPOConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": (
            *("plain", "implicit", "ended", "zero", "empty", "iterable", "stored"),
            *pairs.CONVERSATIONAL,
        ),
        "pairs": (16, 6),
        "pairs_of_evaluation": (8, 6),
        "tokenizer": ("", "no_padding", "eos_padding", "bos", "other_zero"),
        "template": ("", "bos", "generation", "tools", "switch", "thought"),
        **PREFERENCE_AXES,
        "model": (*PREFERENCE_AXES["model"], *images.MODELS),
        "images": images.AXIS,
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("liger", "loss"): liger.DPO_LOSS,
        ("data", "tools"): "trl>=0.29",
        **{("images", kind): "trl>=0.29" for kind in images.AXIS if kind},
        # SFT reads the column from 0.19 on, and the functions that apply chat templates document it from 0.24 on.
        ("data", "template_kwargs"): "trl>=0.19",
        ("data", "stored"): "trl>=0.12",
        ("padding_free", True): "trl>=0.29",
        ("f_divergence_type", "forward_kl"): "trl>=0.29",
        # Until 0.11 it is not documented whether the prompt or the completions are cut.
        ("max_length", 8): "trl>=0.12",
        ("max_length", 4): "trl>=0.12",
        ("max_length", 5): "trl>=0.12",
        ("max_completion_length", 3): "trl>=0.12",
        ("tokenizer", "no_padding"): "trl>=0.24",
        ("data", "implicit"): "trl>=0.12",
        ("data", "conversational"): "trl>=0.12",
        ("data", "conversational_implicit"): "trl>=0.12",
        ("data", "turns"): "trl>=0.12",
        ("data", "thought"): "trl>=0.12",
    }
    choices: ClassVar[tuple[str, ...]] = ("loss_type",)
    base: ClassVar[Mapping[str, Any]] = {"beta": 0.5, "remove_unused_columns": False, "max_length": 64}
    own_state: ClassVar[Version] = Version("0.29")
    """From this release on the reference is "the model state before DPO training starts", adapter included; before,
    "DPOTrainer will unload the adapter for reference inference"."""

    def is_known(self, trl: Any, name: str, value: Any) -> bool:
        if name == "loss_type" and isinstance(value, list):
            # A release that takes a list of losses has a field for their weights.
            known = super().is_known(trl, "loss_weights", "")
            return known and all(super(DPOAdapter, self).is_known(trl, name, loss_type) for loss_type in value)
        return super().is_known(trl, name, value)

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """Until 0.27 documentation names members of an enumeration; texts are documented only later."""
        kinds = getattr(importlib.import_module("trl.trainer.dpo_config"), "FDivergenceType", None)
        if "f_divergence_type" in setting and kinds and Version(metadata.version("trl")) < Version("0.28"):
            setting = {**setting, "f_divergence_type": kinds(setting["f_divergence_type"])}
        return super().config(trl, setting)

    def dataset(self, model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
        return pairs.dataset(model, setting, seed, part)

    def tokenizer(self, model: TinyModel, setting: Mapping[str, Any]) -> Any:
        return pairs.tokenizer(model, setting)

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        if "completion_mask" in inputs:
            read = Read(_of_halves(inputs))
        elif "prompt_input_ids" in inputs and "chosen_labels" not in inputs:
            read = Read(_of_parts(inputs))
        else:
            read = Read(_of_labels(inputs))
        for name in ("chosen", "rejected"):
            for key in (f"ref_{name}_logps", f"reference_{name}_logps"):
                if key in inputs:
                    read.values[f"logps[reference_{name}]"] = [float(logprob) for logprob in inputs[key]]
        if inputs.get("pixel_values") is not None:
            row_inputs = images.of_rows(inputs, inputs["input_ids"].tolist())
            for place, row in enumerate(read.rows):
                halves = {"chosen": row_inputs[place], "rejected": row_inputs[place + len(read.rows)]}
                typed = {name: images.typed(pictures, [*map(int, row[name])]) for name, pictures in halves.items()}
                read.rows[place] = {
                    **row,
                    **{f"{name}_inputs": pictures for name, pictures in typed.items() if pictures},
                }
            read.problems += images.problems(inputs)
        return read

    def compared(self, row: Row) -> Row:
        """The row with digests in place of images."""
        pictures = {name: values for name, values in row.items() if name.endswith("_inputs")}
        if not pictures:
            return row
        digests = {name.replace("_inputs", "_images"): images.digests(values) for name, values in pictures.items()}
        return {**{name: values for name, values in row.items() if name not in pictures}, **digests}

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat import reference

        processing_class = pairs.tokenizer(model, setting)
        undecided = reference.PreferenceUndecided(**of_installed(self.trainer).undecided)
        limits = pairs.limits(arguments)
        if setting.get("images"):
            return [*pairs.with_images(model, setting, seed, part, limits)]
        rows = [
            reference.preference_row(*pairs.sequences(processing_class, row, undecided), **limits)
            for row in pairs.pairs(model, setting, seed, part)
        ]
        # A pair without any token of an answer teaches nothing; it would only count in means.
        return [row for row in rows if any(row["chosen_mask"]) or any(row["rejected_mask"])]

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.PreferenceSettings:
        from pytest_trlcompat import reference

        kind = arguments["loss_type"]
        weights = arguments.get("loss_weights")
        return settings_from(
            reference.PreferenceSettings,
            reference.PreferenceUndecided,
            arguments,
            conventions,
            world_size,
            loss_type=(kind,) if isinstance(kind, str) else tuple(kind),
            loss_weights=None if weights is None else tuple(weights),
            router_aux_loss_coef=auxiliary_weight(models[0], arguments),
        )

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.PreferenceSettings)
        return reference.PreferenceObjective(models[1], settings)

    def watched(self, trainer_class: type, recording: Recording) -> type:
        """A subclass that records sequences and log-probabilities where they are scored.

        Many releases cut sequences only after the collator; until 0.28 they are put together there as well, in the
        method that returns log-probabilities, which is called for the policy first.
        """

        class Watched(trainer_class):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                kind = getattr(self.args, "f_divergence_type", "")
                recording.arguments["f_divergence_type"] = str(getattr(kind, "value", kind)) or "reverse_kl"

        score: Any = getattr(trainer_class, "concatenated_forward", None)
        compute: Any = getattr(trainer_class, "_compute_loss", None)

        def concatenated_forward(self: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with _inputs_of(model) as seen:
                scores = score(self, model, batch, *args, **kwargs)
            # TRL also scores before the first batch, to compute reference log-probabilities in advance.
            if recording.micro_batches:
                _keep(recording.micro_batches[-1], scores, seen)
            return scores

        def _compute_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            with _inputs_of(model) as seen:
                loss = compute(self, model, *args, **kwargs)
            _cut_rows(recording.micro_batches[-1], seen)
            return loss

        if score is not None:
            Watched.concatenated_forward = concatenated_forward
        elif compute is not None:
            Watched._compute_loss = _compute_loss
        Watched.__name__ = trainer_class.__name__
        return Watched


ADAPTER = DPOAdapter()


def _of_halves(inputs: Mapping[str, Any]) -> list[Row]:
    """Rows of batches from 0.29 on: both completions with their prompts, the chosen ones first."""
    masks, counts = inputs["attention_mask"].tolist(), inputs["completion_mask"].tolist()
    rows = list(zip(inputs["input_ids"].tolist(), masks, counts, strict=True))
    size = len(rows) // 2
    return [_pair(*rows[place], *rows[place + size]) for place in range(size)]


def _of_labels(inputs: Mapping[str, Any]) -> list[Row]:
    """Rows of batches until 0.11: each completion with its prompt, and labels."""
    rows = []
    for place in range(len(inputs["chosen_input_ids"])):
        columns: list[Sequence[float]] = []
        for name in ("chosen", "rejected"):
            columns += [inputs[f"{name}_{column}"][place].tolist() for column in ("input_ids", "attention_mask")]
            columns.append([int(label != -100) for label in inputs[f"{name}_labels"][place].tolist()])
        rows.append(_pair(*columns))
    return rows


def _of_parts(inputs: Mapping[str, Any]) -> list[Row]:
    """Rows of batches from 0.12 to 0.28: prompts and completions are separate, and are cut together only later."""
    rows = []
    for place in range(len(inputs["prompt_input_ids"])):
        columns: list[Sequence[float]] = []
        prompt = _real(inputs["prompt_input_ids"][place], inputs["prompt_attention_mask"][place])
        for name in ("chosen", "rejected"):
            answer = _real(inputs[f"{name}_input_ids"][place], inputs[f"{name}_attention_mask"][place])
            columns += [prompt + answer, [1] * (len(prompt) + len(answer)), [0] * len(prompt) + [1] * len(answer)]
        rows.append(_pair(*columns))
    return rows


def _real(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    return [token for token, real in zip(ids.tolist(), mask.tolist(), strict=True) if real]


def _pair(*columns: Sequence[float]) -> Row:
    """A row without padding from ids, attention mask and completion mask, of the chosen, then of the rejected one."""
    row: dict[str, tuple[float, ...]] = {}
    for name, (ids, real, counts) in (("chosen", columns[:3]), ("rejected", columns[3:])):
        places = [place for place, is_real in enumerate(real) if is_real]
        row[name] = tuple(float(ids[place]) for place in places)
        row[f"{name}_mask"] = tuple(float(counts[place]) for place in places)
    return row


@contextlib.contextmanager
def _inputs_of(model: Any) -> Iterator[list[list[list[int]]]]:
    """Collect the token ids of each row with which the model is called, without padding."""
    calls: list[list[list[int]]] = []

    def keep(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        calls.append([_real(*row) for row in zip(ids, kwargs["attention_mask"], strict=True)])

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _keep(batch: Any, scores: Any, seen: Sequence[Sequence[Sequence[int]]]) -> None:
    """Record log-probabilities of a micro-batch, and its rows as the policy saw them."""
    is_policy = "logps[chosen]" not in batch.values
    logps = (scores["chosen_logps"], scores["rejected_logps"]) if isinstance(scores, Mapping) else scores[:2]
    for name, values in zip(("chosen", "rejected"), logps, strict=True):
        stage = f"logps[{name}]" if is_policy else f"logps[reference_{name}]"
        batch.values.setdefault(stage, values.detach().float().cpu().tolist())
    if is_policy:
        _cut_rows(batch, seen)


def _cut_rows(batch: Any, seen: Sequence[Sequence[Sequence[int]]]) -> None:
    """Replace the rows of a micro-batch by those that the policy saw, which is called first."""
    size = len(batch.rows)
    if seen and len(seen[0]) == 2 * size:
        batch.rows = [
            {**row, **cut(row, "chosen", seen[0][place]), **cut(row, "rejected", seen[0][size + place])}
            for place, row in enumerate(batch.rows)
        ]


def cut(row: Row, name: str, ids: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """A sequence as the model saw it, and its mask of the completion, which follows from where it was cut."""
    whole, mask = row[name], row[f"{name}_mask"]
    seen = tuple(map(float, ids))
    starts = range(len(whole) - len(seen) + 1)
    start = next(
        (place for place in starts if whole[place : place + len(seen)] == seen), max(0, len(whole) - len(seen))
    )
    return {name: seen, f"{name}_mask": mask[start : start + len(seen)]}
