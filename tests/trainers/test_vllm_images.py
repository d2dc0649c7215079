"""Prompts with images reach vLLM with one token for each image; with vLLM's own engine: ``suites/vllm``."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.vllm import vllm_images

IMAGE = 66
VOCABULARY = 68
MADE_OF_ONE = 3
"""Tokens that this engine makes of one image's token."""


class Engine:
    """Stands for vLLM's ``LLM``: makes tokens of an image of the first that it finds, as vLLM does."""

    def __init__(self) -> None:
        self.asked: Any = None
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: self.said.append("forget"))
        self.said: list[str] = []
        self.completion = [3, 4]

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> list[Any]:
        self.asked = prompts
        completions = [SimpleNamespace(token_ids=self.completion)]
        return [SimpleNamespace(prompt_token_ids=self._made(each), outputs=completions) for each in prompts]

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
        ({"vllm_generation": SimpleNamespace(mode="server", vllm_client=None)}, False),
        ({"vllm_generation": None}, False),
        ({"processing_class": SimpleNamespace()}, False),
    ],
)
def test_it_acts_where_an_engine_is_in_this_process_and_the_processor_has_images(
    changed: dict[str, Any], active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, trl="1.10.0")
    engine = Engine()
    corrected(engine, **changed)
    assert ("generate" in vars(engine)) is active


def installed(monkeypatch: pytest.MonkeyPatch, trl: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.conditions.installed", lambda _: True)
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.patching.installed_version", lambda _: trl)


def corrected(engine: Engine, vocabulary: int = VOCABULARY, **changed: Any) -> Any:
    """A trainer with the cure, as far as it looks at one."""
    text = SimpleNamespace(vocab_size=vocabulary)

    class Trainer:
        def __init__(self) -> None:
            vars(self).update(
                {
                    "vllm_generation": SimpleNamespace(llm=engine, sync_weights=lambda: None, generation_kwargs={}),
                    "processing_class": SimpleNamespace(image_token_id=IMAGE),
                    "model": SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)),
                    **changed,
                }
            )

    return type("Corrected", (vllm_images.VLLMImagesMixin, Trainer), {})()


@pytest.mark.parametrize(
    ("given", "bias"),
    [
        ({}, {IMAGE: -100.0}),
        ({"logit_bias": None}, {IMAGE: -100.0}),
        ({"logit_bias": {3: 1.0}, "seed": 1}, {IMAGE: -100.0, 3: 1.0}),
        ({"logit_bias": {IMAGE: -5.0}}, {IMAGE: -5.0}),
    ],
)
def test_the_token_of_an_image_is_kept_from_being_sampled_beside_what_the_user_asks_for(
    given: dict[str, Any], bias: dict[int, float]
) -> None:
    before = dict(given)
    generation = SimpleNamespace(generation_kwargs=given)
    vllm_images._keep_from_sampling(generation, IMAGE)
    assert generation.generation_kwargs == {**before, "logit_bias": bias}
    assert given == before, "these are the training's arguments, too"


@pytest.mark.parametrize(("vocabulary", "bias"), [(IMAGE + 1, {IMAGE: -100.0}), (IMAGE, None)])
def test_a_token_that_the_model_cannot_sample_gets_no_bias_which_vllm_would_refuse(
    vocabulary: int, bias: dict[int, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, trl="1.16.0")
    trainer = corrected(Engine(), vocabulary)
    assert trainer.vllm_generation.generation_kwargs.get("logit_bias") == bias


@pytest.mark.parametrize("generation", [SimpleNamespace(), SimpleNamespace(generation_kwargs=None)])
def test_an_engine_that_cannot_be_kept_from_it_is_refused(generation: Any) -> None:
    with pytest.raises(CureError, match="VLLMGeneration.generation_kwargs, .*but it is None"):
        vllm_images._keep_from_sampling(generation, IMAGE)


def test_a_completion_with_the_token_of_an_image_is_refused_where_prompts_have_images() -> None:
    engine = watched()
    engine.completion = [3, IMAGE]
    engine.generate([{"prompt_token_ids": [4, 5]}])  # nothing follows from it
    with pytest.raises(CureError, match=f"without token {IMAGE}, .*2 of 2 have it.*or set it to -100"):
        engine.generate([asked([64, IMAGE, IMAGE, IMAGE, 65], "a"), {"prompt_token_ids": [4, 5]}])


def test_images_are_looked_at_anew_behind_each_synchronisation() -> None:
    engine = Engine()

    def hand_over() -> str:
        engine.said.append("weights")
        return "done"

    generation = SimpleNamespace(sync_weights=hand_over)
    vllm_images._forget_images(generation, vllm_images._forgetting(None, engine))
    assert engine.said == []
    assert [generation.sync_weights(), generation.sync_weights()] == ["done", "done"]
    assert engine.said == ["weights", "forget"] * 2


def test_an_engine_that_cannot_forget_images_is_refused() -> None:
    engine = Engine()
    engine.llm_engine = SimpleNamespace()
    with pytest.raises(CureError, match="looked for reset_encoder_cache of vLLM's engine.*not there"):
        vllm_images._forgetting(None, engine)


class Server:
    """Stands for TRL's ``VLLMGeneration`` with its client, and a server of vLLM's own."""

    def __init__(self, status: int = 200) -> None:
        self.mode = "server"
        self.generation_kwargs: dict[str, Any] = {}
        self.vllm_client = SimpleNamespace(base_url="http://server", session=SimpleNamespace(post=self._post))
        self.said: list[str] = []
        self.completion = [3, 4]
        self._status = status

    def sync_weights(self) -> None:
        self.said.append("weights")

    def generate(self, prompts: Any, images: Any, num_generations: int) -> Any:
        return prompts, [self.completion for _ in prompts], None, None

    def _post(self, url: str, timeout: float) -> Any:
        self.said.append(url)
        return SimpleNamespace(status_code=self._status)


@pytest.mark.parametrize(("is_main", "asked"), [(True, ["http://server/reset_encoder_cache"]), (False, [])])
def test_the_main_process_has_a_server_forget_images_behind_each_synchronisation(
    is_main: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, trl="1.11.0")
    server = Server()
    corrected(Engine(), vllm_generation=server, accelerator=SimpleNamespace(is_main_process=is_main))
    server.sync_weights()
    assert server.said == ["weights", *asked]
    assert server.generation_kwargs == {"logit_bias": {IMAGE: -100.0}}


def test_a_server_that_cannot_forget_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, trl="1.11.0")
    server = Server(status=404)
    corrected(Engine(), vllm_generation=server, accelerator=SimpleNamespace(is_main_process=True))
    with pytest.raises(CureError, match="reset_encoder_cache of vLLM's engine.*POST http://server/.*answered by 404"):
        server.sync_weights()


def test_of_a_server_too_no_completion_with_the_token_of_an_image_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, trl="1.11.0")
    server = Server()
    corrected(Engine(), vllm_generation=server, accelerator=SimpleNamespace(is_main_process=True))
    prompts = [[64, IMAGE, IMAGE, IMAGE, 65], [4, 5]]
    assert server.generate(prompts=prompts, images=["a", None], num_generations=1)[0] is prompts, "they go as they are"
    server.completion = [3, IMAGE]
    server.generate(prompts=prompts, images=None, num_generations=1)  # nothing follows from it
    with pytest.raises(CureError, match="2 of 2 have it"):
        server.generate(prompts=prompts, images=["a", None], num_generations=1)
