"""Checkpoints of adapters: every kind that PEFT has, under any name and beside another, as PEFT itself saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from .checks_bodies import check_text, watch
from .healthy_bodies import SIZES, arguments, language_model, rows

pytest.importorskip("trl")
pytest.importorskip("peft")

LAYERS = {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"num_virtual_tokens": 4}
KINDS: dict[str, dict[str, Any] | str] = {
    **dict.fromkeys(("BEFT", "BOFT", "DEFT", "DELORA", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3"), LAYERS),
    **dict.fromkeys(("LILY", "LN_TUNING", "LOHA", "LOKR", "LORA", "OSF", "PEANUT", "POLY", "PVERA"), LAYERS),
    **dict.fromkeys(("RANDLORA", "SHADOW", "SUPERTUNING", "TINYLORA", "UNILORA", "VERA"), LAYERS),
    "ADALORA": {**LAYERS, "total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAMSS": "needs scikit-learn",
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "BONE": {**LAYERS, "r": 4},
    "C3A": {**LAYERS, "block_size": 16},
    "CARTRIDGE": {**PROMPT, "num_frozen_tokens": 1},
    "CPT": {},
    "FOURIERFT": {**LAYERS, "n_frequency": 16},
    "MISS": {**LAYERS, "r": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2},
    "OFT": {**LAYERS, "oft_block_size": 8, "r": 0},
    "PREFIX_TUNING": {**PROMPT, "prefix_projection": True, "encoder_hidden_size": 8},
    "PROMPT_TUNING": PROMPT,
    "PSOFT": {**LAYERS, "r": 4},
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 8},
    "ROAD": {**LAYERS, "group_size": 8},
    "SHIRA": {**LAYERS, "r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 5]},
    "VBLORA": {**LAYERS, "vector_length": 16, "num_vectors": 8, "topk": 2, "save_only_topk_weights": True},
    "WAVEFT": {**LAYERS, "n_frequency": 16},
    "XLORA": "is made of adapters that others have trained",
}
"""Settings of each kind for a tiny model, or why it is left out."""


def installed_kinds() -> dict[str, Any]:
    from peft import mapping

    return {str(getattr(kind, "value", kind)): made for kind, made in mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def adapted(kind: str, name: str = "default", **settings: Any) -> Any:
    """A tiny model with an adapter whose tensors are not those that it begins with."""
    import torch
    import transformers
    from peft import get_peft_model

    model = language_model("dense")
    if kind == "ADAPTION_PROMPT":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    made = KINDS[kind]
    assert isinstance(made, dict)
    config = installed_kinds()[kind](task_type="CAUSAL_LM", **{**made, **settings})
    model = get_peft_model(model, config, adapter_name=name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("adapter_model.safetensors"))


def spoiled(path: Path, change: Any) -> str:
    """Change the last tensor in a file, by its name; returns that."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    key = sorted(tensors)[-1]
    save_file({**tensors, key: change(tensors[key])}, path)
    return key


def test_no_kind_of_adapter_is_forgotten() -> None:
    assert sorted(set(installed_kinds()) - set(KINDS)) == []


