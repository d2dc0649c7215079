"""On the software accelerator, libraries go the way that they go on CUDA where an NPU would have one of its own.

Before the adaptations of ``torch_npu._as_cuda`` each of these failed, but where a test says that it holds as well.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import Launcher
from tests.stack.accelerator_bodies import run_python

# ---- Accelerate


def compare_distributed_type() -> dict[str, Any]:
    import copy
    import pickle

    from accelerate import PartialState
    from accelerate.utils import DistributedType

    kind = PartialState().distributed_type
    return {
        "as TRL asks": kind in ["MULTI_GPU", "DEEPSPEED"],
        "the text": (kind == "MULTI_GPU", kind != "MULTI_GPU"),
        "itself": (kind == "MULTI_NPU", kind == DistributedType.MULTI_NPU, str(kind)),
        "other members": (kind == DistributedType.MULTI_GPU, kind in [DistributedType.MULTI_GPU]),
        "other texts": (kind == "MULTI_XPU", kind in ["FSDP", "NO"]),
        "others": (DistributedType.MULTI_GPU == "MULTI_GPU", DistributedType.FSDP == "MULTI_GPU"),
        "copies": pickle.loads(pickle.dumps(kind)) is kind and copy.deepcopy(kind) is kind,
        "dictionary": {DistributedType.MULTI_NPU: 1}[kind],
    }


def test_several_npus_are_several_gpus_to_who_compares_with_the_bare_text(launch: Launcher) -> None:
    assert launch(compare_distributed_type, strategy="ddp", sharded=False).values[1] == {
        "as TRL asks": True,
        "the text": (True, False),
        "itself": (True, True, "DistributedType.MULTI_NPU"),
        "other members": (False, False),
        "other texts": (False, False),
        "others": (True, False),
        "copies": True,
        "dictionary": 1,
    }


def reduce_on_cpu() -> tuple[str, Any, float]:
    """Accelerate's backend; what comes of reducing a tensor on the CPU, and one on the device."""
    import torch
    from accelerate import PartialState

    state = PartialState()
    try:
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        on_cpu: Any = value.item()
    except RuntimeError as error:
        on_cpu = str(error)
    value = torch.ones(1, device=state.device)
    torch.distributed.all_reduce(value)
    return state.backend, on_cpu, value.item()


NO_BACKEND = ("hccl", "No backend type associated with device type cpu", 2.0)
BOTH_BACKENDS = ("npu:hccl,cpu:gloo", 2.0, 2.0)


@pytest.mark.parametrize(
    ("strategy", "options", "found"),
    [
        ("ddp", {}, NO_BACKEND),
        ("fsdp2", {}, NO_BACKEND),
        ("fsdp2", {"offload_params": True}, BOTH_BACKENDS),
        ("fsdp1", {}, BOTH_BACKENDS),  # FULL_STATE_DICT
    ],
)
@pytest.mark.versions(accelerate=">=1.9", reason="from 1.9.0 on for whole state dicts")
def test_fsdp_can_reduce_on_the_cpu_where_it_can_on_gpus(
    launch: Launcher, strategy: str, options: dict[str, Any], found: tuple[str, Any, float]
) -> None:
    assert launch(reduce_on_cpu, strategy=strategy, options=options, sharded=False).values == [found, found]


@pytest.mark.versions(accelerate="<1.7", reason="no release before 1.7.0 asks for a backend for the CPU")
def test_fsdp_cannot_reduce_on_the_cpu_where_it_cannot_on_gpus(launch: Launcher) -> None:
    for strategy in ("fsdp1", "fsdp2"):
        found = launch(reduce_on_cpu, strategy=strategy, options={"offload_params": True}, sharded=False).values
        assert found == [NO_BACKEND, NO_BACKEND]


def test_no_accelerator_has_to_be_made_under_fsdp(launch: Launcher) -> None:
    """Accelerate says FSDP from the Accelerator on. Before, it says what it says under DDP; on GPUs as well."""

    def kinds() -> tuple[str, str]:
        from accelerate import Accelerator, PartialState

        before = PartialState().distributed_type.value
        Accelerator()
        return before, PartialState().distributed_type.value

    def only_arguments(folder: str) -> str:
        import trl

        return trl.SFTConfig(folder, report_to="none", bf16=False).distributed_state.distributed_type.value

    assert launch(kinds, strategy="fsdp1", sharded=False).values[1] == ("MULTI_NPU", "FSDP")
    assert launch(only_arguments, ".", strategy="fsdp1", sharded=False).values[1] == "MULTI_NPU"


# ---- TRL


