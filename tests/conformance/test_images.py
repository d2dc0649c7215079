"""Which images prompts have, where they stand, and what they need."""

from __future__ import annotations

import importlib.util

import pytest

from pytest_trlcompat.conformance import images, rows
from pytest_trlcompat.conformance.grpo.sampling import Data, content


def test_images_stand_before_the_first_user_s_text() -> None:
    messages = [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4"},
    ]
    found = images.with_images(messages, ["one", "two"])
    assert [each["content"] for each in found] == [
        [{"type": "text", "text": "w1"}],
        [{"type": "image", "image": "one"}, {"type": "image", "image": "two"}, {"type": "text", "text": "w2"}],
        [{"type": "text", "text": "w3"}],
        [{"type": "text", "text": "w4"}],
    ]
    assert messages[1] == {"role": "user", "content": "w2"}


def test_images_stand_where_a_prompt_has_placeholders() -> None:
    messages = images.structured(
        [
            {"role": "user", "content": "w1 w2 w3"},
            {"role": "assistant", "content": "w4"},
            {"role": "user", "content": "w5"},
        ]
    )
    assert [each["type"] for each in messages[0]["content"]] == ["text", "image", "text", "image"]
    found = images.with_images(messages, ["one", "two"])
    assert found[0]["content"] == [
        {"type": "text", "text": "w1"},
        {"type": "image", "image": "one"},
        {"type": "text", "text": "w2 w3"},
        {"type": "image", "image": "two"},
    ]
    assert [each["content"] for each in found[1:]] == [
        [{"type": "text", "text": "w4"}],
        [{"type": "text", "text": "w5"}],
    ]


def test_what_reward_functions_read_of_a_prompt_is_its_text() -> None:
    data = Data(0, 40, conversational=True, images={"images": "placeholders", "model": "llava"})
    (text,) = data.texts(1, "training")
    (prompt,) = data.prompts(1)
    assert isinstance(prompt[0]["content"], list)
    assert content(prompt) == text
    assert content(images.with_images([{"role": "user", "content": text}], ["one"])) == text


def test_what_is_lacking_is_named_where_pillow_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Pillow is not installed" in images.lacking({"images": "image"})
    assert images.lacking({"model": "vision"}) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert images.lacking({"images": "image"}) == ""


def test_rows_with_images_are_tried_by_cells_that_have_pillow_and_use_known_values() -> None:
    found = {
        trainer: [row for row in rows.load(trainer).values() if row.added == "images"] for trainer in rows.TRAINERS
    }
    assert {trainer for trainer, some in found.items() if some} == {"dpo", "grpo", "rloo", "sft"}
    every = [row for some in found.values() for row in some]
    assert {row.setting["images"] for row in every} == {*images.AXIS} - {""}
    assert {row.setting["model"] for row in every} == {*images.MODELS}
    assert all(row.name.startswith("images_") for row in every)
    assert not any(row.setting.get("model") == "llava" for row in rows.load("grpo").values() if not row.added)
