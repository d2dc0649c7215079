"""The data of a conformance training with SFT, as a user gives it, and the rows that documentation makes of it.

Runs inside a rank.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import images

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.supervised.records import Row
    from pytest_trlcompat.reference.sft import SFTUndecided
    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "ROWS",
    "TEMPLATES",
    "dataset",
    "expected_rows",
    "expected_size",
    "formatted",
    "template_path",
    "tokenizer",
]

ROWS: Mapping[str, int] = {"training": 24, "evaluation": 8}
_USER, _ASSISTANT, _SYSTEM = "w50", "w51", "w52"
_WRITTEN = (
    "{% for message in messages %}{{ '' if loop.first else ' ' }}"
    "{{ {'user': 'w50', 'assistant': 'w51', 'system': 'w52'}[message['role']] + ' ' }}"
    "{% if message['role'] == 'assistant' %}%begin%{{ message['content'] + ' ' + eos_token }}%end%"
    "{% else %}{{ message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' w51' }}{% endif %}"
)
TEMPLATES: Mapping[str, str] = {
    "": _WRITTEN.replace("%begin%", "").replace("%end%", ""),
    "generation": _WRITTEN.replace("%begin%", "{% generation %}").replace("%end%", "{% endgeneration %}"),
    "behind_end": _WRITTEN.replace("%begin%", "").replace("%end%", "").replace("eos_token }}", "eos_token + ' w58' }}"),
    "other": _WRITTEN.replace("%begin%", "").replace("%end%", "").replace("w50", "w45").replace("w51", "w46"),
    "tools": (
        "{% for tool in tools %}{{ 'w47 ' + tool['function']['name'] + ' ' }}{% endfor %}"
        "{% for message in messages %}{{ '' if loop.first else ' ' }}"
        "{{ {'user': 'w50', 'assistant': 'w51', 'tool': 'w53'}[message['role']] + ' ' }}"
        "{% if message['tool_calls'] %}{{ 'w48 ' + message['tool_calls'][0]['function']['name'] }}"
        "{% else %}{{ message['content'] }}{% endif %}{{ ' ' + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' w51' }}{% endif %}"
    ),
}
"""Each message begins with a word for its role and ends with the end of sequence. ``generation`` marks the parts that
an assistant has generated, including its end; ``behind_end`` writes a word after each end of sequence, as ChatML writes
a new line; ``other`` has other words for roles; ``tools`` writes tools, their calls and their results."""
FAMILIES: Mapping[str, tuple[str, str]] = {
    "qwen3": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "glm4moe": ("<|assistant|>", "<|user|>"),
}
"""Families of models for whose training TRL has its own chat template, by the name of the file of the model's template
in TRL; with the text that begins an assistant's message and the text with which the model ends it, which GLM-4-MoE
writes only where another message follows."""
_MARKERS = "<[^<>]*>|\n"
_IGNORED = -100
BOS = "w59"
"""The word that a tokenizer with a beginning of sequence puts in front of every text."""


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class.

    ``same_end``: its padding is its end of sequence. ``no_padding``: it has none. ``beginning``: it begins every text
    with :data:`BOS`, as its chat template does. ``left``: it pads on the left. ``no_template``: it has no chat
    template. ``generation``, ``behind_end``: see :data:`TEMPLATES`, as for data with tools; those of
    :data:`FAMILIES`, whose markers are tokens.
    """
    import copy

    if setting.get("images"):
        model = images.vision_model(model)
    processing_class = copy.deepcopy(model.tokenizer)
    variant = setting.get("tokenizer", "")
    # Old releases ask for the right side.
    processing_class.padding_side = "left" if variant == "left" else "right"
    kind = "tools" if setting.get("data") in ("tools", "calls") else variant
    processing_class.chat_template = None if variant == "no_template" else TEMPLATES.get(kind, TEMPLATES[""])
    if variant in FAMILIES:
        _with_markers(processing_class, variant)
    if variant == "same_end":
        processing_class.pad_token = processing_class.eos_token
    elif variant == "no_padding":
        processing_class.pad_token = None
    elif variant == "beginning":
        from tokenizers import processors

        number = processing_class.convert_tokens_to_ids(BOS)
        processing_class._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
        )
        processing_class.bos_token = BOS
        processing_class.chat_template = "{{ bos_token + ' ' }}" + processing_class.chat_template
    if not setting.get("images"):
        return processing_class
    processing_class.chat_template = processing_class.chat_template.replace("message['content']", images.CONTENT)
    return images.processor(model, setting, processing_class)


