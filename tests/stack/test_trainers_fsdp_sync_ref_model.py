"""The cure for synchronised reference models under FSDP1, and that it leaves everything else to TRL's callback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")


def mix(cured: bool, axis: str) -> dict[str, Any]:
    """How far the logits of a mixed model are from those of one that was mixed whole, and from what they were.

    And how many bytes were gathered to mix, and the error if it was refused.
    """
    import copy

    import torch
    from accelerate import Accelerator
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from trl.trainer.callbacks import SyncRefModelCallback

    from pytest_trlcompat.trainers.curing.errors import CureError
    from pytest_trlcompat.trainers.fsdp.fsdp_sync_ref_model import FSDPSyncRefModelCallback, mix_parameters

    one, other = (tiny.qwen2(seed=seed, initializer_range=0.1) for seed in (0, 1))
    accelerator = Accelerator()
    plugin = accelerator.state.fsdp_plugin
    plugin.activation_checkpointing = axis == "checkpointing"
    ids = torch.randint(3, one.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    whole, source = one.new_model(), other.new_model()
    with torch.no_grad():
        before = whole(input_ids=ids).logits
        wanted_model = copy.deepcopy(whole)
        SyncRefModelCallback._sync_target_model(source, wanted_model, 0.25)
        wanted = wanted_model(input_ids=ids).logits
        source = accelerator.prepare_model(source)
        plugin.activation_checkpointing = False
        if axis in ("wrapped-otherwise", "begins-wrapped-otherwise"):
            plugin.auto_wrap_policy = None
        target = accelerator.prepare_model(whole)
        if axis == "compiled":
            source, target = (torch.compile(model, backend="eager") for model in (source, target))
        ids = ids.to(accelerator.device)
        target(input_ids=ids)  # gathers the root's parameters, and keeps them
        gathered: list[int] = []
        upstream = FlatParamHandle._all_gather_flat_param

        def all_gather(handle: Any, padded: torch.Tensor) -> Any:
            gathered.append(padded.numel() * padded.element_size())
            return upstream(handle, padded)

        FlatParamHandle._all_gather_flat_param = all_gather
        try:
            if axis == "begins-wrapped-otherwise":
                FSDPSyncRefModelCallback(target, accelerator).on_train_begin(None, None, None, model=source)
            elif cured:
                mix_parameters(target, source, 0.25)
            else:
                SyncRefModelCallback._sync_target_model(accelerator.unwrap_model(source), target, 0.25)
        except CureError as error:
            return {"refused": str(error)}
        finally:
            FlatParamHandle._all_gather_flat_param = upstream
        found = target(input_ids=ids).logits.cpu()
    return {
        "error": (found - wanted).abs().max().item(),
        "change": (wanted - before).abs().max().item(),
        "gathered": sum(gathered),
    }


@pytest.mark.parametrize(
    ("options", "axis"),
    [
        pytest.param({"sharding_strategy": "FULL_SHARD"}, "", id="full_shard"),
        pytest.param({"sharding_strategy": "SHARD_GRAD_OP"}, "", id="shard_grad_op"),
        pytest.param({"sharding_strategy": "FULL_SHARD", "use_orig_params": False}, "", id="flat-parameters"),
        pytest.param({"sharding_strategy": "NO_SHARD"}, "", id="no_shard"),
        pytest.param({"sharding_strategy": "FULL_SHARD", "offload_params": True}, "", id="offload"),
        pytest.param({"sharding_strategy": "FULL_SHARD"}, "checkpointing", id="activation-checkpointing"),
        pytest.param({"sharding_strategy": "FULL_SHARD"}, "compiled", id="compiled"),
    ],
)
def test_a_mixed_model_computes_with_its_new_weights(launch: Launcher, options: dict[str, Any], axis: str) -> None:
    options = {**options, "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    for rank in launch(mix, True, axis, strategy="fsdp1", options=options).values:
        assert rank["error"] <= 1e-6 < 0.05 < rank["change"]
        assert rank["gathered"] == 0


@pytest.mark.parametrize("axis", ["wrapped-otherwise", "begins-wrapped-otherwise"])
def test_models_that_are_wrapped_in_different_ways_are_refused(launch: Launcher, axis: str) -> None:
    options = {"sharding_strategy": "FULL_SHARD", "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    for rank in launch(mix, True, axis, strategy="fsdp1", options=options).values:
        assert "looked for the same FSDP1 unit 'at the root' in policy and reference model" in rank["refused"]
        assert "reference model: 27 parameters of 22816 elements" in rank["refused"]
        assert "policy: 3 parameters of 4128 elements" in rank["refused"]
        assert "leave it to the trainer to shard the reference model" in rank["refused"]


def test_without_the_cure_it_does_not(launch: Launcher) -> None:
    """Fails when FSDP1 gathers anew: then the cure has gone stale."""
    options = {"sharding_strategy": "FULL_SHARD", "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    for rank in launch(mix, False, "", strategy="fsdp1", options=options).values:
        assert rank["error"] > 0.05


def test_models_that_fsdp1_did_not_shard_are_left_to_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from trl.trainer.callbacks import SyncRefModelCallback

    from pytest_trlcompat.trainers import FSDPSyncRefModelCallback

    seen: list[Any] = []
    monkeypatch.setattr(SyncRefModelCallback, "on_step_end", lambda *args, **kwargs: seen.append(kwargs["model"]))
    model, ref_model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    accelerator: Any = SimpleNamespace(_models=[model])
    FSDPSyncRefModelCallback(ref_model, accelerator).on_step_end(None, None, None, model=model)
    FSDPSyncRefModelCallback(None, None).on_step_end(None, None, None, model=model)
    assert seen == [model, model]


@pytest.mark.parametrize("whole", ["policy", "reference model"])
def test_one_model_that_is_whole_is_refused_when_a_training_begins(monkeypatch: pytest.MonkeyPatch, whole: str) -> None:
    import torch

    from pytest_trlcompat.trainers import CureError, FSDPSyncRefModelCallback
    from pytest_trlcompat.trainers.fsdp import fsdp_sync_ref_model

    models = {"policy": torch.nn.Linear(1, 1), "reference model": torch.nn.Linear(1, 1)}
    monkeypatch.setattr(fsdp_sync_ref_model, "keeps_gathered_parameters", lambda model: model is not models[whole])
    models["policy"].module = torch.nn.Identity()  # as a wrapper has it
    accelerator: Any = SimpleNamespace(_models=[models["policy"]])
    callback = FSDPSyncRefModelCallback(models["reference model"], accelerator)
    with pytest.raises(CureError, match=f"but (.*, )?the {whole} is not"):
        callback.on_train_begin(None, None, None, model=models["policy"])


def test_only_the_callback_that_trl_made_is_exchanged() -> None:
    from trl.trainer.callbacks import SyncRefModelCallback

    from pytest_trlcompat.trainers import FSDPSyncRefModelCallback, FSDPSyncRefModelMixin

    class Own(SyncRefModelCallback):
        pass

    own, made, another = Own("own", None), SyncRefModelCallback("ref", "accelerator"), object()

    class Upstream:
        def __init__(self) -> None:
            self.callback_handler = SimpleNamespace(callbacks=[own, made, another])

    class Trainer(FSDPSyncRefModelMixin, Upstream):
        pass

    kept, exchanged, last = Trainer().callback_handler.callbacks
    assert (kept, last) == (own, another)
    assert type(exchanged) is FSDPSyncRefModelCallback
    assert (exchanged.ref_model, exchanged.accelerator) == ("ref", "accelerator")
