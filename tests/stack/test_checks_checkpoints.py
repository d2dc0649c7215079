"""Checkpoints of models that Transformers stores in another way than it has them live: nothing in them goes unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack

from .checks_bodies import INSTALLED, check_text
from .healthy_bodies import SIZES

pytest.importorskip("trl")

CONVERTS = stack.satisfied({"transformers": ">=5"}, INSTALLED)


def mixture(kind: str) -> Any:
    import transformers

    if kind == "qwen3":
        sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **sizes))
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    config = transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)
    return transformers.OlmoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "olmoe"])
def test_every_expert_in_a_checkpoint_is_looked_at(kind: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from pytest_trlcompat.checks import check_checkpoint

    if kind == "qwen3" and not stack.satisfied({"transformers": ">=4.51"}, INSTALLED):
        pytest.skip("needs Transformers 4.51")
    model = mixture(kind)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    right = {name: each.clone() for name, each in load_file(path).items()}  # the file is written anew
    elements = sum(each.numel() for each in model.parameters())
    found = check_checkpoint(tmp_path, model)
    assert (found["tensors"], found["bytes"]) == (len(right), 4 * elements)
    assert (len(right) > len(list(model.parameters()))) == CONVERTS

    def said(**changes: Any) -> str:
        save_file({name: each for name, each in {**right, **changes}.items() if each is not None}, path)
        return check_text(check_checkpoint, tmp_path, model)

    expert = sorted(name for name in right if "experts.3" in name)[-1]
    other = right[expert].clone()
    other[3, 5] += 0.5
    assert f"different: 1 ({expert} (by 0.5 at most))." in said(**{expert: other})
    assert f"different: 1 ({expert} (type torch.bfloat16 " in said(**{expert: right[expert].bfloat16()})
    assert f"missing: 1 ({expert})." in said(**{expert: None})
    assert "unexpected: 1 (surplus)." in said(surplus=torch.ones(1))
    assert f"empty: {len(right)} (" in said(**{name: torch.empty(0) for name in right})
    nothing = said(**dict.fromkeys(right))
    assert f"missing: {len(list(model.parameters()))} (" in nothing
    moved = {**dict.fromkeys(right), **{f"other.{name}": each for name, each in right.items()}}
    assert f"unexpected: {len(right)} (" in said(**moved)


@pytest.mark.skipif(not CONVERTS, reason="Transformers converts weights from 5.0 on")
def test_what_conversion_does_not_lead_to_is_named_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading
    from safetensors.torch import load_file, save_file

    from pytest_trlcompat.checks import OddError, check_checkpoint

    model = mixture("qwen3")
    model.save_pretrained(tmp_path)

    def fail(*_: Any) -> None:
        raise RuntimeError("not known")

    monkeypatch.setattr(loading, "revert_weight_conversion", fail)
    with pytest.raises(OddError) as caught:
        check_checkpoint(tmp_path, model)
    text = str(caught.value)
    assert "holds as many elements as the live model" in text
    assert "21 tensors were compared. Not compared: live 4 (model.layers.0.mlp.experts." in text
    assert "saved 24 (model.layers.0.mlp.experts.0.down_proj.weight, " in text
    path = tmp_path / "model.safetensors"
    right = load_file(path)
    right["model.layers.0.mlp.experts.0.down_proj.weight"] = right["model.layers.0.mlp.experts.0.down_proj.weight"][:1]
    save_file(right, path)
    assert "does not reload as the live model" in check_text(check_checkpoint, tmp_path, model)


@pytest.mark.skipif(not CONVERTS, reason="Transformers converts weights from 5.0 on")
def test_several_live_tensors_that_make_up_one_are_compared_together(tmp_path: Path) -> None:
    """Live q, k and v, stored as one. Transformers' own operations, and a mapping of our own."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.core_model_loading import Chunk, WeightConverter

    from pytest_trlcompat.checks import check_checkpoint

    model = mixture("olmoe")
    names = [f"self_attn.{each}_proj.weight" for each in ("k", "v")]
    model._weight_conversions = [WeightConverter("self_attn.kv.weight", names, operations=[Chunk(dim=0)])]
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    right = load_file(path)
    fused = "model.layers.1.self_attn.kv.weight"
    assert right[fused].shape == (32, 32)
    assert check_checkpoint(tmp_path, model)["tensors"] == len(right)
    save_file({**right, fused: right[fused] + 0.25 * (torch.arange(1024) == 900).reshape(32, 32)}, path)
    text = check_text(check_checkpoint, tmp_path, model)
    assert f"different: 1 ({fused} (by 0.25 at most))." in text
