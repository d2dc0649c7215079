"""Cure of ``grpo-vllm-images`` and ``rloo-vllm-images``: vLLM completes the prompt with images that is trained on.

TRL has a processor make the tokens of a prompt's images, several for each, and hands these ids to an engine in the same
process together with the images. vLLM makes the tokens of an image of one placeholder: it takes the first of them for
that, and leaves the others where they are. The prompt has tokens of an image that is not there, is longer than the one
that is trained on, and nothing says so (trl 6294).

The cure leaves one token of each run, and looks at what the engine says that the prompt was: it must be what TRL has
asked for. A server takes the tokens as they are, with the places of images beside them, and is left alone.

Besides, vLLM keeps what its vision model has made of an image, and uses it again where the image comes again, with
whatever weights it was made. TRL has it forget the keys and values of prompts when it has handed over weights, and not
this (trl 7198). Where the vision model is trained, prompts are completed with images as earlier weights
saw them. The cure has the engine forget them, by ``reset_encoder_cache``, which vLLM has for that.

Imports the standard library, and of this package ``_conditions``, ``_cure`` and ``errors``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from pytest_trlcompat.trainers._conditions import Condition, under
from pytest_trlcompat.trainers._cure import Activity, Cure
from pytest_trlcompat.trainers.errors import CureError

__all__ = ["VLLMImagesMixin"]

_IDS, _DATA = "prompt_token_ids", "multi_modal_data"
_FORGET = "reset_encoder_cache"


class VLLMImagesMixin(Cure):
    """Hands vLLM one token for each image of a prompt, and sees that it makes those of the training of it; and has it
    look at images anew whenever it has got weights.

    Of any trainer that generates with TRL's ``VLLMGeneration`` and ``vllm_mode="colocate"``, and whose processor has
    images. Prompts that are texts, and such without images, go as they are.

    Raises:
        CureError: while it is built: vLLM cannot forget what it has made of images. While it generates: the ids of a
            prompt have another number of runs of image tokens than it has images, as where two images follow on each
            other; or the engine completed another prompt than it was asked to.
    """

    _needed: ClassVar = (
        Condition(
            "with images and vLLM's engine in the same process",
            "no vLLM engine is in this process, or the processor has no images",
            lambda trainer: _engine_of(trainer) is not None and _image_token_of(trainer) is not None,
            needs="vllm",
        ),
    )

    processing_class: Any
    vllm_generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if VLLMImagesMixin._activity(type(self), self).active:
            engine = _engine_of(self)
            _forget_images(self.vllm_generation, engine)
            _hand_over_placeholders(engine, self.processing_class.image_token_id)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the engine gets one token for each image", *cls._needed)


def _engine_of(trainer: Any) -> Any:
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def _image_token_of(trainer: Any) -> int | None:
    found: int | None = getattr(getattr(trainer, "processing_class", None), "image_token_id", None)
    return found


def _forget_images(generation: Any, engine: Any) -> None:
    """
    Raises:
        CureError: the engine has no method for it.
    """
    forget = getattr(engine.llm_engine, _FORGET, None)
    if forget is None:
        raise CureError(
            VLLMImagesMixin.__name__,
            wanted=f"{_FORGET} of vLLM's engine, for what its vision model has made of images with earlier weights",
            found="it is not there",
            packages=("trl", "vllm"),
        )
    synchronise = generation.sync_weights

    @functools.wraps(synchronise)
    def synchronised(*args: Any, **kwargs: Any) -> Any:
        returned = synchronise(*args, **kwargs)
        forget()
        return returned

    generation.sync_weights = synchronised


def _hand_over_placeholders(engine: Any, image_token: int) -> None:
    generate = engine.generate

    @functools.wraps(generate)
    def generated(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(prompts, list):
            return generate(prompts, *args, **kwargs)
        asked = [_with_placeholders(each, image_token) for each in prompts]
        outputs = generate(asked, *args, **kwargs)
        for prompt, output in zip(prompts, outputs, strict=True):
            if _has_images(prompt):
                _check(prompt[_IDS], output.prompt_token_ids, image_token)
        return outputs

    engine.generate = generated


def _has_images(prompt: Any) -> bool:
    return isinstance(prompt, dict) and bool(prompt.get(_IDS)) and bool((prompt.get(_DATA) or {}).get("image"))


def _with_placeholders(prompt: Any, image_token: int) -> Any:
    """
    Raises:
        CureError: a run of tokens is not one image's.
    """
    if not _has_images(prompt):
        return prompt
    ids = list(prompt[_IDS])
    kept = [each for place, each in enumerate(ids) if each != image_token or ids[place - 1 : place] != [image_token]]
    images = prompt[_DATA]["image"]
    count, runs = len(images) if isinstance(images, list) else 1, kept.count(image_token)
    if count != runs:
        raise CureError(
            VLLMImagesMixin.__name__,
            wanted=f"tokens of {count} images in a prompt, each image's apart from the next one's",
            found=f"they are in {runs} runs",
            packages=("trl", "transformers"),
            remedy="Have the chat template write something between images",
        )
    return {**prompt, _IDS: kept}


def _check(wanted: Sequence[int], found: Sequence[int], image_token: int) -> None:
    """
    Raises:
        CureError: they differ.
    """
    if list(wanted) != list(found):
        tokens = [sum(each == image_token for each in ids) for ids in (wanted, found)]
        raise CureError(
            VLLMImagesMixin.__name__,
            wanted=f"a prompt of {len(wanted)} tokens, {tokens[0]} of them for images, as it is trained on",
            found=f"vLLM completed one of {len(found)}, {tokens[1]} of them for images",
            packages=("trl", "transformers", "vllm"),
            remedy="Give vLLM the processor that the trainer has, saved in the model's folder",
        )