@pytest.mark.parametrize("name", ["default", "policy"])
@pytest.mark.parametrize("kind", [kind for kind, settings in KINDS.items() if isinstance(settings, dict)])
def test_every_kind_of_adapter_is_compared_as_it_is_saved(kind: str, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from pytest_trlcompat.checks import check_checkpoint

    if kind not in installed_kinds():
        pytest.skip("this PEFT does not have it")
    model = adapted(kind, name)
    model.save_pretrained(tmp_path)
    (path,) = files(tmp_path)
    assert path.parent == (tmp_path if name == "default" else tmp_path / name)
    found = check_checkpoint(tmp_path, model)
    assert found["tensors"] == len(load_file(path)) > 0
    key = spoiled(path, lambda tensor: tensor.new_empty(0))
    assert f"empty: 1 ({key} (0,) instead of" in check_text(check_checkpoint, tmp_path, model)
    model.save_pretrained(tmp_path)
    key = spoiled(path, lambda tensor: tensor + 1)
    assert f"different: 1 ({key} (by " in check_text(check_checkpoint, tmp_path, model)


def test_an_adapter_with_fewer_ranks_than_it_began_with_is_compared(tmp_path: Path) -> None:
    """AdaLoRA gives ranks up as it trains, and saves what is left."""
    import torch
    from safetensors.torch import load_file

    from pytest_trlcompat.checks import check_checkpoint

    model = adapted("ADALORA", init_r=4, target_r=2, deltaT=1)
    ids = torch.arange(3, 15)[None]
    for step in range(1, 10):
        model(input_ids=ids, labels=ids).loss.backward()
        model.base_model.update_and_allocate(step)
    assert model.peft_config["default"].rank_pattern is not None
    model.save_pretrained(tmp_path)
    (path,) = files(tmp_path)
    shapes = {tuple(each.shape) for each in load_file(path).values()}
    assert min(min(shape) for shape in shapes) < 4
    assert check_checkpoint(tmp_path, model)["tensors"] == 12
    key = spoiled(path, lambda tensor: tensor + 1)
    assert f"different: 1 ({key} (by 1 at most))" in check_text(check_checkpoint, tmp_path, model)


@pytest.mark.parametrize("names", [("learner", "reference"), ("default", "ref"), ("policy", "policy2")])
def test_adapters_beside_each_other_are_each_compared_in_their_folder(names: tuple[str, str], tmp_path: Path) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    from pytest_trlcompat.checks import check_checkpoint

    model = adapted("LORA", names[0])
    model.add_adapter(names[1], model.peft_config[names[0]])
    for name, parameter in model.named_parameters():
        if f".{names[1]}." in name:
            torch.nn.init.normal_(parameter)
    model.set_adapter(names[0])
    model.save_pretrained(tmp_path)
    folders = [tmp_path if name == "default" else tmp_path / name for name in names]
    counts = [len(load_file(folder / "adapter_model.safetensors")) for folder in folders]
    assert check_checkpoint(tmp_path, model)["tensors"] == sum(counts) >= 16  # PEFT 0.15 saves policy2 as policy, too
    for folder in folders:
        key = spoiled(folder / "adapter_model.safetensors", lambda tensor: tensor.new_empty(0))
        text = check_text(check_checkpoint, tmp_path, model)
        assert f"{folder / 'adapter_model.safetensors'} does not reload as the live model" in text
        assert f"empty: 1 ({key} (0,) instead of (16, 8))" in text
        model.save_pretrained(tmp_path)
    shutil.rmtree(folders[1])  # nothing of it trains
    assert check_checkpoint(tmp_path, model)["tensors"] == counts[0]
    model.save_pretrained(tmp_path)
    (folders[0] / "adapter_model.safetensors").unlink()
    text = check_text(check_checkpoint, tmp_path, model)
    assert f"expected saved weights in {folders[0]}, but it contains none that can be loaded as a whole" in text


def test_an_adapter_that_was_injected_is_compared(tmp_path: Path) -> None:
    """Transformers saves the active adapter in the folder itself, whatever it is called."""
    import torch
    from peft import LoraConfig

    from pytest_trlcompat.checks import check_checkpoint

    model = language_model("dense")
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="policy")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.01)
    model.save_pretrained(tmp_path)
    (path,) = files(tmp_path)
    assert path.parent == tmp_path
    assert check_checkpoint(tmp_path, model)["tensors"] == 8
    key = spoiled(path, lambda tensor: tensor.new_empty(0))
    assert f"empty: 1 ({key} (0,) instead of (16, 4))" in check_text(check_checkpoint, tmp_path, model)


def save_elsewhere(folder: str) -> Any:
    """A trainer whose checkpoints go to a folder of the user's choice."""
    import transformers

    class Elsewhere(transformers.Trainer):
        def _save_checkpoint(self, *_: Any, **__: Any) -> None:
            self.save_model(f"{folder}/mine/{self.state.global_step}")

    args = arguments(transformers.TrainingArguments, folder, {"max_steps": 2, "save_steps": 2})
    trainer = Elsewhere(model=language_model("dense"), args=args, train_dataset=rows())
    return watch(trainer, checks=["checkpoint"])


def test_a_checkpoint_that_is_saved_elsewhere_ends_no_training(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = launcher(save_elsewhere, str(tmp_path), strategy="single").values
    assert (tmp_path / "mine" / "2" / "model.safetensors").is_file()
    ((check, step, kind, text),) = rank["said"]
    assert (check, step, kind) == ("checkpoint", 2, "odd")
    assert text.startswith(
        f"expected a checkpoint in {tmp_path / 'checkpoint-2'}, but there is no such folder: what was"
    )
