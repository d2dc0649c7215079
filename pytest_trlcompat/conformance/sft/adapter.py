"""How SFT is trained and read for conformance.

Runs inside a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance import images
from pytest_trlcompat.conformance.architectures import ARCHITECTURES, saved
from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.sft import data
from pytest_trlcompat.conformance.supervised import evaluating
from pytest_trlcompat.conformance.supervised.hooks import AXES, BASE, SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.supervised.settings import settings_from
from pytest_trlcompat.tiny import PAD_TOKEN_ID
from pytest_trlcompat.training.aliases import renamed

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "SFTAdapter"]

_IGNORED = -100
_VIRTUAL = ("prompt_tuning", "prefix_tuning")
"""Adapters that put trained numbers in front of a row: embeddings, or keys and values of each layer."""
_ROUNDED = 1e-6
_PLAIN_NAMES = ("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size")


class SFTAdapter(SupervisedHooks):
    """``SFTTrainer``.

    Its axes: ``template``: what ``chat_template_path`` names; ``transform``: the dataset has one;
    ``arguments="plain"``: ``TrainingArguments`` in place of its config; ``model="bfloat16_name"``: the folder of a
    model in bfloat16; ``loss_function``: a ``compute_loss_func`` with the trainer's own loss; ``metrics``: a
    ``compute_metrics``.
    """

    trainer = "sft"
    names = ("SFTTrainer", "SFTConfig")
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "data": (
            *("text", "other_field", "ended", "messages", "turns", "system", "prompt_completion"),
            *("prompt_completion_messages", "prompt_turns_completion", "conversations", "long_prompts", "questions"),
            *("input_ids", "input_ids_messages", "labels", "tools", "calls"),
            *("reasoned", "asked_again"),
        ),
        "tokenizer": (
            *("", "same_end", "no_padding", "beginning", "left", "generation", "behind_end", "no_template"),
            *data.FAMILIES,
        ),
        "template": ("", "tokenizer", "file"),
        "stream": (False, True),
        "transform": (False, True),
        "model": (*AXES["model"], "bfloat16_name", *images.MODELS, *ARCHITECTURES),
        "images": images.AXIS,
        "adapter": (*AXES["adapter"], *_VIRTUAL),
        "arguments": ("", "plain"),
        "given": evaluating.GIVEN,
        "loss_function": ("", "own"),
        "metrics": ("", "own"),
    }
    since: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("data", "conversations"): "trl>=0.15",
        **{("images", kind): "trl>=0.22" for kind in images.AXIS if kind},
        **{("data", kind): "trl>=0.15" for kind in ("prompt_completion_messages", "prompt_turns_completion")},
        ("tokenizer", "no_padding"): "trl>=0.16",
        # From these releases on TRL replaces their templates for training.
        ("tokenizer", "qwen3"): "trl>=1.1",
        ("tokenizer", "glm4moe"): "trl>=1.3",
        ("data", "labels"): "trl>=0.16",
        **{("data", kind): "trl>=0.19" for kind in ("tools", "calls")},
        ("data", "input_ids_messages"): "trl>=0.15.2",
        **{("template", kind): "trl>=0.19" for kind in ("tokenizer", "file")},
        ("loss_function", "own"): "trl>=0.15",
        ("given", "twice"): "trl>=0.15",
        # Before, these average over tokens by themselves, without the first one, which documentation leaves open.
        **{("model", name): "transformers>=4.48" for name in ("gpt2", "granite")},
        # Before, only flash attention separates rows that are not padded, and a CPU does not have it.
        ("padding_free", True): "trl>=0.24",
        ("packing_strategy", "bfd"): "trl>=0.24",
        ("packing_strategy", "bfd_split"): "trl>=0.24",
    }
    choices = ("loss_type", "packing_strategy", "truncation_mode")

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """Before 0.12 the column of texts has no default, and data of other formats must not name one."""
        is_text = setting.get("data", "text") in ("text", "ended")
        config = super().config(trl, {**({"dataset_text_field": "text"} if is_text else {}), **setting})
        if setting.get("arguments") != "plain":
            return config
        from transformers import TrainingArguments

        return TrainingArguments(**{name: getattr(config, name) for name in (*_PLAIN_NAMES, *BASE)})

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        adapter = _adapter(setting)
        processing_class = data.tokenizer(model, setting)
        if setting.get("template"):
            config.chat_template_path = data.template_path(model, setting)
        extra: dict[str, Any] = renamed(trainer_class, {"processing_class": processing_class})
        if adapter is not None:
            extra["peft_config"] = adapter
        if setting.get("evaluation") not in (None, "", "given"):
            extra["eval_dataset"] = data.dataset(model, setting, seed, "evaluation")
        if setting.get("data") == "questions":
            extra["formatting_func"] = data.formatted
        if setting.get("loss_function"):
            extra["compute_loss_func"] = _own_loss
        if setting.get("metrics"):
            extra["compute_metrics"] = _own_metrics
        arguments: dict[str, Any] = {
            "model": _policy(model, setting),
            "args": config,
            "train_dataset": data.dataset(model, setting, seed, "training"),
            **extra,
        }
        trainer = evaluating.built(trainer_class, arguments, setting)
        if adapter is not None and fill:
            _fill(trainer.model)
        return trainer

    def evaluate(self, trainer: Any, model: TinyModel, setting: Mapping[str, Any], seed: int) -> None:
        evaluating.evaluate(trainer, setting, lambda: data.dataset(model, setting, seed, "evaluation"))

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        ids, labels = inputs["input_ids"].tolist(), inputs["labels"].tolist()
        mask = inputs.get("attention_mask")
        masks = mask.tolist() if mask is not None and mask.dim() == 2 else [[1] * len(row) for row in ids]
        positions = inputs["position_ids"].tolist() if inputs.get("position_ids") is not None else [None] * len(ids)
        read = Read([])
        own_inputs = images.of_rows(inputs, ids)
        for row, label, real, places, pictures in zip(ids, labels, masks, positions, own_inputs, strict=True):
            if any(token_label != _IGNORED for token_label, there in zip(label, real, strict=True) if not there):
                read.problems.append(("data[labels of padding]", _IGNORED, str(label)))
            filled = [number for number, there in enumerate(real) if there]
            if filled and filled != list(range(filled[0], filled[-1] + 1)):
                read.problems.append(("data[attention_mask]", "padding on one side", str(real)))
            if places is not None and mask is None:
                filled = filled[: _length_without_padding(row, label)]
            row_labels = [label[place] for place in filled]
            pieces = list(
                _pieces(
                    [row[place] for place in filled],
                    row_labels,
                    None if places is None else [places[place] for place in filled],
                )
            )
            if pictures:
                pieces = [{**pieces[0], "inputs": images.typed(pictures, pieces[0]["input_ids"])}]
            read.rows += pieces
            if any(piece["labels"][0] != _IGNORED for piece in pieces[1:]):
                read.problems.append(
                    ("data[labels]", "none for the first token of a row behind another", str(row_labels))
                )
        read.problems += images.problems(inputs)
        multiple = arguments.get("pad_to_multiple_of")
        if multiple and len(ids[0]) % int(multiple):
            read.problems.append(("data[width]", f"a multiple of {multiple}", len(ids[0])))
        return read

    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        from pytest_trlcompat.conformance.conventions import of_installed
        from pytest_trlcompat.reference import SFTUndecided

        undecided = SFTUndecided(**of_installed(self.trainer).undecided)
        return data.expected_rows(model, setting, arguments, seed, part, undecided)

    def compared(self, row: Row) -> Row:
        """The row with the first label ignored, since nothing predicts the first token."""
        columns = {"input_ids": row["input_ids"], "labels": (_IGNORED, *row["labels"][1:])}
        return {**columns, "images": images.digests(row["inputs"])} if "inputs" in row else columns

    def expected_size(self, rows: list[Row], arguments: Mapping[str, Any], part: str) -> int:
        return data.expected_size(rows, arguments, part)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        if setting.get("adapter") in _VIRTUAL:
            from peft import get_peft_model

            policy = get_peft_model(objects.policy(model, {**setting, "adapter": ""}, whole=True), _adapter(setting))
            _fill(policy)
            return (policy.eval(),)
        if setting.get("model") == "bfloat16_name":
            return (_half(model, in_float32=_is_read_in_float32()),)
        return (objects.untrained(model, setting)[0],)

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """What differs in the result of ``compute_metrics``, of an evaluation before the training."""
        if not setting.get("metrics"):
            return
        rows = self.expected_rows(model, setting, recordings[0].arguments, seed, "evaluation")
        expected_share = _found_words(models[0], rows)
        recorded_share = recordings[0].returned[0].get("eval_found_words")
        if recorded_share is None or abs(recorded_share - expected_share) > _ROUNDED:
            yield Difference(
                "evaluate()[eval_found_words]", "evaluation 0", [expected_share], [recorded_share], math.inf, _ROUNDED
            )

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
            argument = arguments.get("router_aux_loss_coef")
            experts = int(config.num_experts_per_tok)
            if argument is not None or config.output_router_logits:
                coefficient = float(config.router_aux_loss_coef if argument is None else argument)
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


def _policy(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The model as a user passes it."""
    if setting.get("model") == "bfloat16_name":
        return saved(_half(model))
    return objects.policy(model, setting)