def _with_markers(processing_class: Any, family: str) -> None:
    """Set the template of a family of models, and make each marker and new line one token, even if an unknown one."""
    import trl
    from tokenizers import Regex, pre_tokenizers

    folder = Path(trl.__file__).parent / "chat_templates"
    processing_class.chat_template = (folder / f"{family}.jinja").read_text(encoding="utf-8")
    splits = [pre_tokenizers.Split(Regex(_MARKERS), "isolated"), pre_tokenizers.Split(" ", "removed")]
    processing_class.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)


def template_path(model: TinyModel, setting: Mapping[str, Any]) -> str:
    """Where ``chat_template_path`` finds another template: the folder of a ``"tokenizer"``, or a ``"file"``."""
    folder = Path(tempfile.mkdtemp(prefix="trlcompat-"))
    if setting["template"] == "tokenizer":
        other = tokenizer(model, setting)
        other.chat_template = TEMPLATES["other"]
        other.save_pretrained(folder)
        # By the config Transformers finds the tokenizer's class.
        model.new_model().config.save_pretrained(folder)
        return str(folder)
    file = folder / "template.jinja"
    file.write_text(TEMPLATES["other"], encoding="utf-8")
    return str(file)


def examples(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """Examples as a user has them: of unequal lengths, each with other first two words than all others."""
    dice = random.Random(f"{seed}/{part}")
    kind = setting.get("data", "text")
    # Words from w45 on belong to chat templates, tools and formats.
    firsts = dice.sample(range(40**2), ROWS[part])

    def words(least: int, most: int) -> str:
        return " ".join(f"w{dice.randrange(40)}" for _ in range(dice.randint(least, most)))

    def turn() -> list[dict[str, str]]:
        return [{"role": "user", "content": words(1, 3)}, {"role": "assistant", "content": words(1, 4)}]

    rows: list[dict[str, Any]] = []
    for number in firsts:
        begun = " ".join(f"w{word}" for word in divmod(number, 40))
        if kind == "messages":
            messages = [{"role": "user", "content": begun}, {"role": "assistant", "content": words(1, 6)}]
            rows.append({"messages": messages})
        elif kind == "asked_again":
            rows.append({"messages": [{"role": "user", "content": begun}, *turn()[::-1]]})
        elif kind == "reasoned":
            answer = f"{words(1, 2)} </think> {words(1, 3)}"
            messages = [{"role": "user", "content": begun}, {"role": "assistant", "content": answer}]
            rows.append({"messages": messages})
        elif kind == "turns":
            first = [{"role": "user", "content": begun}, {"role": "assistant", "content": words(1, 3)}]
            rows.append({"messages": [*first, *turn(), *(turn() if dice.random() < 0.5 else [])]})
        elif kind == "tools":
            name = f"w{dice.randrange(40)}"
            called = [{"type": "function", "function": {"name": name, "arguments": {"w1": words(1, 2)}}}]
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": begun},
                        {"role": "assistant", "tool_calls": called},
                        {"role": "tool", "name": name, "content": words(1, 3)},
                        {"role": "assistant", "content": words(1, 4)},
                    ],
                    "tools": [_tool(name)],
                }
            )
        elif kind == "calls":
            name = begun
            called = [{"type": "function", "function": {"name": name, "arguments": {"w1": words(1, 2)}}}]
            rows.append({"messages": [{"role": "assistant", "tool_calls": called}], "tools": [_tool(name)]})
        elif kind == "system":
            rows.append({"messages": [{"role": "system", "content": begun}, *turn()]})
        elif kind == "prompt_turns_completion":
            first = [{"role": "user", "content": begun}, {"role": "assistant", "content": words(1, 3)}]
            completion = [{"role": "assistant", "content": words(1, 4)}]
            rows.append({"prompt": [*first, {"role": "user", "content": words(1, 2)}], "completion": completion})
        elif kind == "conversations":
            messages = [{"from": "user", "value": begun}, {"from": "assistant", "value": words(1, 6)}]
            rows.append({"conversations": messages})
        elif kind == "labels":
            ids = model.tokenizer(f"{begun} {words(2, 8)} <eos>", add_special_tokens=False)["input_ids"]
            rows.append({"input_ids": ids, "labels": [_IGNORED, _IGNORED, *ids[2:]]})
        elif kind == "prompt_completion_messages":
            completion = [{"role": "assistant", "content": words(1, 6)}]
            rows.append(
                {"prompt": [{"role": "user", "content": f"{begun} {words(0, 3)}".strip()}], "completion": completion}
            )
        elif kind in ("prompt_completion", "long_prompts"):
            prompt = f"{begun} {words(8, 9) if kind == 'long_prompts' and dice.random() < 0.4 else words(0, 4)}".strip()
            rows.append({"prompt": prompt, "completion": f" {words(1, 6)}"})
        elif kind == "other_field":
            rows.append({"body": f"{begun} {words(1, 8)}"})
        elif kind == "questions":
            rows.append({"question": begun, "answer": words(1, 6)})
        elif kind == "ended":
            rows.append({"text": f"{begun} {words(1, 8)}" + (" <eos>" if dice.random() < 0.5 else "")})
        elif kind in ("input_ids", "input_ids_messages"):
            text = f"{begun} {words(1, 8)} <eos>"
            extra_column = {"messages": [{"role": "user", "content": begun}]} if kind == "input_ids_messages" else {}
            rows.append({"input_ids": model.tokenizer(text, add_special_tokens=False)["input_ids"], **extra_column})
        else:
            rows.append({"text": f"{begun} {words(1, 8)}"})
    if setting.get("images") == "placeholders":
        return [{name: images.structured(messages) for name, messages in row.items()} for row in rows]
    return rows


