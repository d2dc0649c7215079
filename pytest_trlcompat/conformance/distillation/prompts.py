"""Prompts to distil on, the fixed completions of the student, and the rows that they must become.

A completion follows from its prompt alone, so that each row is known in advance, whenever and on whichever rank it is
sampled. Runs inside a rank.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.grpo.sampling import COMPLETION_LENGTH, Data

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["KINDS", "TOKENIZERS", "PromptData", "dataset", "expected_rows", "of_setting", "tokenizer"]

KINDS = ("plain", "conversational", "assistant_last", "iterable", "none")
TOKENIZERS = (
    *("", "other_end", "no_padding", "eos_padding", "right_padding", "bos", "tools_template", "thinking_template"),
)
"""``bos``: it adds a token in front of each text; ``thinking_template``: its chat template has a token that asks for an
answer, and its own variable."""
_ROWS = {"training": ("prompts", 32), "evaluation": ("prompts_of_evaluation", 8)}
_MEMBERS = 4
_THINKING = "{% if add_generation_prompt %}{{ 'w59 ' }}{% if thinking %}{{ 'w58 w58 ' }}{% endif %}{% endif %}"


class PromptData(Data):
    """Completions that depend on the prompt alone. About a quarter are only an end of sequence, a quarter have none."""

    def completion(self, prompt: Sequence[int], member: int, call: int) -> list[int]:
        return super().completion(prompt, random.Random(f"{self.seed}/{tuple(prompt)}").randrange(_MEMBERS), 0)


def of_setting(model: TinyModel, setting: Mapping[str, Any], seed: int, length: int) -> PromptData:
    """
    Args:
        length: ``max_completion_length``.
    """
    asked = {**setting, "tokenizer": "tools_template"} if setting.get("tokenizer") == "thinking_template" else setting
    return PromptData(**vars(objects.data_of(model, asked, seed, min(length, COMPLETION_LENGTH))))


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class, by the axis ``tokenizer``."""
    from tokenizers.processors import TemplateProcessing

    processing_class, kind = objects.tokenizer(model, setting), setting.get("tokenizer")
    if kind == "eos_padding":
        processing_class.pad_token = processing_class.eos_token
    elif kind == "right_padding":
        processing_class.padding_side = "right"
    elif kind == "bos":
        added = [("<unk>", processing_class.convert_tokens_to_ids("<unk>"))]
        processing_class.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=added)
    elif kind == "thinking_template":
        processing_class.chat_template = copy.copy(processing_class.chat_template) + _THINKING
    return processing_class


def dataset(data: Data, setting: Mapping[str, Any], part: str) -> Any:
    """The prompts as a user has them, with a column that nobody asks for; ``None`` where there is no dataset."""
    kind = setting.get("data")
    if kind == "none" and part == "training":
        return None
    rows: Any = data.dataset(_count(setting, part), part)
    return rows.to_iterable_dataset() if kind == "iterable" else rows


def expected_rows(
    model: TinyModel, setting: Mapping[str, Any], data: Data, part: str
) -> list[dict[str, tuple[float, ...]]]:
    """Each prompt with its completion, for :class:`pytest_trlcompat.reference.DistillationObjective`.

    A text has the special tokens that its tokenizer adds; a conversation those of the chat template alone, and one that
    ends with an assistant's message is continued.
    """
    processing_class, rows = tokenizer(model, setting), []
    how = {"continue_final_message": True} if data.assistant_last else {"add_generation_prompt": True}
    for prompt in data.prompts(_count(setting, part), part):
        if data.conversational:
            written = processing_class.apply_chat_template(
                prompt, tokenize=False, **how, **(setting.get("chat_template_kwargs") or {})
            )
            prompt_ids = processing_class(written, add_special_tokens=False)["input_ids"]
        else:
            prompt_ids = processing_class(prompt)["input_ids"]
        answer = data.completion(prompt_ids, 0, 0)
        ids, mask = [*prompt_ids, *answer], [0] * len(prompt_ids) + [1] * len(answer)
        rows.append({"ids": tuple(map(float, ids)), "mask": tuple(map(float, mask))})
    return rows


def _count(setting: Mapping[str, Any], part: str) -> int:
    name, default = _ROWS[part]
    return int(setting.get(name, default))
