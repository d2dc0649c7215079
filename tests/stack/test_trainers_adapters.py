"""The cures for adapters that are saved, resumed and generated with in several processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import TRAINS_FSDP2

pytest.importorskip("trl")
pytest.importorskip("peft")


def adapted() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny.qwen2(num_hidden_layers=2).new_model(), config)


def sharded(model: Any) -> Any:
    """The model as Accelerate shards it for training."""
    import torch
    from accelerate import Accelerator

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Accelerator().prepare(model, torch.optim.SGD(parameters, lr=0.1))[0]


# ---- saving


def names_under_fsdp1() -> dict[str, Any]:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    from pytest_trlcompat.trainers.fsdp.fsdp_adapter_save import keys_of_the_state_dict, names_of_the_state_dict

    model = sharded(adapted())
    wrapped = [name for name, _ in model.named_modules()]
    with names_of_the_state_dict(model):
        bare = [name for name, _ in model.named_modules()]
    with keys_of_the_state_dict(model):
        keys = sorted(model.state_dict())
    own = {"named_modules", "state_dict"} & set(vars(model))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        truth = sorted(model.state_dict())
    return {"wrapped": wrapped, "bare": bare, "keys": keys, "truth": truth, "own": own}


def test_modules_are_named_as_the_state_dict_names_them(launch: Launcher) -> None:
    for rank in launch(names_under_fsdp1, strategy="fsdp1").values:
        assert any("layers.0._fsdp_wrapped_module" in name for name in rank["wrapped"])
        assert [name for name in rank["bare"] if "_fsdp_wrapped_module" in name] == []
        assert len(rank["bare"]) == len(rank["wrapped"])
        prefix = "base_model.model.model.layers.1.self_attn.q_proj"
        assert f"{prefix}.lora_A.default" in rank["bare"]
        assert f"{prefix}.lora_A.default.weight" in rank["truth"]
        # Tied weights and buffers that are not saved may be there as well.
        assert set(rank["truth"]) - set(rank["keys"]) <= {"base_model.model.lm_head.weight"}
        assert rank["own"] == set()


def train_and_resume(model: tiny.TinyModel, folder: str) -> dict[str, Any]:
    """A plain Trainer with the cures in front: what it saves, and what another resumes from its first checkpoint."""
    import hashlib

    import peft
    import transformers.training_args
    from accelerate.utils import set_seed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from pytest_trlcompat.trainers import AdapterLoadingMixin, FSDPAdapterSaveMixin, ResumingMixin

    class Cured(ResumingMixin, AdapterLoadingMixin, FSDPAdapterSaveMixin, Trainer):
        pass

    # trl 0.17 and 0.18 append a field of their own configuration to Transformers' list, up to 4.50.3.
    fields = getattr(transformers.training_args, "_VALID_DICT_FIELDS", [])
    fields[:] = [name for name in fields if name in TrainingArguments.__dataclass_fields__]

    def build() -> Any:
        set_seed(0)
        rows = [{"input_ids": model.tokenizer(row["prompt"])["input_ids"]} for row in tiny.prompts(16, words=6)]
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
        return Cured(
            model=peft.get_peft_model(model.new_model(), config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=2,
                save_steps=1,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                report_to="none",
            ),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(model.tokenizer, mlm=False),
        )

    def digests(trainer: Any) -> dict[str, str]:
        with FullyShardedDataParallel.summon_full_params(trainer.model_wrapped, writeback=False):
            whole = {
                name.replace("_fsdp_wrapped_module.", "").replace(".default", "").replace("modules_to_save.", ""): value
                for name, value in trainer.model_wrapped.named_parameters()
                if value.requires_grad
            }
            return {
                name: hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
                for name, value in whole.items()
            }

    trainer = build()
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    again = build()
    before = {name: value.detach().clone() for name, value in again.model.named_parameters() if "lora_B" in name}
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert all(not value.any() for value in before.values())
    return {"trained": digests(trainer), "resumed": digests(again)}


def test_an_adapter_is_saved_and_resumed_under_fsdp1(launch: Launcher, tmp_path: Path) -> None:
    import hashlib

    from safetensors.torch import load_file

    ranks = launch(train_and_resume, tiny.qwen2(), str(tmp_path), strategy="fsdp1").values
    trained = ranks[0]["trained"]
    for name in ("saved", "checkpoint-2"):
        saved = {
            key: hashlib.sha256(value.numpy().tobytes()).hexdigest()
            for key, value in load_file(tmp_path / name / "adapter_model.safetensors").items()
        }
        assert saved == trained
    assert len(trained) == 2 * 2 + 5  # every norm of the two layers, and the last
    assert all(rank["resumed"] == rank["trained"] == trained for rank in ranks)


def test_nothing_is_renamed_without_fsdp1() -> None:
    from accelerate.utils import DistributedType

    from pytest_trlcompat.trainers import FSDPAdapterSaveMixin

    model = adapted()
    seen: list[set[str]] = []

    class Upstream:
        def __init__(self, kind: Any, version: int) -> None:
            self.model = model
            self.accelerator = SimpleNamespace(
                distributed_type=kind,
                state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version)),
                unwrap_model=lambda model: model,
                process_index=0,
            )

        def save_model(self, folder: str) -> None:
            seen.append({"named_modules", "state_dict"} & set(vars(model)))

        def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
            self.save_model(folder)

    class Mine(FSDPAdapterSaveMixin, Upstream):
        pass

    for kind, version in [(DistributedType.MULTI_NPU, 1), (DistributedType.FSDP, 2), (DistributedType.FSDP, 1)]:
        Mine(kind, version).save_model("folder")
        Mine(kind, version)._load_from_checkpoint("folder")
    assert seen == [set()] * 4 + [{"named_modules"}, {"named_modules", "state_dict"}]
    assert not {"named_modules", "state_dict"} & set(vars(model))


# ---- loading


@pytest.mark.parametrize(
    ("splits", "parallel", "replaced"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_peft_splits_nothing_that_it_cannot(
    splits: bool, parallel: bool, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft.utils import save_and_load

    from pytest_trlcompat.trainers.adapters import adapter_loading

    def split(model: Any, state_dict: Any, adapter_name: str) -> None:
        raise ImportError("cannot import name 'EmbeddingParallel'")

    name = adapter_loading.PEFT_SHARDING.name
    monkeypatch.setattr(save_and_load, name, split, raising=False)
    monkeypatch.setattr(adapter_loading, "_can_be_split", lambda: splits)
    model = adapted()
    if parallel:
        model.get_base_model().lm_head._hf_tp_plan = "colwise"

    def loaded() -> str:
        try:
            return str(getattr(save_and_load, name)(model, {}, "default"))
        except ImportError:
            return "split"

    with adapter_loading.without_tensor_parallelism(model), ThreadPoolExecutor(1) as other:
        found = [loaded(), other.submit(loaded).result()]
    # Another trainer, in another thread, loads as upstream does.
    assert [*found, loaded()] == ["None" if replaced else "split", "split", "split"]


def test_what_transformers_has_is_found() -> None:
    from pytest_trlcompat.trainers.adapters import adapter_loading

    has = stack.satisfied({"transformers": ">=5.1,<5.16,!=5.10.*"}, stack.installed())
    assert adapter_loading._can_be_split() == has


# ---- generating


def generate_under_fsdp2() -> dict[str, Any]:
    import torch

    from pytest_trlcompat.trainers.fsdp.fsdp_adapter_generation import gather_to_generate

    model = adapted()
    prompt = torch.tensor([[3, 4, 5, 6]])
    truth = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    model = sharded(model)
    device = next(model.parameters()).device
    for _ in range(2):
        gather_to_generate(model)
    found = model.generate(input_ids=prompt.to(device), max_new_tokens=5, do_sample=False)
    loss = model(input_ids=prompt.to(device), labels=prompt.to(device)).loss
    loss.backward()
    norm = sum(p.grad.full_tensor().double().pow(2).sum() for p in model.parameters() if p.grad is not None)
    return {"truth": truth.tolist(), "found": found.cpu().tolist(), "learns": bool(norm > 0)}


@pytest.mark.skipif(not TRAINS_FSDP2, reason="no FSDP2 before Transformers 4.51 and Accelerate 1.6")
def test_adapters_generate_under_fsdp2(launch: Launcher) -> None:
    for rank in launch(generate_under_fsdp2, strategy="fsdp2").values:
        assert rank["found"] == rank["truth"]
        assert rank["learns"]


def test_what_is_not_sharded_is_refused() -> None:
    from pytest_trlcompat.trainers.fsdp.fsdp_adapter_generation import gather_to_generate

    with pytest.raises(ValueError, match="FSDP2 has not sharded this PeftModelForCausalLM; call fully_shard first"):
        gather_to_generate(adapted())
