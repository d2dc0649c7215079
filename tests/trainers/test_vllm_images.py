"""Prompts with images reach vLLM with one token for each image; with vLLM's own engine: ``suites/vllm``."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.trainers import vllm_images
from pytest_trlcompat.trainers.errors import CureError

IMAGE = 66
MADE_OF_ONE = 3
"""Tokens that this engine makes of one image's token."""


class Engine:
    """Stands for vLLM's ``LLM``: makes tokens of an image of the first that it finds, as vLLM does."""

    def __init__(self) -> None:
        self.asked: Any = None
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: self.said.append("forget"))
        self.said: list[str] = []

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> list[Any]:
        self.asked = prompts
        return [SimpleNamespace(prompt_token_ids=self._made(each)) for each in prompts]

    def _made(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            return [1]
        ids, images = list(prompt["prompt_token_ids"]), (prompt.get("multi_modal_data") or {}).get("image", [])
        place = 0
        for _ in images if isinstance(images, list) else [images]:
            place = ids.index(IMAGE, place)
            ids[place : place + 1] = [IMAGE] * MADE_OF_ONE
            place += MADE_OF_ONE
        return ids


def watched() -> Engine:
    engine = Engine()
    vllm_images._hand_over_placeholders(engine, IMAGE)
    return engine


def asked(ids: list[int], image: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}


def test_each_image_has_one_token_and_the_prompt_is_that_of_the_training() -> None:
    engine, one = watched(), asked([64, IMAGE, IMAGE, IMAGE, 65, 4], "a")
    two = asked([64, IMAGE, IMAGE, IMAGE, 65, 64, IMAGE, IMAGE, IMAGE, 65], ["b", "c"])
    first, second = engine.generate([one, two], sampling_params=None, use_tqdm=False)
    assert engine.asked == [asked([64, IMAGE, 65, 4], "a"), asked([64, IMAGE, 65, 64, IMAGE, 65], ["b", "c"])]
    assert (first.prompt_token_ids, second.prompt_token_ids) == (one["prompt_token_ids"], two["prompt_token_ids"])
    assert one["prompt_token_ids"] == [64, IMAGE, IMAGE, IMAGE, 65, 4], "what TRL trains on stays as it is"


@pytest.mark.parametrize(
    "prompts",
    [[{"prompt_token_ids": [4, 5]}], ["text"], [{"prompt": "text", "multi_modal_data": {"image": "a"}}]],
)
def test_other_prompts_go_as_they_are(prompts: list[Any]) -> None:
    engine = watched()
    engine.generate(prompts)
    assert engine.asked == prompts


def test_images_whose_tokens_follow_on_each_other_are_refused() -> None:
    with pytest.raises(CureError, match="tokens of 2 images in a prompt.*they are in 1 runs"):
        watched().generate([asked([IMAGE] * 6, ["a", "b"])])


def test_a_prompt_that_the_engine_makes_otherwise_is_refused() -> None:
    with pytest.raises(CureError, match="a prompt of 4 tokens, 2 of them for images.*one of 5, 3 of them"):
        watched().generate([asked([64, IMAGE, IMAGE, 65], "a")])


@pytest.mark.parametrize(
    ("changed", "active"),
    [
        ({}, True),
        ({"vllm_generation": SimpleNamespace(mode="server")}, False),
        ({"vllm_generation": None}, False),
        ({"processing_class": SimpleNamespace()}, False),
    ],
)
def test_it_acts_where_an_engine_is_in_this_process_and_the_processor_has_images(
    changed: dict[str, Any], active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr("pytest_trlcompat.trainers._conditions.installed", lambda _: True)
    engine = Engine()

    class Trainer:
        def __init__(self) -> None:
            vars(self).update(
                {
                    "vllm_generation": SimpleNamespace(llm=engine, sync_weights=lambda: None),
                    "processing_class": SimpleNamespace(image_token_id=IMAGE),
                    **changed,
                }
            )

    type("Corrected", (vllm_images.VLLMImagesMixin, Trainer), {})()
    assert ("generate" in vars(engine)) is active


def test_images_are_looked_at_anew_behind_each_synchronisation() -> None:
    engine = Engine()

    def hand_over() -> str:
        engine.said.append("weights")
        return "done"

    generation = SimpleNamespace(sync_weights=hand_over)
    vllm_images._forget_images(generation, engine)
    assert engine.said == []
    assert [generation.sync_weights(), generation.sync_weights()] == ["done", "done"]
    assert engine.said == ["weights", "forget"] * 2


def test_an_engine_that_cannot_forget_images_is_refused() -> None:
    engine = Engine()
    engine.llm_engine = SimpleNamespace()
    with pytest.raises(CureError, match="looked for reset_encoder_cache of vLLM's engine.*not there"):
        vllm_images._forget_images(SimpleNamespace(sync_weights=lambda: None), engine)