def _half(model: TinyModel, in_float32: bool = False) -> Any:
    """The model with weights rounded to bfloat16, stored in bfloat16 or in float32."""
    import torch

    language_model = model.new_model()
    with torch.no_grad():
        # Not buffers: positions are computed from them.
        for parameter in language_model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return (language_model if in_float32 else language_model.to(torch.bfloat16)).eval()


def _is_read_in_float32() -> bool:
    """Whether a model that is given by its name is documented to be loaded in float32.

    TRL from 0.27 on documents that; before, Transformers decides, which from 5.0 on takes the type of its weights.
    """
    trl, transformers = (Version(metadata.version(name)) for name in ("trl", "transformers"))
    return trl >= Version("0.27.0.dev0") or transformers < Version("5.0.0.dev0")


def _adapter(setting: Mapping[str, Any]) -> Any:
    """What is passed as ``peft_config``, or ``None``."""
    name = setting.get("adapter")
    if name not in _VIRTUAL:
        return objects.adapter_config(setting)
    from peft import PrefixTuningConfig, PromptTuningConfig

    kind = PromptTuningConfig if name == "prompt_tuning" else PrefixTuningConfig
    return kind(task_type="CAUSAL_LM", num_virtual_tokens=3)


def _fill(model: Any) -> None:
    """Fill an adapter with numbers, see :func:`~pytest_trlcompat.conformance.grpo.objects.fill_adapter`; numbers of
    virtual tokens depend on the size of the parameter alone."""
    import torch

    objects.fill_adapter(model)
    for name, parameter in model.named_parameters():
        if "prompt_encoder" in name:
            generator = torch.Generator().manual_seed(parameter.numel())
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss as a user writes it: the mean over the labelled tokens of a whole step."""
    import torch

    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=_IGNORED, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != _IGNORED).sum())


def _own_metrics(prediction: Any) -> dict[str, float]:
    """The share of labelled tokens that the model finds likeliest."""
    likeliest, targets = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"found_words": float((likeliest == targets)[targets != _IGNORED].mean())}


def _found_words(model: Any, rows: Sequence[Row]) -> float:
    """The same share, computed from rows one by one."""
    import torch

    correct = total = 0
    for row in rows:
        with torch.no_grad():
            likeliest = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].argmax(-1)
        counted = [
            (word, label) for word, label in zip(likeliest.tolist(), row["labels"][1:], strict=True) if label >= 0
        ]
        correct += sum(word == label for word, label in counted)
        total += len(counted)
    return correct / total


def _length_without_padding(ids: Sequence[int], labels: Sequence[int]) -> int:
    """The length of rows that are joined without an attention mask, without the padding at their end."""
    length = len(ids)
    while length and ids[length - 1] == PAD_TOKEN_ID and labels[length - 1] == _IGNORED:
        length -= 1
    return length


def _pieces(ids: list[int], labels: list[int], positions: list[int] | None) -> Iterator[Row]:
    """The rows that are joined in one; each begins where positions begin again at 0."""
    starts = [0] if positions is None else [number for number, position in enumerate(positions) if position == 0] or [0]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield {"input_ids": tuple(ids[start:end]), "labels": tuple(labels[start:end])}


ADAPTER = SFTAdapter()
