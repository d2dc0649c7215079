"""How reward models are trained and read for conformance, see
:class:`~pytest_trlcompat.conformance.supervised.room.Room`.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.architectures import saved
from pytest_trlcompat.conformance.conventions import Conventions, of_installed
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.reward import data
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.room import Room
from pytest_trlcompat.conformance.supervised.truth import settings_from
from pytest_trlcompat.conformance.training import own_fields

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ROOM", "RewardRoom"]


class RewardRoom(Room):
    """``RewardTrainer``."""

    trainer = "reward"
    names = ("RewardTrainer", "RewardConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": data.KINDS,
        "margins": (False, True),
        "tokenizer": ("", "same_end", "no_padding", "right", "beginning"),
        "task": ("SEQ_CLS", ""),
        "dropout": ("", "attention", "adapter"),
        "stream": (False, True),
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        **{("data", kind): "trl>=0.12" for kind in ("implicit", "conversational", "ended")},
        **{("data", kind): "trl>=0.24" for kind in ("explicit", "conversational_explicit")},
        ("dropout", "attention"): "trl>=0.14",
        ("dropout", "adapter"): "trl>=0.14",
        ("model", "name"): "trl>=0.24",
        ("tokenizer", "no_padding"): "trl>=0.24",
        ("stream", True): "trl>=0.24",
    }
    base: ClassVar[Mapping[str, Any]] = {"max_length": 64}

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """Until 0.23 the columns of pairs are none of the model's, and must be kept."""
        if Version(metadata.version("trl")) < Version("0.24"):
            setting = {"remove_unused_columns": False, **setting}
        with own_fields(trl.RewardConfig):
            return super().config(trl, setting)

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        extra: dict[str, Any] = {self.words_argument(trainer_class): data.tokenizer(model, setting)}
        if setting.get("adapter") in ("peft_config", "both"):
            extra["peft_config"] = _adapter(setting)
        if setting.get("evaluation"):
            extra["eval_dataset"] = data.dataset(model, setting, seed, "evaluation")
        trainer = trainer_class(
            model=_policy(model, setting),
            args=config,
            train_dataset=data.dataset(model, setting, seed, "training"),
            **extra,
        )
        if "peft_config" in extra and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def watched(self, trainer_class: type, found: Recording) -> type:
        """Without the table of samples that releases until 0.23 compute and print before each evaluation."""
        if not hasattr(trainer_class, "visualize_samples"):
            return trainer_class

        def no_table(*args: Any, **kwargs: Any) -> None:
            pass

        return type(trainer_class.__name__, (trainer_class,), {"visualize_samples": no_table})

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        found = Read([])
        if "input_ids_chosen" in inputs:
            sides = [(inputs[f"input_ids_{name}"], inputs[f"attention_mask_{name}"]) for name in ("chosen", "rejected")]
        else:
            half = len(inputs["input_ids"]) // 2
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            sides = [(ids[:half], mask[:half]), (ids[half:], mask[half:])]
        columns = [_unpadded(ids.tolist(), mask.tolist(), found) for ids, mask in sides]
        margins = inputs["margin"].tolist() if inputs.get("margin") is not None else None
        for number, (chosen, rejected) in enumerate(zip(*columns, strict=True)):
            row: dict[str, tuple[float, ...]] = {"chosen_ids": chosen, "rejected_ids": rejected}
            if margins is not None:
                row["margin"] = (margins[number],)
            found.rows.append(row)
        multiple = arguments.get("pad_to_multiple_of")
        if isinstance(multiple, int):
            found.problems += [
                ("data[width]", f"a multiple of {multiple}", ids.shape[1])
                for ids, _ in sides
                if ids.shape[1] % multiple
            ]
        return found

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat import reference

        undecided = reference.RewardUndecided(**of_installed(self.trainer).undecided)
        return data.expected_rows(model, setting, arguments, seed, part, undecided)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        found = _policy(model, {**setting, "model": "" if setting.get("model") == "name" else setting.get("model")})
        if setting.get("adapter") in ("peft_config", "both"):
            from peft import get_peft_model

            found = get_peft_model(found, _adapter(setting))
            objects.fill_adapter(found)
        # "finds the last token that is not a padding token in each row", says Transformers of such models.
        found.config.pad_token_id = data.padding_of(model, setting)
        return (found.eval(),)

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.RewardSettings:
        from pytest_trlcompat import reference

        return settings_from(reference.RewardSettings, reference.RewardUndecided, arguments, conventions, world_size)

    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        from pytest_trlcompat import reference

        assert isinstance(settings, reference.RewardSettings)
        return reference.reward_objective(settings)


def _policy(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The model as a user passes it: with a number for a sequence, at its last token.

    ``changed``: its weights are others. ``name``: a folder. ``dropout``: attention drops out at random.
    """
    import torch

    found = objects.reward_model(model)
    found.config.pad_token_id = data.tokenizer(model, setting).pad_token_id
    if setting.get("model") == "bfloat16":
        found = found.to(torch.bfloat16)
    elif setting.get("model") == "changed":
        with torch.no_grad():
            for parameter in found.parameters():
                parameter.mul_(1.25)
    elif setting.get("model") == "name":
        return saved(found)
    if setting.get("dropout") == "attention":
        for module in found.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        found.config.attention_dropout = 0.5
    if setting.get("adapter") in ("peft_model", "both"):
        from peft import get_peft_model

        found = get_peft_model(found, _adapter(setting))
        objects.fill_adapter(found)
    return found


def _adapter(setting: Mapping[str, Any]) -> Any:
    """LoRA with the score head: trained with the task's type, or as one of ``modules_to_save``."""
    from peft import LoraConfig

    head = {"task_type": "SEQ_CLS"} if setting.get("task", "SEQ_CLS") else {"modules_to_save": ["score"]}
    dropout = 0.5 if setting.get("dropout") == "adapter" else 0.0
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, **head)


def _unpadded(ids: list[list[int]], masks: list[list[int]], found: Read) -> list[tuple[int, ...]]:
    rows = []
    for row, mask in zip(ids, masks, strict=True):
        kept = [number for number, there in enumerate(mask) if there]
        if kept and kept != list(range(kept[0], kept[-1] + 1)):
            found.problems.append(("data[attention_mask]", "padding on one side", str(mask)))
        rows.append(tuple(row[each] for each in kept))
    return rows


ROOM = RewardRoom()
