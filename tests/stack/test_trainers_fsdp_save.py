"""The cure for ``save_model`` that writes nothing under FSDP, and that checkpoints stay as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import TRAINS_FSDP2

pytest.importorskip("trl")


def train_and_save(cured: bool, model: tiny.TinyModel, folder: str) -> dict[str, Any]:
    """Two steps with a checkpoint after the first, resumed from it, then saved; and digests of the gathered policy."""
    import hashlib

    import transformers.training_args
    from accelerate.utils import set_seed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from pytest_trlcompat.trainers import FSDPSaveMixin

    class Cured(FSDPSaveMixin, Trainer):
        pass

    # trl 0.17 and 0.18 append a field of their own configuration to Transformers' list, up to 4.50.3.
    fields = getattr(transformers.training_args, "_VALID_DICT_FIELDS", [])
    fields[:] = [name for name in fields if name in TrainingArguments.__dataclass_fields__]

    def build(steps: int) -> Any:
        set_seed(0)
        rows = [{"input_ids": model.tokenizer(row["prompt"])["input_ids"]} for row in tiny.prompts(16, words=6)]
        return (Cured if cured else Trainer)(
            model=model.new_model(),
            args=TrainingArguments(
                output_dir=f"{folder}/run",
                max_steps=steps,
                save_steps=1,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                report_to="none",
            ),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(model.tokenizer, mlm=False),
        )

    build(1).train()
    trainer = build(2)
    trainer.train(resume_from_checkpoint=f"{folder}/run/checkpoint-1")
    trainer.save_model(f"{folder}/saved")
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            state = {name: p.detach().cpu().clone() for name, p in wrapped.named_parameters()}
    else:
        state = {name: p.full_tensor().detach().cpu() for name, p in wrapped.named_parameters()}
    checkpoint = {path.name for path in Path(f"{folder}/run/checkpoint-1").iterdir()}
    return {
        "digests": {
            name.replace("_fsdp_wrapped_module.", ""): hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for name, tensor in state.items()
        },
        "steps": trainer.state.global_step,
        "checkpoint": sorted(name for name in checkpoint if name.startswith(("model", "pytorch_model"))),
        "type": str(trainer.accelerator.state.fsdp_plugin.state_dict_type),
    }


def reload(folder: str) -> dict[str, str]:
    import hashlib

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


STRATEGIES = [
    pytest.param("fsdp1", id="fsdp1"),
    pytest.param(
        "fsdp2", id="fsdp2", marks=pytest.mark.skipif(not TRAINS_FSDP2, reason="this Trainer cannot train under FSDP2")
    ),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_model_is_the_policy_and_checkpoints_stay_sharded(
    launch: Launcher, tmp_path: Path, strategy: str
) -> None:
    options = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    result = launch(train_and_save, True, tiny.qwen2(), str(tmp_path), strategy=strategy, options=options)
    first = result.values[0]
    assert first["steps"] == 2
    assert first["checkpoint"] == ["pytorch_model_fsdp_0"]
    assert first["type"] == "StateDictType.SHARDED_STATE_DICT"
    (reloaded,) = launch(reload, str(tmp_path / "saved"), strategy="single").values
    assert reloaded == first["digests"]
    assert len(reloaded) > 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_the_cure_nothing_is_saved(launch: Launcher, tmp_path: Path, strategy: str) -> None:
    """Fails when the Trainer writes by itself: then the cure has gone stale."""
    options = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    launch(train_and_save, False, tiny.qwen2(), str(tmp_path), strategy=strategy, options=options)
    assert not list((tmp_path / "saved").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("output_dir", "internal", "seen"),
    [("folder", False, "FULL"), (None, True, "FULL"), ("folder", True, "SHARDED")],
    ids=["save_model", "push_to_hub", "checkpoint"],
)
def test_the_type_is_another_while_saving_only(output_dir: str | None, internal: bool, seen: str) -> None:
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import StateDictType

    from pytest_trlcompat.trainers import FSDPSaveMixin

    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT)
    types: list[Any] = []

    class Upstream:
        accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))

        def save_model(self, output_dir: str | None, _internal_call: bool) -> None:
            types.append((plugin.state_dict_type, output_dir, _internal_call))

    class Trainer(FSDPSaveMixin, Upstream):
        pass

    Trainer().save_model(output_dir, internal)
    assert types == [(StateDictType[f"{seen}_STATE_DICT"], output_dir, internal)]
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT


def test_a_users_save_model_is_given_what_it_was_given() -> None:
    from pytest_trlcompat.trainers import FSDPSaveMixin

    given: list[Any] = []

    class Tags:
        accelerator = SimpleNamespace(distributed_type="NO")

        def save_model(self, output_dir: str | None = None, tag: Any = None, **more: Any) -> None:
            given.append((output_dir, tag, more))

    class Plain:
        accelerator = SimpleNamespace(distributed_type="NO")

        def save_model(self, output_dir: str) -> None:
            given.append(output_dir)

    tags: Any = type("Trainer", (FSDPSaveMixin, Tags), {})()
    tags.save_model("d", tag="x")
    tags.save_model("d")
    tags.save_model("d", _internal_call=True)
    plain: Any = type("Trainer", (FSDPSaveMixin, Plain), {})()
    plain.save_model("d")
    assert given == [("d", "x", {}), ("d", None, {}), ("d", None, {"_internal_call": True}), "d"]


# ---- what is gathered, and where


def gather(cured: bool, strategy: str) -> dict[str, Any]:
    """A model's state dict by Accelerate, after a backward pass and an update; and the peak of accelerator memory."""
    from contextlib import nullcontext

    import torch
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp.fsdp_save import gathered_for_rank_0

    deep = tiny.qwen2(num_hidden_layers=10, hidden_size=64, tie_word_embeddings=True)
    accelerator, whole = Accelerator(), deep.new_model()
    expected = {name: tensor.detach() + 1 for name, tensor in whole.state_dict().items()}
    if strategy == "fsdp2":
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        model = fsdp2_prepare_model(accelerator, whole)
    else:
        model = accelerator.prepare_model(whole)
    memory = getattr(torch, accelerator.device.type)
    ids = torch.ones(1, 2, dtype=torch.long, device=accelerator.device)
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = None
            parameter.add_(1)
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    with gathered_for_rank_0() if cured else nullcontext():
        state = accelerator.get_state_dict(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    return {
        "tensors": len(state),
        "expected": len(expected),
        "right": sum(torch.equal(state[name].cpu(), tensor) for name, tensor in expected.items() if name in state),
        "devices": sorted({tensor.device.type for tensor in state.values()}),
        "tied": bool(state) and len({tensor.data_ptr() for tensor in state.values()}),
        "peak": (memory.max_memory_allocated() - before) / size,
    }


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_rank_0_alone_gets_right_tensors_one_at_a_time(launch: Launcher, strategy: str) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, stack.installed()):
        pytest.skip("this Accelerate has no FSDP2")
    options = {"transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    options |= {"state_dict_type": "SHARDED_STATE_DICT"} if strategy == "fsdp2" else {}
    first, second = launch(gather, True, strategy, strategy=strategy, options=options).values
    assert first["tensors"] == first["expected"] == 123
    assert first["right"] == 123
    assert first["devices"] == ["cpu"]
    assert second["tensors"] == 0
    if strategy == "fsdp2":
        for rank in (first, second):
            assert rank["peak"] <= 0.25


@pytest.mark.parametrize(("version", "unwraps"), [(1, False), (None, True)])
def test_fsdp1s_root_is_asked_also_where_accelerate_would_unwrap_it(version: int | None, unwraps: bool) -> None:
    """Accelerate 0.34.0 to 0.34.2 saves 120 of the 123 tensors above rightly; 0.33.0 and 1.0.0 save all."""
    from accelerate.utils import DistributedType

    from pytest_trlcompat.trainers.fsdp import fsdp_save

    told: list[bool] = []
    plugin = SimpleNamespace(fsdp_version=version)
    strategy = DistributedType.NO if version is None else DistributedType.FSDP
    accelerator = SimpleNamespace(distributed_type=strategy, state=SimpleNamespace(fsdp_plugin=plugin))
    fsdp_save._right(lambda self, model, unwrap: told.append(unwrap))(accelerator, "model")
    assert told == [unwraps]
