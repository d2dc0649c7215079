"""What one tiny model has and others do not: a processor, experts, a release from which on there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from pytest_trlcompat import tiny
from pytest_trlcompat.tiny import ArchitectureAbsent, TinyModel, architectures

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_the_processor_of_a_vision_model_makes_tokens_of_an_image(tiny_vlm: Callable[..., TinyModel]) -> None:
    small = tiny_vlm()
    images = pytest.importorskip("PIL.Image")
    processor = small.processor

    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1 w2"}]}
    text = processor.apply_chat_template([message], tokenize=False)
    assert text == f"{IMAGE} w1 w2 <eos> "
    image = images.frombytes("RGB", (24, 16), bytes(range(192)) * 6)
    # Without torchvision it takes no videos, and what is saved is read as one that does.
    has_videos = importlib.util.find_spec("torchvision") is not None
    loaded = [transformers.AutoProcessor.from_pretrained(small.path)] if has_videos else []
    for each in (processor, *loaded):
        inputs = each(text=[text], images=[image], return_tensors="pt")
        start, end, pad = (small.vocab_size - places for places in (4, 3, 2))
        assert inputs["input_ids"].tolist() == [[start, *[pad] * 6, end, 4, 5, 1]]
        assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]
        assert small.model(**inputs).logits.shape == (1, 11, 64)


def test_a_processor_whose_packages_are_missing_says_which(
    tiny_vlm: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(architectures.Architecture, "has_file", lambda self, name: True)
    with pytest.raises(ImportError, match="^the processor of Qwen2-VL needs Pillow, not installed here$"):
        _ = tiny_vlm().processor


def test_the_processor_of_any_other_model_is_its_tokenizer() -> None:
    small = tiny.llama()
    assert small.processor is small.tokenizer


def test_experts_have_the_requested_sizes_and_few_of_them_see_a_token(tiny_moe: Callable[..., TinyModel]) -> None:
    small = tiny_moe(num_experts=6, num_experts_per_tok=3, num_hidden_layers=1)
    tensors = tiny.checkpoint_tensors(small.model)
    experts = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ".mlp.experts." in name}
    assert len(experts) == 6 * 3
    assert experts["model.layers.0.mlp.experts.5.gate_proj.weight"] == (21, 32)
    assert experts["model.layers.0.mlp.experts.0.down_proj.weight"] == (32, 21)
    token = torch.tensor([[9]])
    small.model(input_ids=token, labels=token).logits.sum().backward()
    gradients = dict.fromkeys(range(6), 0.0)
    for name, parameter in small.model.named_parameters():
        if "experts" in name and parameter.grad is not None:
            parts = (
                dict(enumerate(parameter.grad)) if parameter.dim() == 3 else {int(name.split(".")[5]): parameter.grad}
            )
            for expert, gradient in parts.items():
                gradients[expert] += gradient.abs().sum().item()
    assert sum(gradient > 0 for gradient in gradients.values()) == 3


def test_a_release_without_an_architecture_says_which_have_it(
    monkeypatch: pytest.MonkeyPatch, tiny_moe: Callable[..., TinyModel], tmp_path: Path
) -> None:
    monkeypatch.setattr(architectures.Architecture, "has_file", lambda self, name: False)
    text = f"transformers {transformers.__version__} has no Qwen3-MoE, which came with 4.51.0"
    small = tiny.moe(directory=tmp_path)
    for build in (lambda: small.model, lambda: small.config, lambda: small.path, small.check_present):
        with pytest.raises(ArchitectureAbsent, match=f"^{text}$"):
            build()
    with pytest.raises(pytest.skip.Exception, match=text):
        tiny_moe()
