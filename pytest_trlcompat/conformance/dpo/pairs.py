"""Pairs of completions to train on, and the token ids that documentation makes of them.

Runs inside a rank.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import images

if TYPE_CHECKING:
    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["as_dataset", "conversation", "dataset", "limits", "pairs", "parts", "sequences", "tokenizer", "with_images"]

_OTHER = "<unk>"
"""A token that is no word. It begins rejected completions where the prompt is implicit: all words begin with the same
letter, which would otherwise belong to the shared prompt. A tokenizer that adds a beginning of sequence adds it too."""
_ROUNDS = {"turns": 2}
_TOOLS = [{"type": "function", "function": {"name": "w61", "parameters": {"type": "object", "properties": {}}}}]
_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' + eos_token + ' ' }}{% endfor %}"
_TEMPLATES = {
    "bos": "{{ bos_token + ' ' }}" + _TEMPLATE,
    "generation": _TEMPLATE + "{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}",
    "tools": "{% if tools is not none %}{{ 'w60 w60 ' }}{% endif %}" + _TEMPLATE,
    "switch": "{% if w60 is defined and w60 %}{{ 'w60 ' }}{% endif %}" + _TEMPLATE,
    "behind_end": _TEMPLATE.replace("eos_token + ' '", "eos_token + ' w58 '"),
    "thought": _TEMPLATE + f"{{% if add_generation_prompt %}}{{{{ 'w59 {_OTHER} ' }}}}{{% endif %}}",
}
"""Chat templates. ``bos`` writes a beginning of sequence; ``generation`` a token that asks for an answer, also in front
of each answer; ``tools``, like Llama's, instructions where it gets a list of tools, even an empty one; ``switch`` a
token that one of its arguments asks for; ``behind_end`` a word after each end, as ChatML writes a new line;
``thought``, like DeepSeek-R1's, two tokens that ask for an answer, of which only the first stands in front of one."""
_OF_TEMPLATE: Mapping[str, Mapping[str, Any]] = {
    "tools": {"tools": _TOOLS},
    "template_kwargs": {"chat_template_kwargs": {"w60": True}},
}
"""Columns whose values are passed to the chat template, by the kind of data that has them."""
CONVERSATIONAL = ("conversational", "conversational_implicit", "turns", "thought", *_OF_TEMPLATE)


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class.

    ``no_padding``: it has no pad token; ``eos_padding``: its pad token is the end of sequence; ``bos``: it adds a token
    in front of each text; ``other_zero``: its pad token is not the one whose id is 0.
    """
    from tokenizers.processors import TemplateProcessing

    if setting.get("images"):
        model = images.vision_model(model)
    processing_class = copy.deepcopy(model.tokenizer)
    kind = setting.get("tokenizer")
    if kind == "no_padding":
        processing_class.pad_token = None
    elif kind == "eos_padding":
        processing_class.pad_token = processing_class.eos_token
    elif kind == "other_zero":
        processing_class.pad_token = _OTHER
    elif kind == "bos":
        processing_class.bos_token = _OTHER
        added = [(_OTHER, processing_class.convert_tokens_to_ids(_OTHER))]
        processing_class.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{_OTHER} $A", special_tokens=added
        )
    implied = {"tools": "tools", "template_kwargs": "switch"}
    template = setting.get("template") or implied.get(str(setting.get("data")), "")
    if template:
        processing_class.chat_template = _TEMPLATES[template]
        if template in ("generation", "thought"):  # the same token in front of an answer
            answer = "{% if message['role'] == 'assistant' %}{{ 'w59 ' }}{% endif %}"
            processing_class.chat_template = processing_class.chat_template.replace(
                "{% for message in messages %}", "{% for message in messages %}" + answer
            )
    if not setting.get("images"):
        return processing_class
    if template:
        processing_class.chat_template = processing_class.chat_template.replace("message['content']", images.CONTENT)
    return images.processor(model, setting, processing_class)


def pairs(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """The rows as a user has them, of unequal lengths."""
    counts = {"training": "pairs", "evaluation": "pairs_of_evaluation"}
    defaults = {"training": 16, "evaluation": 8}
    chosen = random.Random(f"{seed} {part}")
    rows = []
    for _ in range(int(setting.get(counts[part], defaults[part]))):

        def text(least: int, most: int) -> str:
            # The last eight words are left to chat templates.
            return " ".join(f"w{chosen.randrange(model.words - 8)}" for _ in range(chosen.randint(least, most)))

        rows.append(_row(setting, text))
    return rows


def _row(setting: Mapping[str, Any], text: Any) -> dict[str, Any]:
    kind = setting.get("data", "plain")
    prompt, better, worse = text(3, 6), text(2, 5), text(2, 5)
    if kind == "thought":
        better = f"{_OTHER} {better}"
    if kind in CONVERSATIONAL or setting.get("images"):
        messages = [{"role": "user", "content": prompt}]
        for _ in range(_ROUNDS.get(kind, 1) - 1):
            messages += [{"role": "assistant", "content": text(2, 3)}, {"role": "user", "content": text(2, 3)}]
        answers = [[{"role": "assistant", "content": answer}] for answer in (better, worse)]
        if kind == "conversational_implicit":
            return {"chosen": messages + answers[0], "rejected": messages + answers[1]}
        row: dict[str, Any] = {"prompt": messages, "chosen": answers[0], "rejected": answers[1]}
        if setting.get("images") == "placeholders":
            return {name: images.structured(messages) for name, messages in row.items()}
        return {**row, **_OF_TEMPLATE.get(kind, {})}
    if kind == "implicit":
        return {"chosen": f"{prompt} {better}", "rejected": f"{prompt} {_OTHER} {worse}"}
    if kind == "ended":
        better, worse = f"{better} <eos>", f"{worse} <eos>"
    elif kind == "zero":
        better, worse = f"<pad> {better} <pad>", f"{worse} <pad>"
    elif kind == "empty":
        worse = ""
    return {"prompt": prompt, "chosen": f" {better}", "rejected": f" {worse}" if worse else ""}


def dataset(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
    """The rows as a dataset."""
    rows = as_dataset(pairs(model, setting, seed, part), setting)
    return images.added(rows, setting, seed, part) if setting.get("images") else rows


def limits(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a config's arguments that say what of a pair is cut, as far as the release has them."""
    names = ("max_length", "truncation_mode", "max_prompt_length", "max_completion_length")
    return {name: arguments[name] for name in names if name in arguments}