def _tool(name: str) -> dict[str, Any]:
    """A tool that takes a text, as a JSON schema."""
    parameters = {"type": "object", "properties": {"w1": {"type": "string"}}, "required": ["w1"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def dataset(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
    """The dataset as a user gives it. ``transform``: each reading of a text appends another word."""
    from datasets import Dataset

    rows = images.added(Dataset.from_list(examples(model, setting, seed, part)), setting, seed, part)
    if setting.get("transform"):
        dice = random.Random(seed)
        return rows.with_transform(lambda batch: {"text": [f"{text} w{dice.randrange(40)}" for text in batch["text"]]})
    return rows.to_iterable_dataset() if setting.get("stream") and part == "training" else rows


def formatted(example: Mapping[str, Any]) -> Any:
    """A ``formatting_func`` of questions and answers: of one example or of a batch."""
    if isinstance(example["question"], list):
        return [_formatted(*pair) for pair in zip(example["question"], example["answer"], strict=True)]
    return _formatted(example["question"], example["answer"])


def _formatted(question: str, answer: str) -> str:
    return f"w55 {question} w56 {answer}"


def expected_rows(
    model: TinyModel,
    setting: Mapping[str, Any],
    arguments: Mapping[str, Any],
    seed: int,
    part: str,
    undecided: SFTUndecided,
) -> list[Row]:
    """The rows by documentation; rows that are packed do not see each other, and are listed one by one."""
    from pytest_trlcompat import reference

    limit = arguments.get("max_length", arguments.get("max_seq_length"))
    mode = arguments.get("truncation_mode") or "keep_start"
    strategy = packing(arguments, part)
    raw = examples(model, setting, seed, part)
    if setting.get("images") not in (None, "", "unused"):
        return [
            _with_images(model, setting, arguments, example, images.images_of(setting, seed, part, row))
            for row, example in enumerate(raw)
        ]
    whole = [_row(example, model, setting, arguments, undecided) for example in raw]
    if strategy == "wrapped":
        blocks = reference.wrapped_blocks(whole, limit, undecided.wrapped_remainder)
        # Nothing predicts the first token of a block.
        return [{**block, "labels": (reference.IGNORED, *block["labels"][1:])} for block in blocks]
    rows: list[Row] = []
    for row in whole:
        if strategy == "bfd_split":
            pieces = {name: reference.split_rows(values, limit) for name, values in row.items()}
        else:
            pieces = {name: [reference.truncated(values, limit, mode)] for name, values in row.items()}
        for ids, labels in zip(pieces["input_ids"], pieces["labels"], strict=True):
            is_dropped = undecided.rows_without_labels == "dropped" and limit and strategy != "bfd_split"
            if is_dropped and set(labels) <= {reference.IGNORED}:
                continue
            rows.append({"input_ids": ids, "labels": (reference.IGNORED, *labels[1:])})
    return rows


def _with_images(
    model: TinyModel,
    setting: Mapping[str, Any],
    arguments: Mapping[str, Any],
    example: Mapping[str, Any],
    pictures: Sequence[Any],
) -> Row:
    """A row whose conversation has images, as the processor makes it; cutting leaves whole images."""
    from pytest_trlcompat import reference

    processing_class = tokenizer(model, setting)
    prompt = example.get("prompt", [])
    messages = [*prompt, *example.get("messages", example.get("completion", []))]
    ids, inputs = images.processed(processing_class, messages, pictures)
    answered = 0
    if prompt and arguments.get("completion_only_loss") is not False:
        answered = len(images.processed(processing_class, prompt, pictures, add_generation_prompt=True)[0])
    limit = arguments.get("max_length")
    counts = [place >= max(1, answered) for place in range(len(ids))]
    if arguments.get("assistant_only_loss"):
        counts = []
        for number, message in enumerate(messages, 1):
            end = len(images.processed(processing_class, messages[:number], pictures)[0])
            # A message begins with the word for its role, which nobody generates.
            counts += [False, *[message["role"] == "assistant"] * (end - len(counts) - 1)]
    labels = [token if counted else reference.IGNORED for token, counted in zip(ids, counts, strict=True)]
    row: dict[str, Any] = {"input_ids": ids[:limit], "labels": tuple(labels[:limit])}
    if "pixel_values" in inputs:
        row["images"] = images.digests(inputs)
    return row


def packing(arguments: Mapping[str, Any], part: str) -> str:
    """The strategy by which rows of a part are packed; empty where they are not."""
    chosen = arguments.get("packing")
    if part == "evaluation" and arguments.get("eval_packing") is not None:
        chosen = arguments["eval_packing"]
    return str(arguments.get("packing_strategy", "wrapped")) if chosen else ""


def expected_size(rows: Sequence[Row], arguments: Mapping[str, Any], part: str) -> int:
    """How many rows the trainer's dataset has: bins, where rows are packed."""
    from pytest_trlcompat import reference

    if packing(arguments, part) in ("", "wrapped"):
        return len(rows)
    limit = arguments.get("max_length", arguments.get("max_seq_length"))
    return len(reference.best_fit_bins([len(row["input_ids"]) for row in rows], int(limit or 0)))


def _row(
    example: Mapping[str, Any],
    model: TinyModel,
    setting: Mapping[str, Any],
    arguments: Mapping[str, Any],
    undecided: SFTUndecided,
) -> dict[str, Sequence[int]]:
    """Token ids and labels of the whole example."""
    processing_class = tokenizer(model, setting)
    # A processor's own tokenizer: texts do not need the processor.
    processing_class = getattr(processing_class, "tokenizer", processing_class)
    processing_class.eos_token = setting.get("eos_token") or processing_class.eos_token
    processing_class.chat_template = TEMPLATES["other"] if setting.get("template") else processing_class.chat_template
    if "labels" in example:
        return {name: example[name] for name in ("input_ids", "labels")}
    ids, answered = _tokens(example, processing_class, setting, undecided)
    counts = [True] * len(ids)
    # Releases without this argument document only a loss of whole sequences.
    is_masked = "completion_only_loss" in arguments and arguments["completion_only_loss"] is not False
    if "prompt" in example and is_masked:
        counts = [place >= answered for place in range(len(ids))]
    if arguments.get("assistant_only_loss"):
        generated = _generated(example, processing_class)
        counts = [counted and is_generated for counted, is_generated in zip(counts, generated, strict=True)]
    from pytest_trlcompat.reference import IGNORED

    return {
        "input_ids": ids,
        "labels": [token if counted else IGNORED for token, counted in zip(ids, counts, strict=True)],
    }


def _tokens(
    example: Mapping[str, Any], processing_class: Any, setting: Mapping[str, Any], undecided: SFTUndecided
) -> tuple[list[int], int]:
    """Token ids, and how many of them are the prompt's."""
    if "input_ids" in example:
        return list(example["input_ids"]), 0
    prompt, messages = example.get("prompt", ""), example.get("messages")
    if "conversations" in example:
        messages = [{"role": turn["from"], "content": turn["value"]} for turn in example["conversations"]]
    if isinstance(prompt, list):
        messages = [*prompt, *example["completion"]]
    elif prompt and undecided.prompt_completion_as == "conversation":
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": example["completion"]}]
    if messages:
        written = processing_class.apply_chat_template(messages, tools=example.get("tools"), tokenize=False)
        ids = _encoded(processing_class, written)
        if not isinstance(prompt, list):
            return ids, 0
        before = processing_class.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return ids, len(_encoded(processing_class, before))
    if setting.get("data") == "questions":
        text = _formatted(example["question"], example["answer"])
    else:
        text = prompt + example.get("completion", "") or example.get("text", example.get("body", ""))
    beginning = [processing_class.convert_tokens_to_ids(BOS)] if setting.get("tokenizer") == "beginning" else []
    ids = [*beginning, *_encoded(processing_class, text)]
    is_ended = bool(ids) and ids[-1] == processing_class.eos_token_id
    if undecided.appended_eos == "always" or (undecided.appended_eos == "unless_there" and not is_ended):
        ids.append(processing_class.eos_token_id)
    return ids, len(beginning) + len(_encoded(processing_class, prompt))


def _encoded(processing_class: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens: a chat template has written the beginning of sequence."""
    return list(processing_class(text, add_special_tokens=False)["input_ids"])


def _generated(example: Mapping[str, Any], processing_class: Any) -> list[bool]:
    """Which tokens an assistant has generated: those from the word for its role to the end of the message."""
    messages = example.get("messages") or [*example["prompt"], *example["completion"]]
    generated: list[bool] = []
    if family := next(
        (markers for markers in FAMILIES.values() if markers[0].strip() in processing_class.chat_template), None
    ):
        return _between(processing_class, processing_class.apply_chat_template(messages, tokenize=False), *family)
    if processing_class.bos_token is not None and processing_class.chat_template.startswith("{{ bos_token"):
        generated.append(False)
    for message in messages:
        # One more for the end of sequence.
        size = len(_encoded(processing_class, message["content"])) + 1
        generated += [False, *[message["role"] == "assistant"] * size]
    return generated


def _between(processing_class: Any, text: str, begins: str, ends: str) -> list[bool]:
    """Which tokens of a text are between the beginning of an assistant's message and its end, the end included."""
    places, spans = 0, []
    while (start := text.find(begins, places)) >= 0:
        end = text.find(ends, start + len(begins))
        places = len(text) if end < 0 else end + len(ends)
        spans.append((start + len(begins), places))
    offsets = processing_class(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [any(start <= first < end for start, end in spans) for first, _ in offsets]
