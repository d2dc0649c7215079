"""Cure of ``grpo-vllm-images`` and ``rloo-vllm-images``: vLLM completes the prompt with images that is trained on; and
of ``grpo-vllm-image-token`` and ``rloo-vllm-image-token``: it samples no token that stands for an image.

TRL has a processor make the tokens of a prompt's images, several for each, and hands these ids to an engine in the same
process together with the images. vLLM makes the tokens of an image of one placeholder: it takes the first of them for
that, and leaves the others where they are. The prompt has tokens of an image that is not there, is longer than the one
that is trained on, and nothing says so (trl 6294).

The cure leaves one token of each run, and looks at what the engine says that the prompt was: it must be what TRL has
asked for. A server takes the tokens as they are, with the places of images beside them, so that they stay.

Besides, vLLM keeps what its vision model has made of an image, and uses it again where the image comes again, with
whatever weights it was made. TRL has it forget the keys and values of prompts when it has handed over weights, and not
this (trl 7198). Where the vision model is trained, prompts are completed with images as earlier weights
saw them. The cure has the engine forget them, by ``reset_encoder_cache``, which vLLM has for that, a server as one of
the development endpoints that TRL needs to hand over weights.

A completion with the token that stands for an image has no image for it, so that the policy cannot be asked about it.
Newer releases of TRL suppress that token where Transformers generates, and none does in vLLM. The cure does it by
``logit_bias``, and looks at what was sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected

__all__ = ["VLLMImagesMixin"]

_IDS, _DATA = "prompt_token_ids", "multi_modal_data"
_FORGET = "reset_encoder_cache"
_TIMEOUT = 60.0
"""Seconds that a server has to forget images."""
# The least bias that vLLM takes.
_BIAS, _NEVER = "logit_bias", -100.0


class VLLMImagesMixin(Cure):
    """Hands vLLM one token for each image of a prompt, and checks that vLLM makes of it the tokens that are trained on;
    has it look at images anew whenever it has got weights; and keeps it from sampling such a token.

    Of any trainer that generates with TRL's ``VLLMGeneration``, in the same process or by a server that is vLLM's own,
    and whose processor has images. Prompts that are texts, and such without images, go as they are. A ``logit_bias``
    for that token in ``generation_kwargs`` takes precedence.

    Raises:
        CureError: while it is built: vLLM cannot forget what it has made of images, or TRL does not keep what vLLM is
            to sample with. While it generates: the ids of a prompt have another number of runs of image tokens than it
            has images, as where two images follow on each other; the engine completed another prompt than it was asked
            to; or a completion has the token of an image. When weights are handed over: the server cannot forget
            images, in the main process, as where a request of TRL's own fails.
    """

    _kinds: ClassVar = {
        "trainer": ("VLLMSyncMixin", "its __init__ calls this one's"),
        "grpo": ("VLLMSyncMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        PatchPoint("trl.generation.vllm_generation:VLLMGeneration.generate", ">=0.28"),
        patch_points.VLLM_CLIENT,
    )
    _needed: ClassVar = (
        Condition(
            "with images and vLLM's engine in the same process, or a server that is vLLM's own",
            "no vLLM engine is in this process, nor a server asked that is vLLM's own, or the processor has no images",
            lambda trainer: (
                (_engine_of(trainer) is not None or _is_served(trainer)) and _image_token_of(trainer) is not None
            ),
            needs="vllm",
        ),
    )

    accelerator: Any
    model: Any
    processing_class: Any
    vllm_generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if VLLMImagesMixin._activity(type(self), self).active:
            engine, image_token = _engine_of(self), self.processing_class.image_token_id
            _forget_images(self.vllm_generation, _forgetting(self, engine))
            # vLLM refuses a bias for a token that it lacks.
            if image_token < self.model.config.get_text_config().vocab_size:
                _keep_from_sampling(self.vllm_generation, image_token)
            if engine is None:
                _look_at_answers(self.vllm_generation, image_token)
            else:
                _hand_over_placeholders(engine, image_token)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "prompts with images are completed as they are trained on", *cls._needed)


def _engine_of(trainer: Any) -> Any:
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def _is_served(trainer: Any) -> bool:
    generation = getattr(trainer, "vllm_generation", None)
    return expected(patch_points.VLLM_CLIENT) and getattr(generation, "mode", None) == "server"


def _image_token_of(trainer: Any) -> int | None:
    token: int | None = getattr(getattr(trainer, "processing_class", None), "image_token_id", None)
    return token


def _forgetting(trainer: Any, engine: Any) -> Callable[[], None]:
    """What has the engine of this process, or the server, forget images.

    Raises:
        CureError: the engine has no method for it.
    """
    if engine is None:
        is_main, generation = trainer.accelerator.is_main_process, trainer.vllm_generation
        return functools.partial(_ask_to_forget, generation.vllm_client) if is_main else lambda: None
    forget: Callable[[], None] | None = getattr(engine.llm_engine, _FORGET, None)
    if forget is None:
        raise _cannot_forget("it is not there")
    return forget


def _ask_to_forget(client: Any) -> None:
    """
    Raises:
        CureError: the server does not do it.
    """
    url = f"{client.base_url}/{_FORGET}"
    if (status := client.session.post(url, timeout=_TIMEOUT).status_code) != 200:
        raise _cannot_forget(f"POST {url} is answered by {status}")


def _cannot_forget(seen: str) -> CureError:
    return CureError(
        VLLMImagesMixin.__name__,
        expected=f"{_FORGET} of vLLM's engine, for what its vision model has made of images with earlier weights",
        seen=seen,
        packages=("trl", "vllm"),
    )


def _forget_images(generation: Any, forget: Callable[[], None]) -> None:
    synchronise = generation.sync_weights

    @functools.wraps(synchronise)
    def synchronised(*args: Any, **kwargs: Any) -> Any:
        returned = synchronise(*args, **kwargs)
        forget()
        return returned

    generation.sync_weights = synchronised


def _keep_from_sampling(generation: Any, image_token: int) -> None:
    """
    Raises:
        CureError: what the engine samples with is not where it has always been.
    """
    sampling = getattr(generation, "generation_kwargs", None)
    if not isinstance(sampling, dict):
        raise CureError(
            VLLMImagesMixin.__name__,
            expected="VLLMGeneration.generation_kwargs, by which vLLM is kept from sampling the token of an image",
            seen=f"it is {sampling!r}",
            packages=("trl",),
        )
    generation.generation_kwargs = {**sampling, _BIAS: {image_token: _NEVER, **(sampling.get(_BIAS) or {})}}


def _look_at_answers(generation: Any, image_token: int) -> None:
    """Look at what a server has sampled. Its prompts go as they are."""
    generate = generation.generate

    @functools.wraps(generate)
    def generated(prompts: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        returned = generate(prompts, images, *args, **kwargs)
        if any(images or ()):
            _check_sampled(returned[1], image_token)
        return returned

    generation.generate = generated


def _hand_over_placeholders(engine: Any, image_token: int) -> None:
    generate = engine.generate

    @functools.wraps(generate)
    def generated(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(prompts, list):
            return generate(prompts, *args, **kwargs)
        asked = [_with_placeholders(prompt, image_token) for prompt in prompts]
        outputs = generate(asked, *args, **kwargs)
        for prompt, output in zip(prompts, outputs, strict=True):
            if _has_images(prompt):
                _check(prompt[_IDS], output.prompt_token_ids, image_token)
        if any(map(_has_images, prompts)):
            _check_sampled([completion.token_ids for output in outputs for completion in output.outputs], image_token)
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
    # At place 0 the slice is empty, where `ids[place - 1]` would be the last token.
    shortened = [
        token for place, token in enumerate(ids) if token != image_token or ids[place - 1 : place] != [image_token]
    ]
    images = prompt[_DATA]["image"]
    count, runs = len(images) if isinstance(images, list) else 1, shortened.count(image_token)
    if count != runs:
        raise CureError(
            VLLMImagesMixin.__name__,
            expected=f"tokens of {count} images in a prompt, each image's apart from the next one's",
            seen=f"they are in {runs} runs",
            packages=("trl", "transformers"),
            remedy="Have the chat template write something between images",
        )
    return {**prompt, _IDS: shortened}


def _check(trained: Sequence[int], completed: Sequence[int], image_token: int) -> None:
    """
    Raises:
        CureError: they differ.
    """
    if list(trained) != list(completed):
        tokens = [sum(token == image_token for token in ids) for ids in (trained, completed)]
        raise CureError(
            VLLMImagesMixin.__name__,
            expected=f"a prompt of {len(trained)} tokens, {tokens[0]} of them for images, as it is trained on",
            seen=f"vLLM completed one of {len(completed)}, {tokens[1]} of them for images",
            packages=("trl", "transformers", "vllm"),
            remedy="Give vLLM the processor that the trainer has, saved in the model's folder",
        )


def _check_sampled(completions: Sequence[Sequence[int]], image_token: int) -> None:
    """
    Raises:
        CureError: one has the token.
    """
    if count := sum(image_token in completion for completion in completions):
        raise CureError(
            VLLMImagesMixin.__name__,
            expected=f"completions without token {image_token}, which stands for an image of the prompt",
            seen=f"{count} of {len(completions)} have it",
            packages=("trl", "vllm"),
            remedy=f"Leave that token out of logit_bias in generation_kwargs, or set it to {_NEVER:.0f}",
        )
