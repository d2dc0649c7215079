"""The cure of ``grpo-assistant-prefix``: what is rendered, which conversations, and what is refused."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
from packaging.version import Version

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.trainers import CureError
from pytest_trlcompat.trainers.generation.assistant_prefix import AssistantPrefixMixin

needs_render = pytest.mark.skipif(
    Version(stack.installed().get("transformers", "0")) < Version("4.56"),
    reason="TRL renders whole batches itself from 0.25 on, which needs Transformers 4.56",
)
ASKED = [{"role": "user", "content": "w1 w2"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "w3 w4"}]


class Trl0291:
    """The part of trl 0.29.1 that matters."""

    __module__ = "trl.trainer.grpo_trainer"

    def __init__(self, words: Any) -> None:
        self.processing_class = words

    def _tokenize_prompts(self, prompts: Any) -> Any:
        found = self.processing_class.apply_chat_template(
            conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return found["input_ids"]


class Trl025(Trl0291):
    """That of trl 0.25, which pads."""

    __module__ = "trl.trainer.grpo_trainer"

    def _generate_single_turn(self, prompts: Any) -> Any:
        return self.processing_class.apply_chat_template(
            conversation=prompts,
            add_generation_prompt=True,
            tokenize=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        )


class Trl024:
    """That of trl 0.24, which leaves it to a function that is right."""

    __module__ = "trl.trainer.grpo_trainer"

    def _generate_single_turn(self, prompts: Any, images: Any) -> Any:
        return [maybe_apply_chat_template(prompt) for prompt in prompts]


def maybe_apply_chat_template(prompt: Any) -> int:
    return len(prompt)


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny.qwen2().tokenizer


def corrected(kind: type, *args: Any) -> Any:
    return type("Corrected", (AssistantPrefixMixin, kind), {})(*args)


def expected(words: Any, prompt: Any) -> Any:
    how = {"continue_final_message": True} if prompt is BEGUN else {"add_generation_prompt": True}
    return words(words.apply_chat_template(prompt, tokenize=False, **how), add_special_tokens=False)["input_ids"]


@needs_render
@pytest.mark.parametrize(
    "prompts", [[BEGUN, BEGUN], [BEGUN, ASKED, BEGUN], [ASKED, ASKED]], ids=["all", "some", "none"]
)
def test_each_conversation_is_rendered_by_its_last_message(words: Any, prompts: Any) -> None:
    given = copy.deepcopy(prompts)
    trainer = corrected(Trl0291, words)
    assert trainer._tokenize_prompts(prompts) == [expected(words, prompt) for prompt in prompts]
    assert prompts == given
    assert trainer._continued == prompts.count(BEGUN)
    if BEGUN in prompts:
        assert Trl0291(words)._tokenize_prompts(prompts) != trainer._tokenize_prompts(prompts)


@needs_render
@pytest.mark.parametrize("module", ["distillation_trainer", "rloo_trainer"])
def test_other_trainers_that_render_as_grpo_are_cured_as_well(words: Any, module: str) -> None:
    other = type("Other", (Trl0291,), {"__module__": f"trl.trainer.{module}"})
    assert corrected(other, words)._tokenize_prompts([ASKED, BEGUN]) == [
        expected(words, ASKED),
        expected(words, BEGUN),
    ]


@needs_render
def test_padding_is_upstreams(words: Any) -> None:
    found = corrected(Trl025, words)._generate_single_turn([ASKED, BEGUN])
    rows = [
        [token for token, kept in zip(row, mask, strict=True) if kept]
        for row, mask in zip(found["input_ids"].tolist(), found["attention_mask"].tolist(), strict=True)
    ]
    assert rows == [expected(words, ASKED), expected(words, BEGUN)]
    assert found["attention_mask"][:, -1].tolist() == [1, 1]


@needs_render
def test_nothing_else_is_rendered_otherwise(words: Any) -> None:
    trainer = corrected(Trl0291, words)
    before = words.apply_chat_template([BEGUN], add_generation_prompt=True, tokenize=False)
    trainer._tokenize_prompts([BEGUN])
    assert words.apply_chat_template([BEGUN], add_generation_prompt=True, tokenize=False) == before
    tools = [*BEGUN, {"role": "user", "content": "w5"}]
    assert trainer._tokenize_prompts([tools]) == Trl0291(words)._tokenize_prompts([tools])


@needs_render
def test_a_users_method_that_goes_on_is_no_hindrance(words: Any) -> None:
    class Mine(Trl0291):
        __module__ = "mine"

        def _tokenize_prompts(self, prompts: Any) -> Any:
            return super()._tokenize_prompts(prompts)[::-1]

    assert corrected(Mine, words)._tokenize_prompts([ASKED, BEGUN]) == [expected(words, BEGUN), expected(words, ASKED)]


@needs_render
def test_what_transformers_does_not_render_is_refused(words: Any) -> None:
    class Other:
        """A tokenizer that renders by itself."""

        def apply_chat_template(self, conversation: Any, **_: Any) -> Any:
            return {"input_ids": [[len(each)] for each in conversation]}

    trainer = corrected(Trl0291, Other())
    assert trainer._tokenize_prompts([ASKED]) == [[1]]
    with pytest.raises(CureError, match=r"something else has rendered them\. Apply the chat template yourself"):
        trainer._tokenize_prompts([ASKED, BEGUN])


class Trl014:
    """The part of trl 0.14 that matters: it renders one prompt after the other within its loss."""

    __module__ = "trl.trainer.grpo_trainer"

    def __init__(self, words: Any) -> None:
        self.processing_class = words

    def compute_loss(self, inputs: Any) -> Any:
        upstream: Any = sys.modules["trl.trainer.grpo_trainer"]
        return [
            upstream.maybe_apply_chat_template(example, words)["prompt"]
            for words in (self.processing_class, tiny.qwen2().tokenizer)
            for example in inputs
        ]


def test_trl_014_continues_what_it_renders_itself(monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    upstream: Any = pytest.importorskip("trl.trainer.grpo_trainer")
    data_utils: Any = importlib.import_module("trl.data_utils")

    def apply_chat_template(example: Any, words: Any) -> Any:
        return {"prompt": words.apply_chat_template(example["prompt"], tokenize=False, add_generation_prompt=True)}

    def maybe_apply_chat_template(example: Any, words: Any) -> Any:
        return data_utils.apply_chat_template(example, words)

    maybe_apply_chat_template.__module__ = "trl.data_utils"
    monkeypatch.setattr(data_utils, "apply_chat_template", apply_chat_template)
    monkeypatch.setattr(upstream, "maybe_apply_chat_template", maybe_apply_chat_template, raising=False)
    inputs = [{"prompt": ASKED}, {"prompt": BEGUN}]
    asked, closed = (apply_chat_template(each, words)["prompt"] for each in inputs)
    continued = words.apply_chat_template(BEGUN, tokenize=False, continue_final_message=True)
    assert closed != continued
    trainer = corrected(Trl014, words)
    assert trainer.compute_loss(inputs) == [asked, continued, asked, closed]  # another tokenizer's are upstream's
    assert Trl014(words).compute_loss(inputs) == [asked, closed, asked, closed]
    assert AssistantPrefixMixin._activity(Trl014, trainer).active is True


@pytest.mark.skipif(
    Version(stack.installed().get("trl", "0")) < Version("0.15"), reason="trl 0.14 does not continue them"
)
def test_releases_that_continue_such_prompts_are_left_alone() -> None:
    assert corrected(Trl024)._generate_single_turn([BEGUN, ASKED], None) == [2, 1]
    found = AssistantPrefixMixin._activity(Trl024, None)
    assert (found.active, found.reason) == (False, "TRL continues an assistant's message, or samples nothing here")


@needs_render
def test_it_says_what_it_does(words: Any) -> None:
    trainer = corrected(Trl0291, words)
    found = AssistantPrefixMixin._activity(Trl0291, trainer)
    assert (found.active, found.reason) == (None, "where a prompt ends with an assistant's message")
    trainer._tokenize_prompts([BEGUN, ASKED])
    found = AssistantPrefixMixin._activity(Trl0291, trainer)
    assert (found.active, found.reason) == (True, "1 prompts that end with an assistant's message were continued")
