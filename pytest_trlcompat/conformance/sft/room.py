"""How SFT is trained and read for conformance, see :class:`~pytest_trlcompat.conformance.supervised.room.Room`.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance.architectures import ARCHITECTURES
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.sft import data
from pytest_trlcompat.conformance.supervised.records import Read, Row
from pytest_trlcompat.conformance.supervised.room import AXES, Room
from pytest_trlcompat.conformance.supervised.truth import settings_from

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ROOM", "SFTRoom"]

_IGNORED = -100


class SFTRoom(Room):
    """``SFTTrainer``."""

    trainer = "sft"
    names = ("SFTTrainer", "SFTConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": (
            *("text", "other_field", "ended", "messages", "turns", "system", "prompt_completion"),
            *("prompt_completion_messages", "prompt_turns_completion", "conversations", "long_prompts", "questions"),
            *("input_ids", "labels"),
        ),
        "tokenizer": ("", "same_end", "no_padding", "beginning", "left", "generation"),
        "stream": (False, True),
        "model": (*AXES["model"], *ARCHITECTURES),
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("data", "conversations"): "trl>=0.18",
        **{("data", each): "trl>=0.15" for each in ("prompt_completion_messages", "prompt_turns_completion")},
        ("tokenizer", "no_padding"): "trl>=0.16",
        ("data", "labels"): "trl>=0.16",
        # Until then these take means over tokens by themselves, without the first one, which documentation leaves open.
        **{("model", each): "transformers>=4.48" for each in ("gpt2", "granite")},
        # Until then rows that are not padded are kept apart by flash attention alone, which is not on a CPU.
        ("padding_free", True): "trl>=0.24",
        ("packing_strategy", "bfd"): "trl>=0.24",
        ("packing_strategy", "bfd_split"): "trl>=0.24",
    }
    choices = ("loss_type", "packing_strategy", "truncation_mode")

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """Before 0.12 the column of texts has no default, and is not named for data of other formats."""
        is_text = setting.get("data", "text") in ("text", "ended")
        return super().config(trl, {**({"dataset_text_field": "text"} if is_text else {}), **setting})

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        adapter = objects.adapter_config(setting)
        words = data.tokenizer(model, setting)
        name = "processing_class" if "processing_class" in inspect.signature(trainer_class).parameters else "tokenizer"
        extra: dict[str, Any] = {name: words}
        if adapter is not None:
            extra["peft_config"] = adapter
        if setting.get("evaluation"):
            extra["eval_dataset"] = data.dataset(model, setting, seed, "evaluation")
        if setting.get("data") == "questions":
            extra["formatting_func"] = data.formatted
        trainer = trainer_class(
            model=objects.policy(model, setting),
            args=config,
            train_dataset=data.dataset(model, setting, seed, "training"),
            **extra,
        )
        if adapter is not None and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        ids, labels = inputs["input_ids"].tolist(), inputs["labels"].tolist()
        mask = inputs.get("attention_mask")
        masks = mask.tolist() if mask is not None and mask.dim() == 2 else [[1] * len(row) for row in ids]
        positions = inputs["position_ids"].tolist() if inputs.get("position_ids") is not None else [None] * len(ids)
        found = Read([])
        for row, label, real, places in zip(ids, labels, masks, positions, strict=True):
            if any(each != _IGNORED for each, there in zip(label, real, strict=True) if not there):
                found.problems.append(("data[labels of padding]", _IGNORED, str(label)))
            kept = [number for number, there in enumerate(real) if there]
            if kept and kept != list(range(kept[0], kept[-1] + 1)):
                found.problems.append(("data[attention_mask]", "padding on one side", str(real)))
            own = [label[each] for each in kept]
            pieces = list(
                _pieces([row[each] for each in kept], own, None if places is None else [places[each] for each in kept])
            )
            found.rows += pieces
            if any(each["labels"][0] != _IGNORED for each in pieces[1:]):
                found.problems.append(("data[labels]", "none for the first token of a row behind another", str(own)))
        multiple = arguments.get("pad_to_multiple_of")
        if multiple and len(ids[0]) % int(multiple):
            found.problems.append(("data[width]", f"a multiple of {multiple}", len(ids[0])))
        return found

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat.conformance.conventions import of_installed
        from pytest_trlcompat.reference import SFTUndecided

        undecided = SFTUndecided(**of_installed(self.trainer).undecided)
        return data.expected_rows(model, setting, arguments, seed, part, undecided)

    def compared(self, row: Row) -> Row:
        """Nothing predicts the first token, whatever its label."""
        return {"input_ids": row["input_ids"], "labels": (_IGNORED, *row["labels"][1:])}

    def expected_size(self, rows: list[Row], arguments: Mapping[str, Any], part: str) -> int:
        return data.expected_size(rows, arguments, part)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return (objects.untrained(model, setting)[0],)

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.SFTSettings:
        from pytest_trlcompat import reference

        config: Any = models[0].config
        coefficient, experts = None, 1
        if hasattr(config, "output_router_logits"):
            given = arguments.get("router_aux_loss_coef")
            experts = int(config.num_experts_per_tok)
            if given is not None or config.output_router_logits:
                coefficient = float(config.router_aux_loss_coef if given is None else given)
        return settings_from(
            *(reference.SFTSettings, reference.SFTUndecided, arguments, conventions, world_size),
            router_aux_loss_coef=coefficient,
            experts_per_token=experts,
        )

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.SFTSettings)
        return reference.sft_objective(settings)


def _pieces(ids: list[int], labels: list[int], positions: list[int] | None) -> Iterator[Row]:
    """The rows that stand behind each other in one, by their positions."""
    starts = [0] if positions is None else [number for number, each in enumerate(positions) if each == 0] or [0]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield {"input_ids": tuple(ids[start:end]), "labels": tuple(labels[start:end])}


ROOM = SFTRoom()
