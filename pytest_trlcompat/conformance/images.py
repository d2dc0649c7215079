"""Images in prompts: the images, tiny models and processors that take them, and what a processor makes of a prompt.

A processor needs only Pillow here: those of Transformers that ask for torchvision have a slower backend without it, and
Qwen2-VL's is built without its part for videos. Runs inside a rank.
"""

from __future__ import annotations

import importlib.util
import math
import random
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "AXIS",
    "CONTENT",
    "IMAGE_ID",
    "IMAGE_TOKEN",
    "MODELS",
    "added",
    "column",
    "digests",
    "images_of",
    "lacking",
    "llava",
    "of_rows",
    "placed",
    "problems",
    "processed",
    "processor",
    "saved",
    "structured",
    "typed",
    "vision_model",
    "with_images",
]

AXIS = ("", "image", "images", "two", "mixed", "sometimes", "placeholders", "unused")
"""Which images prompts have.

``image``: one each, in the column of that name. ``images``: one each, in lists. ``two``: two each. ``mixed``: none, one
or two, the first of which is an empty list. ``sometimes``: the column ``image`` is ``None`` for every other prompt.
``placeholders``: two each, which the prompt says where to put. ``unused``: none, though the trainer has a processor.
"""
MODELS = ("llava", "vision")
"""Values of the axis ``model``: a tiny LLaVA, whose images all have the same numbers of tokens and pixel values; a tiny
Qwen2-VL, whose images have a grid of patches that depends on the size of the image."""
IMAGE_TOKEN = "<|image_pad|>"
"""The placeholder of each token of an image in a prompt, in both models."""
IMAGE_ID = 66
"""Its id, where the vocabulary has as many words as that of models without images."""
CONTENT = (
    "(message['content'] if message['content'] is string else message['content'] | map(attribute='text', "
    "default='%image%') | map('default', '%image%', true) | join(' '))"
).replace("%image%", f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>")
"""The content of a message in a chat template, whether it is a text or a list of texts and images."""
_SIDES = (8, 16, 24)
"""Possible widths and heights of images, in pixels: a processor of Qwen2-VL does not resize these."""
# Pixels of a side, pixels of a patch's side, and tokens of an image: one for each of its 2 by 2 patches.
_LLAVA_SIDE, _LLAVA_PATCH, _LLAVA_TOKENS = 16, 8, 4
_MERGED = 4
"""Patches of Qwen2-VL that become one token."""
_SCALE = 0.3


def lacking(setting: Mapping[str, Any]) -> str:
    """That Pillow is not installed, where the setting needs it; else empty."""
    if setting.get("images") and importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed; cells that have it are run by: nox -s matrix -- --images"
    return ""


def vision_model(model: TinyModel) -> TinyModel:
    """A tiny Qwen2-VL that knows the same words as another model."""
    from pytest_trlcompat import tiny

    names = ("initializer_range", "num_hidden_layers", "directory")
    # In a vocabulary of the same size the tokens of images would take the place of words.
    same_vocabulary = tiny.vlm(vocab_size=model.vocab_size, **{name: getattr(model, name) for name in names})
    more = model.words - same_vocabulary.words
    return tiny.vlm(vocab_size=model.vocab_size + more, **{name: getattr(model, name) for name in names})


def images_of(setting: Mapping[str, Any], seed: int, part: str, row: int) -> list[Any]:
    """The images of a row of a dataset: PIL images of noise, of unequal sizes for a model that takes them."""
    from PIL import Image

    kind = setting.get("images")
    counts = {"two": 2, "placeholders": 2, "mixed": row % 3, "sometimes": (row + 1) % 2, "": 0, "unused": 0}
    dice = random.Random(f"{seed}/{part}/{row}/images")
    pictures = []
    for _ in range(counts.get(str(kind or ""), 1)):
        is_llava = setting.get("model") == "llava"
        size = (_LLAVA_SIDE, _LLAVA_SIDE) if is_llava else (dice.choice(_SIDES), dice.choice(_SIDES))
        pictures.append(Image.frombytes("RGB", size, dice.randbytes(3 * size[0] * size[1])))
    return pictures


def column(setting: Mapping[str, Any], seed: int, part: str, rows: int) -> dict[str, list[Any]]:
    """The column of images of a dataset: ``image`` or ``images``, or none."""
    kind = setting.get("images")
    if kind in (None, "", "unused"):
        return {}
    pictures = [images_of(setting, seed, part, row) for row in range(rows)]
    if kind in ("image", "sometimes"):
        return {"image": [row_pictures[0] if row_pictures else None for row_pictures in pictures]}
    return {"images": pictures}


def added(dataset: Any, setting: Mapping[str, Any], seed: int, part: str) -> Any:
    """The dataset with the column of :func:`column` added; the same dataset where there is none."""
    pictures = column(setting, seed, part, len(dataset))
    if not pictures:
        return dataset
    from datasets import Dataset, Features, Image

    kinds = {name: Image() if name == "image" else [Image()] for name in pictures}
    features = Features({**dataset.features, **kinds})
    return Dataset.from_dict({**dataset.to_dict(), **pictures}, features=features)


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation whose contents are lists of parts: images "before the first user message", or at placeholders."""
    conversation: list[dict[str, Any]] = []
    remaining = list(images)
    has_placeholders = any(not isinstance(message["content"], str) for message in messages)
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            first = message["role"] == "user" and not has_placeholders
            leading = [{"type": "image", "image": image} for image in remaining] if first else []
            remaining = [] if first else remaining
            parts = [*leading, {"type": "text", "text": parts}]
        else:
            parts = [
                {"type": "image", "image": remaining.pop(0)} if part["type"] == "image" else part for part in parts
            ]
        conversation.append({**message, "content": parts})
    return conversation


def placed(text: str) -> list[dict[str, Any]]:
    """A user's text with two placeholders of images in it."""
    first, _, rest = text.partition(" ")
    # In a dataset all parts of a content have the same keys.
    image = {"type": "image", "text": None}
    return [{"type": "text", "text": first}, image, {"type": "text", "text": rest}, dict(image)]


def structured(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts, with two placeholders of images in the first message of a user."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return [
        {
            **message,
            "content": placed(message["content"])
            if users[:1] == [number]
            else [{"type": "text", "text": message["content"]}],
        }
        for number, message in enumerate(messages)
    ]


def processed(
    processor: Any, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], **how: Any
) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
    """Token ids of one conversation, and the further inputs of the model. The processor is called with it alone.

    Args:
        processor: the processor.
        how: arguments of the chat template.
    """
    text = processor.apply_chat_template(with_images(messages, images), tokenize=False, **how)
    batch = processor(images=[list(images)] if images else None, text=[text], return_tensors="pt")
    ids = tuple(batch["input_ids"][0].tolist())
    return ids, {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}


