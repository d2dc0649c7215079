"""The cure of how TRL hands weights to vLLM, without vLLM: what it hands over, and that the model stays as it is.

With the engine it is tested by ``suites/vllm``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel


def adapted(tiny: TinyModel, **settings: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.path), config)


def hand_over(tiny: TinyModel, settings: dict[str, Any]) -> dict[str, Any]:
    """A single process: against what PEFT itself merges into the model for good."""
    import torch

    from pytest_trlcompat.trainers.vllm_sync import parameters_for_engine

    model = adapted(tiny, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".modules_to_save." in name:
                parameter.add_(1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [(name, value.clone()) for name, value in parameters_for_engine(model, lambda parameters: nullcontext())]
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    truth = dict(model.merge_and_unload().named_parameters())
    return {
        "names": sorted(name for name, _ in found) == sorted(truth),
        "off": max(float((value - truth[name]).abs().max()) for name, value in found),
        "unchanged": unchanged,
        "adapter": max(float((truth[name] - frozen).abs().max()) for name, frozen in _frozen(before)),
    }


def _frozen(state: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor)
        for name, tensor in state.items()
        if ".base_layer." in name
    ]


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "whole"])
def test_lora_is_merged_into_copies(
    settings: dict[str, Any], tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    (found,) = launcher(hand_over, tiny_qwen2(), settings, strategy="single").values
    assert found["names"]
    assert found["unchanged"]
    assert found["off"] <= 1e-7 < 1e-3 < found["adapter"]


def refuse(tiny: TinyModel) -> dict[str, bool]:
    from pytest_trlcompat.trainers.vllm_sync import _merges

    model = adapted(tiny)
    return {"plain": _merges(model), "dora": _merges(adapted(tiny, use_dora=True)), "none": _merges(model.unload())}


def test_what_is_no_plain_lora_is_left_to_trl(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> None:
    (found,) = launcher(refuse, tiny_qwen2(), strategy="single").values
    assert found == {"plain": True, "dora": False, "none": False}


def hand_over_sharded(tiny: TinyModel, with_adapter: bool) -> dict[str, Any]:
    """Wrapped by FSDP1 as Accelerate does it, each layer and the root: against the same model that is not wrapped."""
    import functools

    from accelerate import PartialState
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    from pytest_trlcompat.trainers.vllm_sync import _of_fsdp1

    def build() -> Any:
        return adapted(tiny) if with_adapter else AutoModelForCausalLM.from_pretrained(tiny.path)

    whole = build()
    truth = dict((whole.merge_and_unload() if with_adapter else whole).named_parameters())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
    device = PartialState().device  # which begins the process group
    root = FullyShardedDataParallel(build(), auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    found = [(name, value.cpu().clone()) for name, value in _of_fsdp1(root)]
    return {
        "names": sorted(name for name, _ in found) == sorted(truth),
        "off": max(float((value - truth[name]).abs().max()) for name, value in found),
    }


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
def test_under_fsdp1_the_roots_own_are_handed_over_and_lora_is_merged(
    with_adapter: bool, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    found = launcher(hand_over_sharded, tiny_qwen2(), with_adapter, strategy="fsdp1", sharded=False)
    for rank in found.values:
        assert rank["names"]
        assert rank["off"] <= 1e-7
