"""Where the teacher of a distillation is under FSDP, prepared as TRL prepares it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .fsdp_bodies import FSDP2, FULL_SHARD, INSTALLED

pytest.importorskip("trl")

DDP: tuple[str, dict[str, Any]] = ("ddp", {})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


def prepare(model: tiny.TinyModel, cured: bool, placed: bool) -> dict[str, Any]:
    """A trainer with a teacher whose weights rank 0 alone has.

    Args:
        placed: whether the trainer has placed it itself.
    """
    import os
    import tempfile

    import torch
    import transformers
    import trl

    from pytest_trlcompat import trainers

    class Distilling(transformers.Trainer):
        def __init__(self, teacher: Any, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.teacher_model = self.accelerator.prepare_model(teacher, evaluation_mode=True)
            if placed:
                self.teacher_model.to(self.accelerator.device)

    rank = int(os.environ["RANK"])
    truth = model.new_model()
    teacher = model.new_model().train()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.0 if rank == 0 else 0.0)
    arguments = trl.SFTConfig(tempfile.mkdtemp(), report_to="none", bf16=False)
    cls: Any = trainers.cured(Distilling) if cured else Distilling
    trainer = cls(teacher, model=model.new_model(), args=arguments)
    made = trainer.teacher_model
    device = trainer.accelerator.device
    ids = torch.randint(3, model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = truth(input_ids=ids).logits
        found = made(input_ids=ids.to(next(made.parameters()).device)).logits.cpu()
    cures = {cure.name: cure.active for cure in trainer.cures} if cured else {}
    return {
        "on_own_device": all(parameter.device.type == device.type for parameter in made.parameters()),
        "whole": all(
            parameter.shape == whole.shape and not hasattr(parameter, "full_tensor")
            for parameter, whole in zip(made.parameters(), truth.parameters(), strict=True)
        ),
        "requires_grad": any(parameter.requires_grad for parameter in made.parameters()),
        "training": made.training,
        "counted": sum(one is made for one in trainer.accelerator._models),
        "error": (found - expected).abs().max().item(),
        "scale": expected.abs().max().item(),
        "active": cures.get("FSDPTeacherMixin"),
    }


@pytest.mark.parametrize(
    ("strategy", "options", "whole"),
    [pytest.param(*FULL_SHARD, True, id="fsdp1"), pytest.param(*FSDP2, False, id="fsdp2")],
)
def test_a_teacher_is_on_its_rank_with_the_weights_of_rank_0(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any], whole: bool
) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.13"}, INSTALLED):
        pytest.skip(
            "Accelerate has no FSDP2 before 1.6, which then hands out weights on CUDA by its name; tried is 1.15"
        )
    options = {**options, "transformer_cls_to_wrap": model.decoder_layer, "cpu_ram_efficient_loading": True}
    for rank in launch(prepare, model, True, False, strategy=strategy, options=options, sharded=False).values:
        assert rank["active"]
        assert rank["on_own_device"]
        assert rank["whole"] == whole
        assert not rank["requires_grad"]
        assert not rank["training"]
        assert rank["counted"] == 0
        assert rank["error"] <= 1e-6 < 0.1 < rank["scale"]
    for rank in launch(prepare, model, False, False, strategy=strategy, options=options, sharded=False).values:
        assert not rank["on_own_device"], "nothing is to be cured"


@pytest.mark.parametrize(("strategy", "options"), [FULL_SHARD, DDP], ids=["fsdp1", "ddp"])
def test_one_that_somebody_has_placed_is_left_alone(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any]
) -> None:
    if options:
        options = {**options, "transformer_cls_to_wrap": model.decoder_layer}
    ranks = launch(prepare, model, True, True, strategy=strategy, options=options, sharded=False).values
    assert [rank["active"] for rank in ranks] == [False, False]
    assert [rank["error"] <= 1e-6 for rank in ranks] == [True, False]  # each rank has what it was given


def teach_itself(model: tiny.TinyModel, name: str) -> dict[str, Any]:
    """A trainer whose policy is its own teacher, as with ``teacher_model_kind="live"`` of TRL's self-distillation.

    Args:
        name: of the attribute that holds it.
    """
    import tempfile

    import transformers
    import trl

    from pytest_trlcompat import trainers

    class OwnTeacher(transformers.Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            setattr(self, name, self.model)

    arguments = trl.SFTConfig(tempfile.mkdtemp(), report_to="none", bf16=False)
    cls: Any = trainers.cured(OwnTeacher)
    trainer = cls(model=model.new_model(), args=arguments)
    cures = ("FSDPTeacherMixin", "FSDPReferenceModelMixin")
    return {
        "active": [cure.active for cure in trainer.cures if cure.name in cures],
        "same": getattr(trainer, name) is trainer.model,
        "requires_grad": all(parameter.requires_grad for parameter in trainer.model.parameters()),
        "devices": sorted({parameter.device.type for parameter in trainer.model.parameters()}),
    }


@pytest.mark.parametrize("name", ["teacher_model", "ref_model"])
@pytest.mark.parametrize(("strategy", "options"), [FULL_SHARD, FSDP2], ids=["fsdp1", "fsdp2"])
def test_a_policy_that_is_its_own_teacher_or_reference_is_left_alone(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any], name: str
) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, INSTALLED):
        pytest.skip("this Accelerate has no FSDP2")
    options = {**options, "transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(teach_itself, model, name, strategy=strategy, options=options, sharded=False).values:
        assert rank == {"active": [False, False], "same": True, "requires_grad": True, "devices": ["cpu"]}
