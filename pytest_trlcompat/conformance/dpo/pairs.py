"""Pairs of completions to train on, and the token ids that they must become, by documentation alone.

Runs inside a rank; imports the stack only inside functions.
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

__all__ = ["as_dataset", "conversation", "dataset", "pairs", "parts", "sequences", "tokenizer", "with_images"]

_OTHER = "<unk>"
"""A token that no word is: it begins rejected completions where the prompt is implicit, since all words begin with the
same letter, which would be the prompt's; and a tokenizer that adds a beginning of sequence adds it."""
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
"""With a beginning of sequence of its own; with a token that asks for an answer, which stands before each answer; and,
as Llama's, with instructions where it is given a list of tools, an empty one too; with a token that an argument of
the template's asks for; as ChatML's, with a word, there a new line, behind each end; and, as DeepSeek-R1's, with two
tokens that ask for an answer, only the first of which stands before an answer that is there."""
_OF_TEMPLATE: Mapping[str, Mapping[str, Any]] = {
    "tools": {"tools": _TOOLS},
    "template_kwargs": {"chat_template_kwargs": {"w60": True}},
}
"""Columns whose values the chat template is given, by the kind of data that has them."""
CONVERSATIONAL = ("conversational", "conversational_implicit", "turns", "thought", *_OF_TEMPLATE)


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class.

    ``no_padding``: without a pad token; ``eos_padding``: it is the end of sequence; ``bos``: it adds a token before
    each text; ``other_zero``: the pad token is not the one whose id is 0.
    """
    from tokenizers.processors import TemplateProcessing

    if setting.get("images"):
        model = images.vision_model(model)
    found = copy.deepcopy(model.tokenizer)
    wanted = setting.get("tokenizer")
    if wanted == "no_padding":
        found.pad_token = None
    elif wanted == "eos_padding":
        found.pad_token = found.eos_token
    elif wanted == "other_zero":
        found.pad_token = _OTHER
    elif wanted == "bos":
        found.bos_token = _OTHER
        added = [(_OTHER, found.convert_tokens_to_ids(_OTHER))]
        found.backend_tokenizer.post_processor = TemplateProcessing(single=f"{_OTHER} $A", special_tokens=added)
    implied = {"tools": "tools", "template_kwargs": "switch"}
    template = setting.get("template") or implied.get(str(setting.get("data")), "")
    if template:
        found.chat_template = _TEMPLATES[template]
        if template in ("generation", "thought"):  # an answer that is there has the same token before it
            answer = "{% if message['role'] == 'assistant' %}{{ 'w59 ' }}{% endif %}"
            found.chat_template = found.chat_template.replace(
                "{% for message in messages %}", "{% for message in messages %}" + answer
            )
    if not setting.get("images"):
        return found
    if template:
        found.chat_template = found.chat_template.replace("message['content']", images.CONTENT)
    return images.processor(model, setting, found)


def pairs(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """The rows as a user has them, of unequal lengths."""
    counts = {"training": "pairs", "evaluation": "pairs_of_evaluation"}
    defaults = {"training": 16, "evaluation": 8}
    chosen = random.Random(f"{seed} {part}")
    found = []
    for _ in range(int(setting.get(counts[part], defaults[part]))):

        def text(least: int, most: int) -> str:
            return " ".join(f"w{chosen.randrange(model.words - 8)}" for _ in range(chosen.randint(least, most)))

        found.append(_row(setting, text))
    return found


def _row(setting: Mapping[str, Any], text: Any) -> dict[str, Any]:
    kind = setting.get("data", "plain")
    prompt, better, worse = text(3, 6), text(2, 5), text(2, 5)
    if kind == "thought":
        better = f"{_OTHER} {better}"
    if kind in CONVERSATIONAL or setting.get("images"):
        asked = [{"role": "user", "content": prompt}]
        for _ in range(_ROUNDS.get(kind, 1) - 1):
            asked += [{"role": "assistant", "content": text(2, 3)}, {"role": "user", "content": text(2, 3)}]
        answers = [[{"role": "assistant", "content": each}] for each in (better, worse)]
        if kind == "conversational_implicit":
            return {"chosen": asked + answers[0], "rejected": asked + answers[1]}
        row: dict[str, Any] = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
        if setting.get("images") == "placeholders":
            return {name: images.structured(each) for name, each in row.items()}
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
    found = as_dataset(pairs(model, setting, seed, part), setting)
    return images.added(found, setting, seed, part) if setting.get("images") else found


def with_images(
    model: TinyModel, setting: Mapping[str, Any], seed: int, part: str, limits: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows that pairs whose prompts have images must become, as the processor makes them.

    Args:
        limits: of :func:`~pytest_trlcompat.reference.preference_row`.
    """
    from pytest_trlcompat import reference

    words, found = tokenizer(model, setting), []
    for number, row in enumerate(pairs(model, setting, seed, part)):
        pictures = images.images_of(setting, seed, part, number)
        asked, inputs = images.processed(words, row["prompt"], pictures, add_generation_prompt=True)
        wholes = [images.processed(words, [*row["prompt"], *row[name]], pictures)[0] for name in ("chosen", "rejected")]
        made: dict[str, Any] = reference.preference_row(*_apart(asked, wholes), **limits)
        digests = images.digests(inputs)
        found.append({**made, "chosen_images": digests, "rejected_images": digests} if digests else made)
    return found