def with_images(
    model: TinyModel, setting: Mapping[str, Any], seed: int, part: str, limits: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows that pairs with images in their prompts must become, as the processor makes them.

    Args:
        limits: of :func:`~pytest_trlcompat.reference.preference_row`.
    """
    from pytest_trlcompat import reference

    processing_class, rows = tokenizer(model, setting), []
    for number, row in enumerate(pairs(model, setting, seed, part)):
        pictures = images.images_of(setting, seed, part, number)
        prompt_ids, inputs = images.processed(processing_class, row["prompt"], pictures, add_generation_prompt=True)
        wholes = [
            images.processed(processing_class, [*row["prompt"], *row[name]], pictures)[0]
            for name in ("chosen", "rejected")
        ]
        expected: dict[str, Any] = reference.preference_row(*_apart(prompt_ids, wholes), **limits)
        digests = images.digests(inputs)
        rows.append({**expected, "chosen_images": digests, "rejected_images": digests} if digests else expected)
    return rows


def as_dataset(rows: list[dict[str, Any]], setting: Mapping[str, Any]) -> Any:
    """A dataset in memory, ``iterable``, or ``stored`` in a folder and loaded from there."""
    from datasets import Dataset, load_from_disk

    in_memory: Any = Dataset.from_list(rows)
    if setting.get("data") == "stored":
        return load_from_disk(_stored(in_memory))
    return in_memory.to_iterable_dataset() if setting.get("data") == "iterable" else in_memory


def _stored(rows: Any) -> str:
    """Save rows into one folder for all ranks, as a user would have done before, and return it."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state, folder = PartialState(), [tempfile.mkdtemp(prefix="trlcompat-")]
    broadcast_object_list(folder)
    if state.is_main_process:
        rows.save_to_disk(folder[0])
    state.wait_for_everyone()
    return folder[0]


def parts(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The prompt of a pair, explicit or the shared beginning, and the completions, the chosen one first."""
    from pytest_trlcompat import reference

    if "prompt" in row:
        return row["prompt"], row["chosen"], row["rejected"]
    split: Any = reference.common_prompt if isinstance(row["chosen"], str) else reference.shared_messages
    prompt_and_completions: tuple[Any, Any, Any] = split(row["chosen"], row["rejected"])
    return prompt_and_completions


def sequences(
    processing_class: Any, row: Mapping[str, Any], undecided: reference.PreferenceUndecided
) -> tuple[list[int], ...]:
    """Token ids of prompt, chosen and rejected completion.

    A text has the special tokens that its tokenizer adds, and ends with an end of sequence; a conversation has those of
    the chat template alone.

    Args:
        processing_class: of :func:`tokenizer`.
        row: of :func:`pairs`.
        undecided: ``text_end`` and ``text_start`` are used.
    """
    prompt, *completions = parts(row)
    if isinstance(prompt, str):
        prompt_ids = processing_class(prompt, add_special_tokens=undecided.text_start)["input_ids"]
        answers = [processing_class(completion, add_special_tokens=False)["input_ids"] for completion in completions]
        end = [processing_class.eos_token_id]
        always = undecided.text_end == "always"
        return prompt_ids, *([*answer, *end] if always or answer[-1:] != end else answer for answer in answers)
    return conversation(processing_class, prompt, completions, row)


def conversation(
    processing_class: Any, prompt: Any, completions: Sequence[Any], row: Mapping[str, Any]
) -> tuple[list[int], ...]:
    """Token ids of a prompt and of each of its completions, all of them messages, as the chat template makes them.

    The template writes each whole conversation; the prompt is what all of them begin with. A template may ask for an
    answer with tokens that it writes in front of no answer, or of some.

    Args:
        row: its other columns may be arguments of the template.
    """
    template_arguments = {"tools": row["tools"]} if row.get("tools") else {}
    template_arguments |= row.get("chat_template_kwargs") or {}

    def rendered(messages: Sequence[Any], **how: Any) -> list[int]:
        text = processing_class.apply_chat_template(messages, tokenize=False, **how, **template_arguments)
        ids: list[int] = processing_class(text, add_special_tokens=False)["input_ids"]
        return ids

    prompt_ids = rendered(prompt, add_generation_prompt=True)
    return _apart(prompt_ids, [rendered([*prompt, *completion]) for completion in completions])


def _apart(prompt_ids: Sequence[int], wholes: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
    """The tokens with which all begin, and the rest of each whole."""
    shared = itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(prompt_ids, *wholes, strict=False))
    prompt = [tokens[0] for tokens in shared]
    return prompt, *(list(whole[len(prompt) :]) for whole in wholes)
