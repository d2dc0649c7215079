"""How a reference model is sharded under FSDP, by us or by TRL, and which models are spread over devices."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import TRAINS_FSDP2
from .fsdp_bodies import FSDP2, FULL_SHARD, INSTALLED, NO_SHARD, describe

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


def shard(model: tiny.TinyModel, compiled: bool = False) -> dict[str, Any]:
    """A reference model in train mode that requires gradients, sharded; and how far its logits are from the whole's.

    Args:
        compiled: whether the accelerator compiles models, and this one was compiled while it was whole.
    """
    import torch
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import shard_reference_model

    accelerator = Accelerator(**({"dynamo_backend": "aot_eager"} if compiled else {}))
    whole = model.new_model()
    ids = torch.randint(3, model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        made = model.new_model().train()
        sharded = shard_reference_model(torch.compile(made, backend="aot_eager") if compiled else made, accelerator)
        found = sharded(input_ids=ids.to(accelerator.device)).logits
    trainer: Any = SimpleNamespace(ref_model=sharded, accelerator=accelerator)
    return {
        **describe(trainer),
        "counted": len(accelerator._models),
        "compiled": "_orig_mod" in sharded._modules,
        "error": (found.cpu() - expected).abs().max().item(),
        "scale": expected.abs().max().item(),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*FULL_SHARD, id="full_shard"),
        pytest.param(*NO_SHARD, id="no_shard"),
        pytest.param(*FSDP2, id="fsdp2"),
    ],
)
def test_a_sharded_reference_model_computes_what_the_whole_one_does(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any], compiled: bool
) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, INSTALLED):
        pytest.skip("this Accelerate has no FSDP2")
    options = {**options, "transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(shard, model, compiled, strategy=strategy, options=options).values:
        assert rank["compiled"] == compiled
        assert rank["sharded"]
        assert rank["on_own_device"]
        assert not rank["requires_grad"]
        assert not rank["training"]
        assert rank["counted"] == 0
        assert rank["error"] <= 1e-6 < 0.1 < rank["scale"]


def shard_without_fsdp() -> str:
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import shard_reference_model

    try:
        shard_reference_model(tiny.qwen2().new_model(), Accelerator())
    except ValueError as error:
        return str(error)
    return "no error"


def test_sharding_without_fsdp_is_refused(launch: Launcher) -> None:
    (message,) = launch(shard_without_fsdp, strategy="single").values
    assert "asked to shard a reference model by FSDP, but the accelerator uses" in message
    assert "configure FSDP" in message


def test_upstream_prepares_the_reference_model_under_fsdp1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType
    from torch import nn

    from pytest_trlcompat.trainers.fsdp import fsdp_ref_model

    monkeypatch.setattr(fsdp_ref_model, "shard_reference_model", lambda model, accelerator: "ours")
    prepare_fsdp = fsdp_ref_model._prepare_fsdp_of_both_versions(lambda model, accelerator: nn.Identity())
    made = {}
    for version in (1, 2):
        plugin = SimpleNamespace(fsdp_version=version)
        accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
        made[version] = prepare_fsdp(nn.Identity(), accelerator)
    assert isinstance(made[1], nn.Identity)
    assert made[2] == "ours"


# ---- what a rank holds of it


def dpo(model: tiny.TinyModel, prepared: bool, cure: bool = True, dtype: str = "float32", **settings: Any) -> Any:
    """A DPO trainer, with a reference model that TRL places or that its subclass has ``prepared`` for evaluation."""
    import os
    import tempfile

    import torch
    import trl
    from datasets import Dataset

    from pytest_trlcompat.trainers import cured

    class Project(trl.DPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if prepared:
                self.ref_model = self.accelerator.prepare_model(fresh(seed=1), evaluation_mode=True)

    def fresh(seed: int) -> Any:
        return dataclasses.replace(model, seed=seed).new_model().to(getattr(torch, dtype))

    rows = [{"prompt": f"w{n} w{n + 1}", "chosen": f"w{n + 2} w{n + 5}", "rejected": f"w{n + 3} w4"} for n in range(16)]
    return (cured(Project) if cure else Project)(
        model=model.new_model(),
        ref_model=fresh(seed=1),
        args=trl.DPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            max_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_checkpointing=False,
            **{"bf16": False, **settings},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=model.tokenizer,
    )


def train_dpo(model: tiny.TinyModel, prepared: bool) -> dict[str, Any]:
    """Losses, with a reference model that upstream shards or that it has only ``prepared`` for evaluation."""
    import trl.trainer.dpo_trainer as module

    if prepared:
        module.prepare_fsdp = lambda whole, accelerator: accelerator.prepare_model(whole, evaluation_mode=True)
    trainer = dpo(model, prepared=False)
    active = [cure.name for cure in trainer.cures if cure.active]
    trainer.train()
    logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": logs, "active": active, "class": type(trainer.ref_model).__name__}


def hold(model: tiny.TinyModel, prepared: bool, cure: bool) -> dict[str, Any]:
    """Bytes of a bf16 reference model of DPO that a rank holds: at rest, at once in a forward pass, and after it."""
    import torch

    trainer = dpo(model, prepared, cure, "bfloat16", bf16=True)
    reference, accelerator = trainer.ref_model, trainer.accelerator
    size = sum(parameter.numel() * 2 for parameter in model.new_model().parameters())
    memory = getattr(torch, accelerator.device.type)
    ids = torch.randint(3, model.vocab_size, (1, 2)).to(accelerator.device)
    with torch.no_grad():
        reference(input_ids=ids)  # what is made once
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        reference(input_ids=ids)
        after, peak = memory.memory_allocated(), memory.max_memory_allocated()
    stored = {str(parameter.dtype) for parameter in reference.parameters() if parameter.numel()}
    return {
        **describe(SimpleNamespace(ref_model=reference, accelerator=accelerator)),
        "counted": len(accelerator._models),
        "stored": sorted(stored),
        "size": size,
        "at rest": sum(p.numel() * p.element_size() for p in map(local, reference.parameters())),
        "peak": peak - before,
        "kept": after - before,
    }


def local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize("prepared", [False, True], ids=["prepare_fsdp", "evaluation_mode"])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_rank_gathers_a_layer_at_a_time_and_keeps_its_dtype(launch: Launcher, strategy: str, prepared: bool) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, INSTALLED):
        pytest.skip("this Accelerate has no FSDP2")
    deep = tiny.qwen2(num_hidden_layers=10, hidden_size=64, initializer_range=0.1)
    options = {"transformer_cls_to_wrap": deep.decoder_layer}
    options |= {"state_dict_type": "SHARDED_STATE_DICT"} if strategy == "fsdp2" else {}
    for rank in launch(hold, deep, prepared, True, strategy=strategy, options=options).values:
        assert rank["sharded"]
        assert rank["on_own_device"]
        assert not rank["requires_grad"]
        assert not rank["training"]
        assert rank["counted"] == 0
        assert rank["stored"] == ["torch.bfloat16"]
        assert rank["at rest"] <= 0.51 * rank["size"]
        assert rank["peak"] <= 0.5 * rank["size"], rank
        assert rank["kept"] <= 0.1 * rank["size"], rank


@pytest.mark.parametrize(
    ("strategy", "prepared"),
    [("fsdp1", False), ("fsdp1", True), ("fsdp2", False)],
    ids=["fsdp1", "fsdp1-evaluation_mode", "fsdp2"],
)
def test_dpo_trains_as_one_process_does(launch: Launcher, model: tiny.TinyModel, strategy: str, prepared: bool) -> None:
    if strategy == "fsdp2" and not TRAINS_FSDP2:
        pytest.skip("this Trainer cannot train under FSDP2")
    (single,) = launch(train_dpo, model, prepared, strategy="single").values
    assert "FSDPReferenceModelMixin" not in single["active"]
    options = {"transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(train_dpo, model, prepared, strategy=strategy, options=options).values:
        assert rank["losses"] == pytest.approx(single["losses"], rel=1e-4)
        assert "FSDPReferenceModelMixin" in rank["active"]
        assert rank["class"] == {"fsdp1": "FullyShardedDataParallel", "fsdp2": "FSDPQwen2ForCausalLM"}[strategy]


def test_without_the_cure_a_rank_gathers_all_of_it(launch: Launcher) -> None:
    """Fails when TRL shards it layer by layer: then the cure has gone stale."""
    if not stack.satisfied({"trl": ">=0.29", "accelerate": ">=1.6"}, INSTALLED):
        pytest.skip("upstream does not shard it at all")
    deep = tiny.qwen2(num_hidden_layers=10, hidden_size=64, initializer_range=0.1)
    for rank in launch(hold, deep, False, False, strategy="fsdp2", options=FSDP2[1]).values:
        assert rank["peak"] >= rank["size"]


ON_ONE_DEVICE = SimpleNamespace()
SPREAD = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": 1})


@pytest.mark.parametrize(
    ("processes", "policy", "keywords", "expected"),
    [
        (2, "a name", {}, {"device_map": None}),
        (2, ON_ONE_DEVICE, {}, {"device_map": None}),
        (2, ON_ONE_DEVICE, {"device_map": "auto"}, {"device_map": "auto"}),
        (1, ON_ONE_DEVICE, {}, {"device_map": None}),
        (1, SPREAD, {}, {}),
        (1, "a name", {}, {}),
    ],
)
def test_models_are_spread_over_devices_only_with_the_policy(
    monkeypatch: pytest.MonkeyPatch, processes: int, policy: Any, keywords: dict[str, Any], expected: dict[str, Any]
) -> None:
    from pytest_trlcompat.trainers.setup import device_map

    monkeypatch.setattr(device_map, "PartialState", lambda: SimpleNamespace(num_processes=processes))
    load = device_map._without_device_map(policy, lambda path, **kwargs: (path, kwargs))
    assert load("path", **keywords) == ("path", expected)


def test_a_trainers_own_module_is_reached_too() -> None:
    import trl

    from pytest_trlcompat.trainers import cured
    from pytest_trlcompat.trainers.curing import patch_points
    from pytest_trlcompat.trainers.curing.upstream import points_of
    from pytest_trlcompat.trainers.setup import device_map

    module = trl.DPOTrainer.__module__
    for point in (patch_points.PREPARE_FSDP, device_map.CREATE_MODEL):
        found = {one.module for one in points_of(cured(trl.DPOTrainer), point)}
        modules = {"trl.trainer.grpo_trainer", module}
        assert found == {name for name in modules if hasattr(sys.modules.get(name), point.name)}
    statuses = {cure.name: cure.active for cure in cured(trl.DPOTrainer).cures}
    assert statuses["FSDPReferenceModelMixin"] is None
    assert statuses["FSDPSyncRefModelMixin"] is None
    assert "FSDPGenerationMixin" not in statuses