def as_dataset(rows: list[dict[str, Any]], setting: Mapping[str, Any]) -> Any:
    """A dataset in memory, ``iterable``, or ``stored`` in a folder, from which it was loaded."""
    from datasets import Dataset, load_from_disk

    found: Any = Dataset.from_list(rows)
    if setting.get("data") == "stored":
        return load_from_disk(_stored(found))
    return found.to_iterable_dataset() if setting.get("data") == "iterable" else found


def _stored(rows: Any) -> str:
    """The folder that rows are saved in: one for all ranks, as where a user has saved them before."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state, folder = PartialState(), [tempfile.mkdtemp(prefix="trlcompat-")]
    broadcast_object_list(folder)
    if state.is_main_process:
        rows.save_to_disk(folder[0])
    state.wait_for_everyone()
    return folder[0]


def parts(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The prompt of a pair, given or what both completions begin with, and the completions, the chosen one first."""
    from pytest_trlcompat import reference

    if "prompt" in row:
        return row["prompt"], row["chosen"], row["rejected"]
    split: Any = reference.common_prompt if isinstance(row["chosen"], str) else reference.shared_messages
    found: tuple[Any, Any, Any] = split(row["chosen"], row["rejected"])
    return found


def sequences(words: Any, row: Mapping[str, Any], undecided: reference.PreferenceUndecided) -> tuple[list[int], ...]:
    """Token ids of prompt, chosen and rejected completion.

    A text has the special tokens that its tokenizer adds, and ends with an end of sequence; a conversation has those of
    the chat template alone.

    Args:
        words: of :func:`tokenizer`.
        row: of :func:`pairs`.
        undecided: see ``text_end`` and ``text_start``.
    """
    prompt, *completions = parts(row)
    if isinstance(prompt, str):
        asked = words(prompt, add_special_tokens=undecided.text_start)["input_ids"]
        answers = [words(each, add_special_tokens=False)["input_ids"] for each in completions]
        end = [words.eos_token_id]
        always = undecided.text_end == "always"
        return asked, *([*each, *end] if always or each[-1:] != end else each for each in answers)
    return conversation(words, prompt, completions, row)


def conversation(words: Any, prompt: Any, completions: Sequence[Any], row: Mapping[str, Any]) -> tuple[list[int], ...]:
    """Token ids of a prompt and of each of its completions, all of them messages, as the chat template makes them.

    Each conversation is what the template makes of the whole, and its prompt what all begin with: a template may ask
    for an answer with tokens that stand before no answer, or before some.

    Args:
        row: whose other columns may be arguments of the template.
    """
    given = {"tools": row["tools"]} if row.get("tools") else {}
    given |= row.get("chat_template_kwargs") or {}

    def rendered(messages: Sequence[Any], **how: Any) -> list[int]:
        text = words.apply_chat_template(messages, tokenize=False, **how, **given)
        found: list[int] = words(text, add_special_tokens=False)["input_ids"]
        return found

    asked = rendered(prompt, add_generation_prompt=True)
    return _apart(asked, [rendered([*prompt, *each]) for each in completions])


def _apart(asked: Sequence[int], wholes: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
    """What all begin with, and what is left of each whole."""
    shared = itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(asked, *wholes, strict=False))
    prompt = [tokens[0] for tokens in shared]
    return prompt, *(list(each[len(prompt) :]) for each in wholes)