def load_by_name(trainer_name: str, model: tiny.TinyModel, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a trainer whose policy is given by name, and how TRL loaded its models.

    Returns:
        ``loaded``: distributed type, device map and device of each; ``losses`` of the steps, or ``error``.
    """
    import importlib

    import trl
    from accelerate import PartialState
    from datasets import Dataset

    module: Any = importlib.import_module(f"trl.trainer.{trainer_name.lower()}_trainer")
    create, loaded = module.create_model_from_path, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        kind = PartialState().distributed_type.value
        made = create(*args, **kwargs)
        loaded.append((kind, kwargs.get("device_map", "auto"), str(next(made.parameters()).device)))
        return made

    module.create_model_from_path = spy
    texts = tiny.prompts(16, words=6)["prompt"]
    rows = {
        "SFT": {"prompt": texts, "completion": texts},
        "DPO": {"prompt": texts, "chosen": texts, "rejected": texts[::-1]},
        "GRPO": {"prompt": texts},
    }[trainer_name]
    own: dict[str, Any] = {"learning_rate": 1e-2, "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    more: dict[str, Any] = {}
    if trainer_name == "GRPO":
        own |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(set(text))) for text in completions]
    args = {"output_dir": folder, "report_to": "none", "save_strategy": "no", "bf16": False, **own, **settings}
    try:
        trainer = getattr(trl, f"{trainer_name}Trainer")(
            model=str(model.path),
            args=getattr(trl, f"{trainer_name}Config")(**args),
            train_dataset=Dataset.from_dict(rows),
            processing_class=model.tokenizer,
            **more,
        )
        trainer.train()
    except (ValueError, RuntimeError) as error:  # its ranks fail apart, and the one with the reason is not the first
        return {"loaded": loaded, "error": str(error)}
    return {"loaded": loaded, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


NO_MAP = ("MULTI_NPU", None, "cpu")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize(("trainer", "settings"), [("SFT", {}), ("GRPO", {"beta": 0.0})])
@pytest.mark.versions(trl=">=0.28", reason="the releases that load a policy differently under MULTI_GPU")
def test_trl_loads_a_policy_by_name_without_a_device_map(
    launch: Launcher, tmp_path: Path, strategy: str, trainer: str, settings: dict[str, Any]
) -> None:
    model = tiny.qwen2(directory=tmp_path)
    for rank in launch(load_by_name, trainer, model, str(tmp_path), settings, strategy=strategy).values:
        assert rank["loaded"] == [NO_MAP]
        assert len(rank["losses"]) == 2
        assert all(math.isfinite(loss) for loss in rank["losses"])


@pytest.mark.parametrize("trainer", ["DPO", "GRPO"])
@pytest.mark.versions(trl=">=0.29", reason="the releases that load DPO's and GRPO's reference model so")
def test_trl_loads_a_reference_model_under_ddp_without_a_device_map(
    launch: Launcher, tmp_path: Path, trainer: str
) -> None:
    model = tiny.qwen2(directory=tmp_path)
    for rank in launch(load_by_name, trainer, model, str(tmp_path), {}, strategy="ddp").values:
        assert rank["loaded"] == [NO_MAP, NO_MAP]


@pytest.mark.parametrize("trainer", ["DPO", "GRPO"])
@pytest.mark.versions(trl=">=0.29,<=1.16.0", reason="the releases in which this was read and measured")
def test_trl_fails_under_fsdp1_with_its_own_reference_model_as_it_does_on_gpus(
    launch: Launcher, tmp_path: Path, trainer: str
) -> None:
    """Not a branch for NPUs: by then Accelerate says FSDP on every device, which is not in TRL's list. oumi 2673."""
    model = tiny.qwen2(directory=tmp_path)
    first, second = launch(
        load_by_name, trainer, model, str(tmp_path), {}, strategy="fsdp1", sharded=False, check=False
    ).values
    assert first["loaded"] == second["loaded"] == [NO_MAP, ("FSDP", "auto", "npu:0")]
    assert second["error"] == "Inconsistent compute device and `device_id` on rank 1: npu:0 vs npu:1"
    without = {"model_init_kwargs": {"device_map": None}}
    for rank in launch(load_by_name, trainer, model, str(tmp_path), without, strategy="fsdp1").values:
        assert rank["loaded"] == [NO_MAP, ("FSDP", None, "cpu")]
        assert all(math.isfinite(loss) for loss in rank["losses"])


# ---- Transformers


def attend(device: str = "npu") -> float:
    """How far Transformers' sdpa is from the formula, with a mask of numbers that are neither 0 nor the lowest."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 8, generator=generator).to(device) for _ in range(3))
    mask = torch.randn(1, 1, 4, 4, generator=generator).to(device)
    found, _ = sdpa_attention_forward(torch.nn.Module(), query, key, value, mask, is_causal=False)
    weights = (query @ key.transpose(-1, -2) / math.sqrt(8) + mask).softmax(-1)
    return (found.transpose(1, 2) - weights @ value).abs().max().item()


def test_sdpa_takes_masks_of_numbers_as_they_are(launch: Launcher) -> None:
    """Failed with Transformers 5, by 0.89."""
    assert launch(attend, strategy="single").values[0] < 1e-6


# ---- DeepSpeed


def ask_deepspeed() -> dict[str, Any]:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import cpu

    accelerator = get_accelerator()
    builders = [name for name in ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder") if hasattr(cpu, name)]
    return {
        "device": [repr(accelerator.device(1)), repr(accelerator.device())],
        "norm": accelerator.FloatTensor([2.0]).tolist(),
        "overflow": accelerator.ByteTensor([True]).dtype is torch.uint8,
        "host builders": {issubclass(accelerator.get_op_builder(name), getattr(cpu, name)) for name in builders},
        "unknown": accelerator.get_op_builder("TransformerBuilder").__name__,
    }


def test_deepspeeds_accelerator_answers_as_that_for_gpus_does(launch: Launcher) -> None:
    assert launch(ask_deepspeed, strategy="single").values[0] == {
        "device": ["device(type='npu', index=1)", "device(type='npu')"],
        "norm": [2.0],
        "overflow": True,
        "host builders": {True},
        "unknown": "NotImplementedBuilder",
    }


def fused_adam(decoupled: bool, dtype_name: str, device: str = "npu") -> list[float]:
    """The largest difference from torch's own Adam or AdamW after each of three steps."""
    import torch
    from deepspeed.ops.adam import FusedAdam

    start = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(device, getattr(torch, dtype_name))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    fused = FusedAdam([ours], adam_w_mode=decoupled, **settings)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **settings)
    differences = []
    for step in range(3):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(step + 1)).to(device)
        ours.grad, theirs.grad = gradient.to(ours.dtype), gradient.to(ours.dtype).float()
        fused.step()
        plain.step()
        differences.append((ours.float() - theirs).abs().max().item())
    return differences


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_deepspeeds_fused_adam_computes_as_torchs(launch: Launcher, decoupled: bool) -> None:
    """Before DeepSpeed 0.19.8 it needed an operator of an NPU's."""
    assert max(launch(fused_adam, decoupled, "float32", strategy="single").values[0]) < 1e-6
    # Numbers of about 1 are kept to 1/128; torch keeps its own in float32.
    assert max(launch(fused_adam, decoupled, "bfloat16", strategy="single").values[0]) < 0.05


