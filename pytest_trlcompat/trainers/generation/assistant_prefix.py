"""Cure of prompts that begin an answer, which is to be continued.

Issues: ``grpo-assistant-prefix``, ``rloo-assistant-prefix``, ``distillation-assistant-prefix``.

A conversation that ends with an assistant's message asks for its continuation. Some releases of TRL have the chat
template close that message and begin another one. The cure has each such conversation rendered with
``continue_final_message``, as TRL's own ``apply_chat_template`` does, and the others as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint, original, replaced_in
from pytest_trlcompat.trainers.curing.upstream import codes_of, definitions, function_uses

__all__ = ["AssistantPrefixMixin"]

CHAT_TEMPLATE = patch_points.in_grpo("maybe_apply_chat_template", ">=0.14,<0.15")  # right from then on
# Beneath what tokenizers and processors call ``apply_chat_template``; TRL renders by it from 0.25 on.
RENDER_OF_TOKENIZERS = PatchPoint("transformers.tokenization_utils_base:render_jinja_template", ">=4.56")
RENDER_OF_PROCESSORS = PatchPoint("transformers.processing_utils:render_jinja_template", ">=4.56")


class AssistantPrefixMixin(Cure):
    """Lets a trainer of TRL's that samples, GRPO's, RLOO's or distillation's, or a subclass of one, sample the
    continuation of a prompt that ends with an assistant's message.

    What is changed is how the chat template renders such a conversation, while this trainer turns prompts into tokens:
    beneath ``apply_chat_template`` of tokenizers and processors, one conversation at a time, so that a batch may hold
    both kinds. Completions do not repeat the beginning, as TRL's do not.

    Raises:
        CureError: there are such prompts, and what renders them is not Transformers: a tokenizer with a method of its
            own, or a vLLM server.
    """

    _kinds: ClassVar = {
        "trainer": ("LoggedMetricsMixin", "neither calls the other; it was measured here"),
        "grpo": ("ScaleRewardsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.in_grpo("GRPOTrainer._generate_single_turn", ">=0.25,<0.29.1"),
        patch_points.in_grpo("GRPOTrainer._tokenize_prompts", ">=0.29.1"),
        RENDER_OF_TOKENIZERS,
        RENDER_OF_PROCESSORS,
        patch_points.COMPUTE_LOSS,
        CHAT_TEMPLATE,
    )
    processing_class: Any
    _seen: int = 0
    _continued: int = 0

    def _tokenize_prompts(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        return self._rendering(upstream._tokenize_prompts, prompts, *args, **kwargs)

    def _generate_single_turn(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        return self._rendering(upstream._generate_single_turn, prompts, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with replaced_in(_points_of_trl(type(self)), self._continuing_each, AssistantPrefixMixin.__name__):
            return upstream.compute_loss(*args, **kwargs)

    def _continuing_each(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_apply_chat_template(example: Any, words: Any, *args: Any, **kwargs: Any) -> Any:
            if words is not self.processing_class or not _is_begun(example.get("prompt")):
                return upstream(example, words, *args, **kwargs)
            self._continued += 1
            text = words.apply_chat_template(example["prompt"], tokenize=False, continue_final_message=True)
            return {**example, "prompt": text}

        return maybe_apply_chat_template

    def _rendering(self, upstream: Callable[..., Any], prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if not _renders_all_alike(type(self)) or not any(_is_begun(prompt) for prompt in prompts):
            return upstream(prompts, *args, **kwargs)
        before = self._seen
        with replaced_in(_POINTS, self._continuing, AssistantPrefixMixin.__name__):
            returned = upstream(prompts, *args, **kwargs)
        if self._seen == before:
            raise CureError(
                "AssistantPrefixMixin",
                expected="the call by which Transformers renders prompts that end with an assistant's message",
                seen="something else has rendered them",
                packages=("trl", "transformers"),
                remedy="Apply the chat template yourself, with continue_final_message=True, and give texts as prompts"
                + leaving_out("AssistantPrefixMixin"),
            )
        return returned

    def _continuing(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        def render_jinja_template(
            conversations: Any, *args: Any, continue_final_message: Any = False, **kwargs: Any
        ) -> Any:
            # Transformers also takes objects that hold their `messages`.
            begun = [_is_begun(getattr(conversation, "messages", conversation)) for conversation in conversations]
            self._seen += sum(begun)
            if continue_final_message or not kwargs.get("add_generation_prompt") or not any(begun):
                return upstream(conversations, *args, continue_final_message=continue_final_message, **kwargs)
            self._continued += sum(begun)
            texts, indices = [], []
            for conversation, is_begun in zip(conversations, begun, strict=True):
                how = {"add_generation_prompt": False, "continue_final_message": True} if is_begun else {}
                rendered, more = upstream([conversation], *args, **{**kwargs, **how})
                texts += rendered
                indices += more
            return texts, indices

        return render_jinja_template

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _renders_all_alike(trainer_class) and not _points_of_trl(trainer_class):
            return Activity(False, "TRL continues an assistant's message, or samples nothing here")
        if trainer is not None and trainer._continued:
            return Activity(True, f"{trainer._continued} prompts that end with an assistant's message were continued")
        return Activity(None, "where a prompt ends with an assistant's message")


_POINTS = (RENDER_OF_TOKENIZERS, RENDER_OF_PROCESSORS)


def _is_begun(prompt: Any) -> bool:
    """Whether a prompt is a conversation that ends with an assistant's message."""
    last = prompt[-1] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _points_of_trl(cls: type) -> tuple[PatchPoint, ...]:
    """Where trl 0.14 applies the chat template to one prompt after the other, and never continues one."""
    if not any(base.__module__ == CHAT_TEMPLATE.module for base in cls.__mro__):
        return ()
    upstream = original(CHAT_TEMPLATE)
    applied = None if upstream is None else getattr(sys.modules[upstream.__module__], "apply_chat_template", None)
    if applied is None or any("continue_final_message" in code.co_varnames for code in codes_of(applied)):
        return ()
    return (CHAT_TEMPLATE,)


def _renders_all_alike(cls: type) -> bool:
    """Whether TRL's trainer applies the chat template to a whole batch itself."""
    return any(
        function_uses(defined, "apply_chat_template")
        for method in ("_tokenize_prompts", "_generate_single_turn")
        for package, defined, _ in definitions(cls, method)
        if package == "trl"
    )
