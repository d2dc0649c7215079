"""PPO with adapters by the corrected trainer: what the reference is, and what is saved, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher
from suites.in_rank.ppo_adapters import REFERENCES, adapter_trainings

pytest.importorskip("trl")
pytest.importorskip("peft")

pytestmark = pytest.mark.skipif(
    not stack.satisfied({"trl": ">=0.13,<1.13"}, stack.installed()),
    reason="this release of TRL has no PPO with adapters",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.mistral(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


# ---- what runs in the ranks


def reference_is_another_adapter(model: tiny.TinyModel) -> list[float]:
    """The divergence at each step from an adapter that is a copy of the policy's own."""
    import copy

    import torch
    from peft import get_peft_model

    from pytest_trlcompat.conformance.ppo import objects as ppo

    torch.manual_seed(0)
    policy = get_peft_model(ppo.load_models(model).model, ppo.lora())
    policy.add_adapter("before", copy.deepcopy(policy.peft_config["default"]))
    state = policy.state_dict()
    policy.load_state_dict(
        {name.replace(".default.", ".before."): tensor for name, tensor in state.items() if ".default." in name},
        strict=False,
    )
    trainer = ppo.build_trainer(
        "corrected",
        model,
        arguments={"model": policy, "ref_model": None},
        model_adapter_name="default",
        ref_adapter_name="before",
    )
    trainer.train()
    return [entry["objective/kl"] for entry in ppo.logged(trainer)]


def what_the_wrapper_has(model: tiny.TinyModel) -> dict[str, Any]:
    from pytest_trlcompat.conformance.ppo import objects as ppo

    trainer = ppo.build_trainer("corrected", model, arguments={"peft_config": ppo.lora(), "ref_model": None})
    names = sorted(trainer.model.state_dict())
    with trainer.null_ref_context():
        lent = trainer.model.policy is trainer.model.module.policy
        same = sorted(trainer.model.state_dict()) == names
    try:
        with trainer.null_ref_context():
            raise KeyError("a user's error")
    except KeyError:
        kept = hasattr(trainer.model, "policy")
    return {"lent": lent, "same": same, "kept": kept}


# ---- what it must do


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_the_policy_without_its_adapter_is_as_good_as_a_copy(
    strategy: str, launch: Launcher, model: tiny.TinyModel
) -> None:
    copy, off = (
        launch(adapter_trainings, "corrected", model, [reference], strategy=strategy).values[0][reference]
        for reference in REFERENCES
    )
    assert len(off["log"]) == 2
    assert max(abs(entry["objective/kl"]) for entry in off["log"]) > 0.1
    for one, other in zip(off["log"], copy["log"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)  # of one number the variance is nan
    assert 0 < off["trained"] == off["saved"] == off["equal"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_a_head_that_learns_whole_is_saved_as_well(strategy: str, launch: Launcher, model: tiny.TinyModel) -> None:
    (off,) = REFERENCES[1:]
    ranks = launch(adapter_trainings, "corrected", model, [off], strategy=strategy, modules_to_save=["lm_head"])
    first = ranks.values[0][off]
    assert 13 == first["trained"] == first["saved"] == first["equal"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1"])
def test_another_adapter_may_be_the_reference(strategy: str, launch: Launcher, model: tiny.TinyModel) -> None:
    first, second = launch(reference_is_another_adapter, model, strategy=strategy).values[0]
    assert abs(first) < 1e-5 < abs(second)


def test_ddp_has_the_policy_only_while_it_is_the_reference(launch: Launcher, model: tiny.TinyModel) -> None:
    for rank in launch(what_the_wrapper_has, model, strategy="ddp").values:
        assert rank == {"lent": True, "same": True, "kept": False}