def processor(model: TinyModel, setting: Mapping[str, Any], tokenizer: Any) -> Any:
    """What a trainer takes as ``processing_class``.

    Args:
        model: that of :func:`vision_model`.
        tokenizer: of the model.

    Raises:
        ValueError: the model's vocabulary is not that of the conformance trainings.
    """
    import transformers

    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != IMAGE_ID:
        raise ValueError(f"{IMAGE_TOKEN} has another id than {IMAGE_ID}, by which rows are taken apart")
    if setting.get("model") != "llava":
        return model.processor_with(tokenizer)
    sizes = {"size": {"shortest_edge": _LLAVA_SIDE}, "crop_size": {"height": _LLAVA_SIDE, "width": _LLAVA_SIDE}}
    # The other one needs torchvision from Transformers 5 on.
    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return transformers.LlavaProcessor(
        image_processor=kind(**sizes),
        tokenizer=tokenizer,
        patch_size=_LLAVA_PATCH,
        vision_feature_select_strategy="default",
        # CLIP's class token, which the strategy "default" leaves out again.
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    )


def llava(model: TinyModel) -> Any:
    """A tiny LLaVA of CLIP and Qwen2, in float32 and in evaluation mode, with the vocabulary and sizes of ``model``.

    Its weights are the same in every process, and large enough that each of them matters.
    """
    import torch
    import transformers

    text = transformers.Qwen2Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        use_sliding_window=False,
        **_TOKENS,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_LLAVA_SIDE,
        patch_size=_LLAVA_PATCH,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=model.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        # By default it is the last layer but one, and the last one would get no gradient.
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        llava_model = transformers.LlavaForConditionalGeneration(config).float()
        with torch.no_grad():
            for name, parameter in llava_model.named_parameters():
                if parameter.dim() > 1 or "bias" in name:
                    parameter.normal_(0.0, _SCALE)
    return llava_model.eval()


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def saved(model: Any) -> str:
    """A folder of this rank with the whole model, which a trainer may read again."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="trlcompat-"))
    # Not model.save_pretrained: in a distributed process of Transformers 5, ranks other than 0 would write nothing.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def of_rows(inputs: Mapping[str, Any], ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The part of a batch's pixel values that belongs to each row, by its image tokens, as nested lists.

    Args:
        inputs: of a batch, with ``pixel_values`` and perhaps ``image_grid_thw``.
        ids: of each row, with or without padding.

    Raises:
        ValueError: the numbers of image tokens of rows do not fit the images of the pixel values.
    """
    if inputs.get("pixel_values") is None:
        return [{} for _ in ids]
    grids = inputs.get("image_grid_thw")
    pixels = inputs["pixel_values"].detach().float().cpu().tolist()
    # The number of tokens of each image, and its number of rows of the pixel values.
    sizes = [(_LLAVA_TOKENS, 1)] * len(pixels)
    if grids is not None:
        grids = grids.tolist()
        sizes = [(math.prod(grid) // _MERGED, math.prod(grid)) for grid in grids]
    inputs_by_row: list[dict[str, Any]] = []
    image = place = 0
    for row in ids:
        tokens, first, start = sum(token == IMAGE_ID for token in row), image, place
        while tokens > 0 and image < len(sizes):
            tokens -= sizes[image][0]
            place += sizes[image][1]
            image += 1
        if tokens:
            raise ValueError(
                f"a row has {sum(token == IMAGE_ID for token in row)} image tokens, of no number of images"
            )
        row_inputs: dict[str, Any] = {"pixel_values": pixels[start:place]} if image > first else {}
        inputs_by_row.append(
            row_inputs | ({"image_grid_thw": grids[first:image]} if row_inputs and grids is not None else {})
        )
    if image != len(sizes):
        raise ValueError(f"pixel values have {len(sizes)} images, of which the tokens of rows stand for {image}")
    return inputs_by_row


def typed(inputs: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Inputs of a row with the types of its tokens (1: of an image), where this release's processor makes them."""
    import transformers

    has_types = getattr(transformers.Qwen2VLProcessor, "return_mm_token_type_ids", False)
    if not has_types or "image_grid_thw" not in inputs:
        return dict(inputs)
    return {**inputs, "mm_token_type_ids": [[int(token == IMAGE_ID) for token in ids]]}


def digests(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """A digest of each row of pixel values, by which they are compared; they are a tensor or nested lists."""
    pixels = inputs.get("pixel_values", ())
    rows = pixels.float().tolist() if hasattr(pixels, "tolist") else pixels
    # Not by hash(), which gives each process another number for a text.
    return tuple(zlib.crc32(repr(row).encode()) for row in rows)


def problems(inputs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Problems of the types of tokens in a batch with images, where this release's models need them."""
    if inputs.get("image_grid_thw") is None:
        return []
    expected = [typed({"image_grid_thw": ()}, row).get("mm_token_type_ids") for row in inputs["input_ids"].tolist()]
    seen = inputs.get("mm_token_type_ids")
    if expected[0] is None or (seen is not None and [[row] for row in seen.tolist()] == expected):
        return []
    return [("data[mm_token_type_ids]", "1 for each token of an image", "none" if seen is None else str(seen.tolist()))]
