"""What the software accelerator shows is what a GPU shows: the same bodies on both, number by number.

Runs where there is an NVIDIA GPU and a CUDA build of torch, ``pytest -m gpu tests/stack``; one GPU is enough, so every
strategy has one rank here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import NAMES, Launcher
from tests.stack.launch_bodies import train_step
from tests.stack.test_accelerator_refusals import REFUSED, evaluate_all
from tests.stack.test_as_cuda import (
    ADAM_W,
    OFFLOAD,
    ask_deepspeed,
    attend,
    fused_adam,
    load_by_name,
    reduce_on_cpu,
    train_by_config,
)

pytestmark = pytest.mark.gpu

CUDA_ALLOWS: list[str] = []
"""What the software accelerator refuses and a GPU does not."""


@pytest.fixture(scope="session")
def cuda() -> Iterator[Launcher]:
    with Launcher(device="cuda", timeout=180) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def software() -> Iterator[Launcher]:
    with Launcher(device="software", timeout=180) as launcher:
        yield launcher


@pytest.mark.parametrize("strategy", NAMES)
def test_a_step_is_the_same_under_every_strategy(cuda: Launcher, software: Launcher, strategy: str) -> None:
    options = {"auto_wrap_policy": "NO_WRAP"} if strategy.startswith("fsdp") else {}
    gpu = cuda(train_step, strategy=strategy, world_size=1, options=options)
    ours = software(train_step, strategy=strategy, world_size=1, options=options)
    assert gpu.values[0]["device"].replace("cuda", "npu") == ours.values[0]["device"]
    assert gpu.values[0]["losses"] == pytest.approx(ours.values[0]["losses"], rel=1e-5)
    assert gpu.values[0]["losses"][0] - gpu.values[0]["losses"][-1] > 0.01


@pytest.mark.parametrize(
    ("command", "strategy"),
    [("accelerate", "ddp"), ("accelerate", "zero3"), ("torchrun", "fsdp2"), ("deepspeed", "zero2")],
)
def test_cold_launches_take_the_gpu(cuda: Launcher, command: str, strategy: str) -> None:
    options = {"auto_wrap_policy": "NO_WRAP"} if strategy.startswith("fsdp") else {}
    settings: dict[str, Any] = {"strategy": strategy, "world_size": 1, "options": options}
    cold = cuda(train_step, mode="cold", command=command, **settings).values[0]
    assert cold == cuda(train_step, **settings).values[0]


def test_cuda_is_seen_where_it_was_initialised(cuda: Launcher) -> None:
    def look() -> tuple[bool, bool, bool]:
        import torch

        from pytest_trlcompat import _devices

        before = _devices.cuda_initialized()
        there = torch.cuda.is_available()
        return before, there, _devices.cuda_initialized()

    assert cuda(look, strategy="single").values == [(False, True, True)]


def train_grpo(subject: str, model: tiny.TinyModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Logged numbers of three steps of GRPO on fixed completions, and the norm of each weight that comes of them."""
    import torch

    from suites.in_rank import grpo

    grpo.fix_completions(model.vocab_size)
    trainer = grpo.build_trainer(subject, model, **settings)
    trainer.train()

    def norm(weight: Any) -> float:
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return torch.linalg.vector_norm(whole.detach().float()).item()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = [name for name in ("loss", "grad_norm", "kl", "reward", "reward_std", "entropy") if name in logged[0]]
    return {
        "logged": {name: [float(entry[name]) for entry in logged] for name in names},
        "weights": {name: norm(weight) for name, weight in trainer.model.named_parameters()},
        "devices": sorted({str(weight.device) for weight in trainer.model.parameters()}),
    }


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("subject", ["upstream", "corrected"])
def test_grpo_trains_the_same(cuda: Launcher, software: Launcher, tmp_path: Path, subject: str, strategy: str) -> None:
    model = tiny.qwen2(directory=tmp_path)
    gpu, ours = (
        launch(train_grpo, subject, model, {}, strategy=strategy, world_size=1).values[0] for launch in (cuda, software)
    )
    assert (gpu["devices"], ours["devices"]) == (["cuda:0"], ["npu:0"])
    assert gpu["logged"].keys() == ours["logged"].keys()
    for name, values in gpu["logged"].items():
        assert values == pytest.approx(ours["logged"][name], rel=2e-4, abs=2e-5), name
    assert gpu["weights"] == pytest.approx(ours["weights"], rel=1e-4)