def train_by_config(model: tiny.TinyModel, folder: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of three steps."""
    import transformers
    import trl
    from datasets import Dataset

    rows = [[(row * 7 + column) % 60 + 3 for column in range(12)] for row in range(16)]
    trainer = transformers.Trainer(
        model=model.new_model(),
        args=trl.SFTConfig(  # TrainingArguments themselves cannot be made beside old releases of TRL
            folder,
            per_device_train_batch_size=2,
            max_steps=3,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * 12] * 16}),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry["loss"] for entry in logged], [float(entry["grad_norm"]) for entry in logged]


ADAM_W = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("zero2", ADAM_W),
        ("zero3", ADAM_W),
        pytest.param("zero2", OFFLOAD, marks=pytest.mark.newest_stack),
        pytest.param("zero3", OFFLOAD, marks=pytest.mark.newest_stack),
    ],
)
def test_deepspeeds_own_optimizers_train_as_torchs_under_ddp(
    launch: Launcher, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    model = tiny.qwen2(directory=tmp_path)
    losses, norms = launch(train_by_config, model, str(tmp_path), strategy="ddp").values[0]
    # The optimizers on the host are compiled once per environment.
    found = launch(train_by_config, model, str(tmp_path), strategy=strategy, options=options, timeout=600).values[0]
    assert found[0] == pytest.approx(losses, abs=2e-6)
    assert found[1] == pytest.approx(norms, rel=2e-5)


# ---- the adaptations themselves


def test_adapted_modules_look_as_any_other() -> None:
    code = """
import sys
from pytest_trlcompat import accelerator
accelerator.activate(devices=1)
from torch_npu import _as_cuda
import importlib, inspect
absent = []
for name in _as_cuda.ADAPTATIONS:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # TRL has its client below extras from 0.16 to 0.27, and below generation from 0.28 on.
        assert error.name in ("trl.extras.vllm_client", "trl.generation", "triton", "liger_kernel"), error
        absent.append(name)
        continue
    assert type(module.__loader__).__name__ == "SourceFileLoader", module.__loader__
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module)
print(len(_as_cuda.ADAPTATIONS), *absent)
"""
    count, *absent = run_python(code).splitlines()[-1].split()
    of_triton = {"triton.runtime.interpreter", "triton.language.extra.libdevice"}
    of_vllm = {"trl.extras.vllm_client", "trl.generation.vllm_client", "trl.generation.vllm_generation"}
    assert int(count) == 13
    assert set(absent) <= {*of_vllm, *of_triton, "liger_kernel.utils", "liger_kernel.ops.utils"}


def test_what_was_imported_before_is_adapted_too() -> None:
    code = """
import accelerate
from accelerate.utils import DistributedType
print(DistributedType.MULTI_NPU == "MULTI_GPU")
from pytest_trlcompat import accelerator
accelerator.activate(devices=1)
print(DistributedType.MULTI_NPU == "MULTI_GPU")
"""
    assert run_python(code).splitlines()[-2:] == ["False", "True"]
