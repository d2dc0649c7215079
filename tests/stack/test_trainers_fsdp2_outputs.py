"""What models return under FSDP2 in mixed precision: what they computed where a trainer is cured, rounded elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import TRAINS_FSDP2
from .fsdp_bodies import INSTALLED

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


# ---- what runs in the ranks


def outputs_of_dpo(model: tiny.TinyModel, bf16: bool = True) -> dict[str, Any]:
    """What policy and reference model return after a step of DPO: first with a cured trainer, then with TRL's own."""
    import trl

    from pytest_trlcompat.trainers import cured

    found: dict[str, Any] = {}
    for name, trainer_class in (("cured", cured(trl.DPOTrainer)), ("upstream", trl.DPOTrainer)):
        trainer = dpo(trainer_class, model, bf16)
        trainer.train()
        plugin = trainer.accelerator.state.fsdp_plugin
        found[name] = {
            "policy": share_of_rounded(trainer.model_wrapped, trainer),
            "reference": share_of_rounded(trainer.ref_model, trainer),
            "output_dtype": str(getattr(plugin.mixed_precision_policy, "output_dtype", None)),
            "cures": [
                (cure.active, cure.reason) for cure in getattr(trainer, "cures", ()) if cure.name == "FSDP2OutputsMixin"
            ],
        }
    return found


def dpo(trainer_class: Any, model: tiny.TinyModel, bf16: bool) -> Any:
    import tempfile

    import trl
    from datasets import Dataset

    rows = [{"prompt": f"w{n} w{n + 1}", "chosen": f"w{n + 2} w{n + 5}", "rejected": f"w{n + 3} w4"} for n in range(8)]
    return trainer_class(
        model=log_probabilities(model),
        ref_model=log_probabilities(model),
        args=trl.DPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            save_strategy="no",
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            bf16=bf16,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=model.tokenizer,
    )


def log_probabilities(model: tiny.TinyModel) -> Any:
    """The model, which returns log-probabilities in float32 as its logits."""
    whole = model.new_model()

    class Returning(type(whole)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.float().log_softmax(-1)
            return output

    whole.__class__ = Returning
    return whole


def share_of_rounded(module: Any, trainer: Any) -> float:
    """Of the numbers that a model returns, how many bfloat16 can hold."""
    import torch

    ids = torch.arange(3, 19, device=trainer.accelerator.device).reshape(2, 8)
    with torch.no_grad():
        logits = module(input_ids=ids).logits
    return (logits == logits.bfloat16()).float().mean().item()


# ---- the tests


def test_a_cured_trainers_models_return_what_they_compute_and_no_others_do(
    launch: Launcher, model: tiny.TinyModel
) -> None:
    if not TRAINS_FSDP2 or not stack.satisfied({"trl": ">=0.29"}, INSTALLED):
        pytest.skip("these releases of TRL and Transformers do not train under FSDP2")
    options = {"transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(outputs_of_dpo, model, strategy="fsdp2", options=options).values:
        assert max(rank["cured"]["policy"], rank["cured"]["reference"]) < 0.1
        assert rank["cured"]["cures"] == [(True, "Accelerate has FSDP2 round what models return")]
        # Of a trainer in the same process that is not cured nothing is changed. When these fail, it is needed no more.
        assert rank["upstream"]["policy"] == rank["upstream"]["reference"] == 1.0
        assert {rank[name]["output_dtype"] for name in ("cured", "upstream")} == {"torch.bfloat16"}


def test_nothing_is_changed_without_mixed_precision(launch: Launcher, model: tiny.TinyModel) -> None:
    if not TRAINS_FSDP2 or not stack.satisfied({"trl": ">=0.29"}, INSTALLED):
        pytest.skip("these releases of TRL and Transformers do not train under FSDP2")
    options = {"transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(outputs_of_dpo, model, bf16=False, strategy="fsdp2", options=options).values:
        assert rank["cured"]["cures"] == [(False, "FSDP2's policy rounds no outputs")]
        assert {name: rank[name]["output_dtype"] for name in rank} == {"cured": "None", "upstream": "None"}


def test_a_policy_is_taken_away_while_something_is_sharded() -> None:
    torch = pytest.importorskip("torch", minversion="2.6")
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    from pytest_trlcompat.trainers.fsdp.fsdp2_outputs import outputs_as_computed

    def meanwhile(policy: Any) -> Any:
        plugin = SimpleNamespace(mixed_precision_policy=policy)
        found = []

        def shard() -> None:
            with outputs_as_computed(plugin):
                found.append(plugin.mixed_precision_policy)
                raise KeyError

        with pytest.raises(KeyError):
            shard()
        assert plugin.mixed_precision_policy is policy
        return found[0]

    for low in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=low)
        assert meanwhile(policy) == MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for kept in (
        None,
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32),
    ):
        assert meanwhile(kept) is kept


def test_a_function_that_shards_otherwise_is_refused() -> None:
    from pytest_trlcompat.trainers.curing.errors import CureError
    from pytest_trlcompat.trainers.fsdp.fsdp2_outputs import _as_computed

    def fsdp2_prepare_model(model: Any, mesh: Any) -> Any:
        return model, mesh

    with pytest.raises(CureError, match="argument accelerator of .*fsdp2_prepare_model, but it was given model, mesh"):
        _as_computed(fsdp2_prepare_model)("model", mesh="mesh")