@pytest.mark.parametrize("strategy", NAMES)
def test_grpo_begins_alike_in_bf16(cuda: Launcher, software: Launcher, tmp_path: Path, strategy: str) -> None:
    """Kernels round differently, and a step of training makes more of it: by the third the KL was a fifth apart."""
    model = tiny.qwen2(directory=tmp_path)
    options = {"bf16": {"enabled": True}} if strategy.startswith("zero") else {}
    settings: dict[str, Any] = {"strategy": strategy, "world_size": 1, "options": options}
    gpu, ours = (
        launch(train_grpo, "corrected", model, {"bf16": True}, **settings).values[0]["logged"]
        for launch in (cuda, software)
    )
    assert gpu["grad_norm"][0] == pytest.approx(ours["grad_norm"][0], rel=0.01)
    assert gpu["kl"][1] == pytest.approx(ours["kl"][1], rel=0.2)
    assert gpu["reward"] == ours["reward"]
    exact = software(train_grpo, "corrected", model, {}, strategy=strategy, world_size=1).values[0]["logged"]
    assert gpu["grad_norm"][0] != exact["grad_norm"][0]  # it is bf16


def test_what_is_refused_between_devices_is_refused_by_cuda(cuda: Launcher, software: Launcher) -> None:
    """Nearly always in the same words; CUDA has texts of its own for a device that is not there."""
    there = {text: text.replace("npu", "cuda") for text in REFUSED if "npu:1" not in text}  # one GPU is enough
    theirs = cuda(evaluate_all, list(there.values()), "cuda", strategy="single").values[0]
    ours = software(evaluate_all, list(there), strategy="single").values[0]
    assert [text for text in there if theirs[there[text]].startswith("no error")] == CUDA_ALLOWS
    assert [text for text in there if ours[text].startswith("no error")] == []
    alike = {text for text in there if "same device" in theirs[there[text]] and "same device" in ours[text]}
    assert len(alike) > 40


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("fsdp1", {}),
        ("fsdp2", {}),
        ("fsdp1", {"offload_params": True}),
        ("fsdp2", {"offload_params": True}),
    ],
)
def test_backends_for_the_cpu(cuda: Launcher, software: Launcher, strategy: str, options: dict[str, Any]) -> None:
    gpu, ours = (
        launch(reduce_on_cpu, strategy=strategy, world_size=1, options=options, sharded=False).values[0]
        for launch in (cuda, software)
    )
    assert gpu[0].replace("cuda", "npu").replace("nccl", "hccl") == ours[0]
    assert list(gpu[1:]) == list(ours[1:])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize(("trainer", "settings"), [("SFT", {}), ("GRPO", {"beta": 0.1}), ("DPO", {})])
def test_models_are_loaded_by_name_alike(
    cuda: Launcher, software: Launcher, tmp_path: Path, strategy: str, trainer: str, settings: dict[str, Any]
) -> None:
    model = tiny.qwen2(directory=tmp_path)
    gpu, ours = (
        launch(
            load_by_name, trainer, model, str(tmp_path), settings, strategy=strategy, world_size=1, sharded=False
        ).values[0]
        for launch in (cuda, software)
    )
    as_ours = [
        (kind.replace("MULTI_GPU", "MULTI_NPU"), device_map, device.replace("cuda", "npu"))
        for kind, device_map, device in gpu["loaded"]
    ]
    assert as_ours == [tuple(entry) for entry in ours["loaded"]]
    assert ("error" in gpu) == ("error" in ours)
    if trainer != "GRPO" and "losses" in gpu:  # GRPO's samples differ
        assert gpu["losses"] == pytest.approx(ours["losses"], rel=1e-3)


def test_deepspeeds_accelerator_answers_alike(cuda: Launcher, software: Launcher) -> None:
    gpu, ours = (launch(ask_deepspeed, strategy="single").values[0] for launch in (cuda, software))
    assert [text.replace("cuda", "npu") for text in gpu["device"]] == ours["device"]
    assert {key: gpu[key] for key in ("norm", "overflow")} == {key: ours[key] for key in ("norm", "overflow")}


def test_attention_with_a_mask_of_numbers(cuda: Launcher) -> None:
    assert cuda(attend, "cuda", strategy="single").values[0] < 1e-6


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_deepspeeds_fused_adam(cuda: Launcher, software: Launcher, decoupled: bool) -> None:
    gpu = cuda(fused_adam, decoupled, "float32", "cuda", strategy="single", timeout=400).values[0]
    ours = software(fused_adam, decoupled, "float32", "npu", strategy="single").values[0]
    assert max(gpu) < 1e-6
    assert max(ours) < 1e-6


@pytest.mark.parametrize(("strategy", "options"), [("zero2", {}), ("zero3", {}), ("zero3", ADAM_W), ("zero2", OFFLOAD)])
def test_deepspeed_trains_the_same(
    cuda: Launcher, software: Launcher, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    model = tiny.qwen2(directory=tmp_path)
    gpu, ours = (
        launch(
            train_by_config, model, str(tmp_path), strategy=strategy, world_size=1, options=options, timeout=400
        ).values[0]
        for launch in (cuda, software)
    )
    assert gpu[0] == pytest.approx(ours[0], rel=1e-4)
    assert gpu[1] == pytest.approx(ours[1], rel=1e-3)
