"""How reward models are trained and read for conformance, see
:class:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks`.

Runs inside a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.architectures import saved
from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.conventions import Conventions, of_installed
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.reward import data
from pytest_trlcompat.conformance.sft import data as sft_data
from pytest_trlcompat.conformance.supervised import evaluating
from pytest_trlcompat.conformance.supervised.evaluating import EVALUATION, GIVEN, built, evaluation_argument
from pytest_trlcompat.conformance.supervised.hooks import AXES, SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from
from pytest_trlcompat.conformance.training import own_fields

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "RewardAdapter"]


class RewardAdapter(SupervisedHooks):
    """``RewardTrainer``.

    Its axis ``template``: ``chat_template_path`` names the folder of a model whose tokenizer has another chat template.
    """

    trainer = "reward"
    names = ("RewardTrainer", "RewardConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": data.KINDS,
        "margins": (False, True),
        "tokenizer": ("", "same_end", "no_padding", "right", "beginning"),
        "task": ("SEQ_CLS", ""),
        "dropout": ("", "attention", "adapter"),
        "stream": (False, True),
        "evaluation": EVALUATION,
        "given": GIVEN,
        "template": ("", "tokenizer"),
        "model": (*AXES["model"], "language_model", "two_outputs"),
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        **{("data", kind): "trl>=0.12" for kind in ("implicit", "conversational", "ended")},
        **{("data", kind): "trl>=0.24" for kind in ("explicit", "conversational_explicit")},
        ("dropout", "attention"): "trl>=0.14",
        ("dropout", "adapter"): "trl>=0.14",
        ("model", "name"): "trl>=0.24",
        ("model", "language_model"): "trl>=0.24",
        ("data", "conversational_kwargs"): "trl>=0.24",
        ("max_length", "None"): "trl>=0.12",
        ("tokenizer", "no_padding"): "trl>=0.24",
        ("stream", True): "trl>=0.24",
        ("evaluation", "streamed"): "trl>=0.24",
        ("model", "two_outputs"): "trl>=0.12",
        ("template", "tokenizer"): "trl>=0.24",
    }
    base: ClassVar[Mapping[str, Any]] = {"max_length": 64}

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """Until 0.23 the columns of pairs are no inputs of the model, and would be removed as unused."""
        if Version(metadata.version("trl")) < Version("0.24"):
            setting = {"remove_unused_columns": False, **setting}
        with own_fields(trl.RewardConfig):
            return super().config(trl, setting)

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        import torch

        if setting.get("template"):
            config.chat_template_path = sft_data.template_path(model, setting)
        extra: dict[str, Any] = {self.words_argument(trainer_class): data.tokenizer(model, setting)}
        if setting.get("adapter") in ("peft_config", "both"):
            extra["peft_config"] = _adapter(setting)
        extra |= evaluation_argument(setting, lambda: data.dataset(model, setting, seed, "evaluation"))

        def from_state(state: int) -> Any:
            torch.manual_seed(state)
            arguments: dict[str, Any] = {
                "model": _policy(model, setting),
                "args": config,
                "train_dataset": data.dataset(model, setting, seed, "training"),
                **extra,
            }
            trainer = built(trainer_class, arguments, setting)
            if setting.get("model") == "language_model":
                _known_head(trainer, model)
            return trainer

        # Another trainer first, from another state of the generator: with one seed both get the same new head.
        if setting.get("model") == "language_model":
            from_state(1)
        trainer = from_state(2)
        if "peft_config" in extra and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def evaluate(self, trainer: Any, model: TinyModel, setting: Mapping[str, Any], seed: int) -> None:
        trainer.shows_samples = data.kind_of(setting) == "pretokenised"
        evaluating.evaluate(trainer, setting, lambda: data.dataset(model, setting, seed, "evaluation"))

    def watched(self, trainer_class: type, recording: Recording) -> type:
        """A subclass that records the heads that a language model gets whenever a trainer is built, and leaves out the
        table of samples.

        Releases until 0.23 compute and print the table before each evaluation. It stays where the trainer has no
        evaluation set to take samples from, and ``evaluate()`` gets data that needs no preparation.
        """
        heads = {"heads": recording.extras.setdefault("heads", [])}
        if not hasattr(trainer_class, "visualize_samples"):
            return type(trainer_class.__name__, (trainer_class,), heads)

        show: Any = trainer_class.visualize_samples

        def no_table(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.eval_dataset is None and getattr(self, "shows_samples", False):
                show(self, *args, **kwargs)

        return type(trainer_class.__name__, (trainer_class,), {"visualize_samples": no_table, **heads})

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """The new head of a language model must have one output, and the same weights with the same seed."""
        heads = recordings[0].extras.get("heads", [])
        if heads and len(heads[0]) != 1:
            yield Difference("head[outputs]", "built", [1], [len(heads[0])], math.inf, 0.0)
        if heads and not heads[0].equal(heads[1]):
            largest = float((heads[0] - heads[1]).abs().max())
            yield Difference("head[seed]", "built again", [0.0], [largest], largest, 0.0)

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        read = Read([])
        if "input_ids_chosen" in inputs:
            sides = [(inputs[f"input_ids_{name}"], inputs[f"attention_mask_{name}"]) for name in ("chosen", "rejected")]
        else:
            half = len(inputs["input_ids"]) // 2
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            sides = [(ids[:half], mask[:half]), (ids[half:], mask[half:])]
        columns = [_unpadded(ids.tolist(), mask.tolist(), read) for ids, mask in sides]
        margins = inputs["margin"].tolist() if inputs.get("margin") is not None else None
        for number, (chosen, rejected) in enumerate(zip(*columns, strict=True)):
            row: dict[str, tuple[float, ...]] = {"chosen_ids": chosen, "rejected_ids": rejected}
            if margins is not None:
                row["margin"] = (margins[number],)
            read.rows.append(row)
        multiple = arguments.get("pad_to_multiple_of")
        if isinstance(multiple, int):
            read.problems += [
                ("data[width]", f"a multiple of {multiple}", ids.shape[1])
                for ids, _ in sides
                if ids.shape[1] % multiple
            ]
        return read

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat import reference

        undecided = reference.RewardUndecided(**of_installed(self.trainer).undecided)
        return data.expected_rows(model, setting, arguments, seed, part, undecided)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        built_of = "" if setting.get("model") in ("name", "language_model") else setting.get("model")
        reward_model = _policy(model, {**setting, "model": built_of})
        if setting.get("adapter") in ("peft_config", "both"):
            from peft import get_peft_model

            reward_model = get_peft_model(reward_model, _adapter(setting))
            objects.fill_adapter(reward_model)
        # "finds the last token that is not a padding token in each row", says Transformers of such models.
        reward_model.config.pad_token_id = data.padding_of(model, setting)
        return (reward_model.eval(),)

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
    """The model as a user passes it: with one output for a sequence, at its last token.

    ``changed``: it has other weights than its folder. ``name``: a folder. ``language_model``: the folder of a model
    without such a head. ``two_outputs``: it has two outputs. ``dropout``: its attention has dropout.
    """
    import torch

    reward_model = objects.reward_model(model)
    reward_model.config.pad_token_id = data.tokenizer(model, setting).pad_token_id
    if setting.get("model") == "bfloat16":
        reward_model = reward_model.to(torch.bfloat16)
    elif setting.get("model") == "changed":
        with torch.no_grad():
            for parameter in reward_model.parameters():
                parameter.mul_(1.25)
    elif setting.get("model") == "two_outputs":
        reward_model.score = torch.nn.Linear(reward_model.score.in_features, 2, bias=False)
        reward_model.config.num_labels = reward_model.num_labels = 2
    elif setting.get("model") == "language_model":
        return str(model.path)
    elif setting.get("model") == "name":
        return saved(reward_model)
    if setting.get("dropout") == "attention":
        for module in reward_model.modules():
            # Modules have read the config when they were built.
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        reward_model.config.attention_dropout = 0.5
    if setting.get("adapter") in ("peft_model", "both"):
        from peft import get_peft_model

        reward_model = get_peft_model(reward_model, _adapter(setting))
        objects.fill_adapter(reward_model)
    return reward_model


def _known_head(trainer: Any, model: TinyModel) -> None:
    """Replace a head of random numbers by that of :func:`objects.reward_model`, and record the replaced one."""
    import torch

    head = trainer.model.score
    heads = type(trainer).heads
    heads.append(head.weight.detach().float().cpu().clone())
    with torch.no_grad():
        head.weight = torch.nn.Parameter(objects.reward_model(model).score.weight.to(head.weight.dtype))


def _adapter(setting: Mapping[str, Any]) -> Any:
    """LoRA with a trained score head: by the task's type, or as one of ``modules_to_save``."""
    from peft import LoraConfig

    head = {"task_type": "SEQ_CLS"} if setting.get("task", "SEQ_CLS") else {"modules_to_save": ["score"]}
    dropout = 0.5 if setting.get("dropout") == "adapter" else 0.0
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, **head)


def _unpadded(ids: list[list[int]], masks: list[list[int]], read: Read) -> list[tuple[int, ...]]:
    rows = []
    for row, mask in zip(ids, masks, strict=True):
        places = [number for number, there in enumerate(mask) if there]
        if places and places != list(range(places[0], places[-1] + 1)):
            read.problems.append(("data[attention_mask]", "padding on one side", str(mask)))
        rows.append(tuple(row[place] for place in places))
    return rows


ADAPTER = RewardAdapter()
