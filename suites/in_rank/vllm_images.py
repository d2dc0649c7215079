"""Prompts with images for a training with vLLM: which image each prompt has, and what the engine must be asked with.

Right is what the processor makes of one prompt alone, with its own images.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "VOCABULARY",
    "Row",
    "Rows",
    "digests",
    "favour_image",
    "image_token",
    "load_policy",
    "path_of",
    "pictures",
    "prompts",
    "reward",
    "rows",
    "suppressed",
    "words",
]

VOCABULARY = 68
"""Of a model that knows as many words as one without images has with 64."""
_FAVOUR = 3.0
"""By which the logit of an image's token is multiplied: it is sampled wherever that is well above nought."""
_SEED = 3
_PART = "prompts"


@dataclass(frozen=True)
class Row:
    """One prompt with its images, as the processor makes it of that prompt alone.

    Attributes:
        ids: of the whole prompt, with the tokens of its images.
        inputs: what a model is called with in addition to the ids.
        digests: of its images, in order.
    """

    ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of a dataset, found again by the words of their prompts.

    Attributes:
        path: a folder with the model, untrained.
        suppressed: tokens that stand for images and videos.
        kept_from: those of them that the engine must not sample.
        by_words: each row by the ids of its prompt that are left without the suppressed ones.
    """

    path: str
    suppressed: tuple[int, ...]
    kept_from: tuple[int, ...]
    by_words: Mapping[tuple[int, ...], Row]

    def problems(
        self,
        asked: Sequence[tuple[int, ...]],
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
    ) -> dict[str, int]:
        """How many requests had other images than their row (``images``), how many prompts became other tokens
        (``tokens_of_images``), and how many completions have a token that must not be sampled (``sampled``).

        Args:
            asked: of each request the digests of its images.
            prompts: of each the ids that the engine made of it.
            completions: ids of each.
        """
        expected_rows = [self.by_words.get(_words(prompt, self.suppressed)) for prompt in prompts]
        return {
            "images": sum(
                row is None or row.digests != requested for row, requested in zip(expected_rows, asked, strict=True)
            ),
            "tokens_of_images": sum(
                row is None or row.ids != tuple(prompt) for row, prompt in zip(expected_rows, prompts, strict=True)
            ),
            "sampled": sum(not set(self.kept_from).isdisjoint(completion) for completion in completions),
        }

    def whole(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The ids of the row with these words."""
        return self._row(prompt).ids

    def inputs_of(self, prompt: Sequence[int], ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """What a model is called with in addition to the ids of a prompt and its completion."""
        import torch

        inputs = dict(self._row(prompt).inputs)
        if (types := inputs.get("mm_token_type_ids")) is not None:  # a completion is text
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(ids) - types.shape[1]))
        return inputs

    def _row(self, prompt: Sequence[int]) -> Row:
        return self.by_words[_words(prompt, self.suppressed)]


def _words(ids: Sequence[int], suppressed: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token in ids if token not in suppressed)


@functools.cache
def path_of(model: TinyModel, kind: str) -> str:
    """A folder with the untrained model and its processor, as it would be published.

    Args:
        kind: of ``conformance.images.MODELS``.
    """
    from pytest_trlcompat.conformance import images

    if kind != "llava":
        return str(model.path)
    folder = images.saved(images.llava(model))
    _publish(Path(folder) / "model.safetensors")
    words(model, kind).save_pretrained(folder)
    return folder


def _publish(file: Path) -> None:
    """Name weights as published checkpoints of LLaVA do, which Transformers and vLLM read."""
    from safetensors.torch import load_file, save_file

    # The first prefix that fits is taken, so that the longer one comes before.
    names = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.vision_model.": "vision_tower.vision_model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    published = {}
    for name, tensor in load_file(file).items():
        old = next((prefix for prefix in names if name.startswith(prefix)), "")
        published[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(published, file, metadata={"format": "pt"})


@functools.cache
def words(model: TinyModel, kind: str) -> Any:
    """The model's processor."""
    from pytest_trlcompat.conformance import images

    return images.processor(model, {"model": kind}, model.tokenizer)


def load_policy(model: TinyModel, kind: str) -> Any:
    """As :func:`grpo.load_policy`, of a vision model."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    path = path_of(model, kind)
    return _read(path) if is_deepspeed_zero3_enabled() else copy.deepcopy(_read_once(path))


def _read(path: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")


_read_once = functools.cache(_read)


@functools.cache
def prompts(length: int, kind: str, choice: str) -> Any:
    """Those of :func:`grpo.prompts` as conversations, with images.

    Args:
        length: of each prompt's words, in tokens.
        kind: of the model, which says how large images are.
        choice: of ``conformance.images.AXIS``, which images a prompt has.
    """
    from datasets import Dataset

    from pytest_trlcompat.conformance import images

    from . import grpo

    conversations = [[{"role": "user", "content": text}] for text in grpo.prompts(length)["prompt"]]
    return images.added(Dataset.from_dict({"prompt": conversations}), {"model": kind, "images": choice}, _SEED, _PART)


def rows(model: TinyModel, length: int, kind: str, choice: str, kept_from: tuple[int, ...]) -> Rows:
    """What the engine must be asked with, for the prompts of :func:`prompts`, and which tokens it must not sample."""
    from pytest_trlcompat.conformance import images

    skipped = suppressed(model)
    by_words = {}
    for number, prompt in enumerate(prompts(length, kind, choice)["prompt"]):
        row_images = images.images_of({"model": kind, "images": choice}, _SEED, _PART, number)
        ids, inputs = images.processed(words(model, kind), prompt, row_images, add_generation_prompt=True)
        by_words[_words(ids, skipped)] = Row(ids, inputs, digests(row_images))
    return Rows(path_of(model, kind), skipped, kept_from, by_words)


def suppressed(model: TinyModel) -> tuple[int, ...]:
    """Tokens that stand for images and videos: a completion that has one has no image for it."""
    from pytest_trlcompat.tiny.architectures import VISION_TOKENS

    return tuple(model.tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)))


def image_token(model: TinyModel) -> int:
    """The one of these that stands for an image."""
    from pytest_trlcompat.tiny.architectures import VISION_TOKENS

    token_id: int = model.tokenizer.convert_tokens_to_ids(VISION_TOKENS[2])
    return token_id


def favour_image(policy: Any, model: TinyModel) -> None:
    """Have the policy, whose head must be whole, favour an image's token wherever its logit is positive."""
    import torch

    with torch.no_grad():
        policy.get_output_embeddings().weight[image_token(model)] *= _FAVOUR


def pictures(request: Any) -> tuple[int, ...]:
    """Digests of the images of one request, in order."""
    images = (request.get("multi_modal_data") or {}).get("image", []) if isinstance(request, dict) else []
    return digests(images if isinstance(images, list) else [images])


def digests(images: Sequence[Any] | None) -> tuple[int, ...]:
    """Of a prompt's images, in order; ``None`` where it has none."""
    return tuple(map(_digest, images or ()))


def _digest(image: Any) -> int:
    return zlib.crc32(repr(image.size).encode() + image.convert("RGB").tobytes())


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Depends on the text alone, as :func:`grpo.reward`."""
    from . import grpo

    return grpo.reward(["".join(message["content"] for message in completion) for completion in completions])
