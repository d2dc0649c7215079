"""The data of a conformance training of a reward model, as a user gives it, and the rows that it must become.

Runs inside a rank.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from pytest_trlcompat.conformance.sft.data import TEMPLATES

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.supervised.records import Row
    from pytest_trlcompat.reference import RewardUndecided
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["BEGINNING", "KINDS", "ROWS", "dataset", "expected_rows", "kind_of", "padding_of", "tokenizer"]

ROWS: Mapping[str, int] = {"training": 24, "evaluation": 8}
KINDS = (
    *("implicit", "explicit", "conversational", "conversational_explicit", "conversational_kwargs"),
    *("pretokenised", "ended"),
)
"""Pairs with the prompt in both texts, or separate; messages, likewise; messages with a column of arguments for the
chat template; token ids; texts, some with an end of sequence."""
_SWITCH = "{% if w59 is defined and w59 %}{{ 'w59 ' }}{% endif %}"
BEGINNING = "w59"
"""The word that a tokenizer with a beginning of sequence puts in front of every text."""
_WORDS = 40
_PAIRS = (("chosen", "chosen_ids"), ("rejected", "rejected_ids"))


def kind_of(setting: Mapping[str, Any]) -> str:
    """The kind of data; by default texts, or token ids where the release's trainer reads no texts."""
    reads_texts = Version(metadata.version("trl")) >= Version("0.12")
    return str(setting.get("data") or ("implicit" if reads_texts else "pretokenised"))


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class.

    ``same_end``: its padding is its end of sequence. ``no_padding``: it has none. ``right``: it pads on the right.
    ``beginning``: it begins every text with :data:`BEGINNING`, as its chat template does.
    """
    processing_class = copy.deepcopy(model.tokenizer)
    kind = setting.get("tokenizer", "")
    if kind == "same_end":
        processing_class.pad_token = processing_class.eos_token
    elif kind == "no_padding":
        processing_class.pad_token = None
    elif kind == "right":
        processing_class.padding_side = "right"
    elif kind == "beginning":
        from tokenizers import processors

        number = processing_class.convert_tokens_to_ids(BEGINNING)
        processing_class._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGINNING} $A", pair=f"{BEGINNING} $A $B", special_tokens=[(BEGINNING, number)]
        )
        processing_class.bos_token = BEGINNING
        processing_class.chat_template = "{{ bos_token + ' ' }}" + processing_class.chat_template
    if kind_of(setting) == "conversational_kwargs":
        processing_class.chat_template = _SWITCH + processing_class.chat_template
    return processing_class


def padding_of(model: TinyModel, setting: Mapping[str, Any]) -> int:
    """The token that fills batches: "if the processing class has not set a padding token, `processing_class.eos_token`
    will be used as the default"."""
    processing_class = tokenizer(model, setting)
    return int(
        processing_class.eos_token_id if processing_class.pad_token_id is None else processing_class.pad_token_id
    )


def examples(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """Examples as a user has them: of unequal lengths, each with other first two words than all others."""
    dice = random.Random(f"{seed}/{part}")
    kind = kind_of(setting)
    rows: list[dict[str, Any]] = []
    for number in dice.sample(range(_WORDS**2), ROWS[part]):
        prompt = " ".join(f"w{word}" for word in divmod(number, _WORDS))
        answers = [" ".join(f"w{dice.randrange(_WORDS)}" for _ in range(dice.randint(1, 7))) for _ in _PAIRS]
        example: dict[str, Any] = {}
        for (name, _), answer in zip(_PAIRS, answers, strict=True):
            question, answered = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": answer}]
            if kind == "implicit":
                example[name] = f"{prompt} {answer}"
            elif kind == "ended":
                example[name] = f"{prompt} {answer}" + (" <eos>" if dice.random() < 0.5 else "")
            elif kind == "explicit":
                example |= {"prompt": prompt, name: f" {answer}"}
            elif kind in ("conversational", "conversational_kwargs"):
                example[name] = question + answered
            elif kind == "conversational_explicit":
                example |= {"prompt": question, name: answered}
            else:
                example[name] = model.tokenizer(f"{prompt} {answer} <eos>", add_special_tokens=False)["input_ids"]
        if kind == "conversational_kwargs":
            example["chat_template_kwargs"] = {"w59": True}
        if setting.get("margins"):
            example["margin"] = dice.choice([0.25, 1.0, 2.5])
        rows.append(example)
    return rows


def dataset(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
    from datasets import Dataset

    rows = examples(model, setting, seed, part)
    if kind_of(setting) == "pretokenised":
        rows = [_tokenised(row) for row in rows]
    in_memory = Dataset.from_list(rows)
    return in_memory.to_iterable_dataset() if setting.get("stream") and part == "training" else in_memory


def _tokenised(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the names of columns that the release documents."""
    import trl

    documented = str(trl.RewardTrainer.__doc__)
    columns = {name: value for name, value in row.items() if name == "margin"}
    if "`chosen_ids`" in documented:
        return {**columns, **{column: row[name] for name, column in _PAIRS}}
    if "`chosen_input_ids`" in documented:
        return {**columns, **{f"{name}_input_ids": row[name] for name, _ in _PAIRS}}
    for name, _ in _PAIRS:
        columns |= {f"input_ids_{name}": row[name], f"attention_mask_{name}": [1] * len(row[name])}
    return columns


def expected_rows(
    model: TinyModel,
    setting: Mapping[str, Any],
    arguments: Mapping[str, Any],
    seed: int,
    part: str,
    undecided: RewardUndecided,
) -> list[Row]:
    """The rows by documentation: prompt and answer "are concatenated before tokenization", messages are written by the
    chat template, and pairs are left out whose "chosen or rejected sequence exceeds" ``max_length``.

    Documentation leaves ``appended_eos`` and ``too_long`` open.
    """
    processing_class, kind = tokenizer(model, setting), kind_of(setting)
    processing_class.chat_template = TEMPLATES["other"] if setting.get("template") else processing_class.chat_template
    limit = arguments.get("max_length")
    rows: list[Row] = []
    for example in examples(model, setting, seed, part):
        row: dict[str, tuple[float, ...]] = {}
        for name, column in _PAIRS:
            ids = _tokens(example, name, kind, processing_class, setting)
            is_ended = ids[-1] == processing_class.eos_token_id
            if kind in ("implicit", "explicit", "ended") and (
                undecided.appended_eos == "yes" or (undecided.appended_eos == "missing" and not is_ended)
            ):
                ids.append(processing_class.eos_token_id)
            row[column] = tuple(ids)
        if "margin" in example:
            row["margin"] = (example["margin"],)
        longest = max(len(row[column]) for _, column in _PAIRS)
        if undecided.too_long == "kept" or limit is None or longest <= limit:
            rows.append(row)
    return rows


def _tokens(
    example: Mapping[str, Any], name: str, kind: str, processing_class: Any, setting: Mapping[str, Any]
) -> list[int]:
    if kind == "pretokenised":
        return list(example[name])
    if kind.startswith("conversational"):
        messages, chosen = [*example.get("prompt", []), *example[name]], example.get("chat_template_kwargs", {})
        text = processing_class.apply_chat_template(messages, tokenize=False, **chosen)
        return list(
            processing_class(text, add_special_tokens=False)["input_ids"]
        )  # the template has written its beginning
    begun = [processing_class.convert_tokens_to_ids(BEGINNING)] if setting.get("tokenizer") == "beginning" else []
    text = example.get("prompt", "") + example[name]
    return [*begun, *processing_class(text, add_special_tokens=False)["input_ids"]]
