"""What the suites with vLLM compare, without vLLM: packed layers, experts, tensor parallelism, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1}


def engine_of(expected: Any, shard: tuple[int, int]) -> dict[str, Any]:
    """The tensors of an engine that is right, in bfloat16, by vLLM's names: a part of them for each rank."""
    import torch

    def cut(name: str) -> Any:
        value = expected[name].value.to(torch.bfloat16)
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        return value if "norm" in name or shard[1] == 1 else value.chunk(shard[1], axis)[shard[0]]

    found = {}
    experts: dict[str, list[Any]] = {}
    for name in expected:
        for packed, parts in {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.items():
            first = f".{parts[0]}_proj."
            if first in name and ".experts." not in name:
                names = [name.replace(first, f".{part}_proj.") for part in parts]
                found[name.replace(first, f".{packed}.")] = torch.cat([cut(each) for each in names])
        place, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            if ".gate_proj." in rest:
                pair = [cut(name), cut(name.replace(".gate_proj.", ".up_proj."))]
                experts.setdefault(f"{place}.mlp.experts.w13_weight", []).append(torch.cat(pair))
            if ".down_proj." in rest:
                experts.setdefault(f"{place}.mlp.experts.routed_experts.w2_weight", []).append(cut(name))
        elif not any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up")):
            found[name] = cut(name)
    return {**found, **{name: torch.stack(values) for name, values in experts.items()}}


def compared(tiny: TinyModel, change: str, shard: tuple[int, int]) -> dict[str, Any]:
    import torch

    from suites.in_rank import vllm_engine, vllm_server

    parameters = {name: parameter.detach() for name, parameter in tiny.new_model().named_parameters()}
    if tiny.tie_word_embeddings:
        parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    expected = vllm_engine.as_published(vllm_engine.merged(parameters, 1.0, torch.float32))
    tensors = engine_of(expected, shard)
    if tiny.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if change == "parted":
        expected["lm_head.weight"] = vllm_engine.Expected(expected["lm_head.weight"].value + 1)
    elif change:
        name = next(name for name in tensors if change in name)
        tensors[name] = tensors[name].flip(0)
    return dict(vllm_engine.compare(expected, vllm_server.Held(tensors), shard).wrong)


@pytest.mark.parametrize(
    ("fixture", "change", "shard"),
    [
        ("tiny_moe", "w13_weight", (0, 1)),
        ("tiny_moe", "w2_weight", (0, 1)),
        ("tiny_qwen2", "qkv_proj.weight", (1, 2)),
        ("tiny_qwen2", "o_proj.weight", (1, 2)),
        ("tiny_qwen2", "down_proj.weight", (0, 2)),
        ("tiny_qwen2", "embed_tokens", (1, 2)),
        ("tied", "parted", (0, 1)),
    ],
)
def test_one_tensor_that_is_off_is_found_and_no_other(
    fixture: str, change: str, shard: tuple[int, int], request: pytest.FixtureRequest, launcher: Launcher
) -> None:
    build: Callable[..., TinyModel] = request.getfixturevalue("tiny_qwen2" if fixture == "tied" else fixture)
    tiny = build(tie_word_embeddings=fixture == "tied", **SIZES)
    (right,) = launcher(compared, tiny, "", shard, strategy="single").values
    (wrong,) = launcher(compared, tiny, change, shard, strategy="single").values
    assert right == {}
    assert len(wrong) == 1
    ((name, off),) = wrong.items()
    assert ("lm_head.weight" if change == "parted" else change) in name
    assert off > 0.01
