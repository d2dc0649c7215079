"""The cure for synchronised reference models under FSDP1, and that it leaves everything else to TRL's callback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")


def mix(cured: bool, wrap_target_alike: bool) -> dict[str, float]:
    """How far the logits of a mixed model are from those of one that was mixed whole, and from what they were."""
    import copy

    import torch
    from accelerate import Accelerator
    from trl.trainer.callbacks import SyncRefModelCallback

    from pytest_trlcompat.trainers.fsdp_sync_ref_model import mix_parameters

    one, other = (tiny.qwen2(seed=seed, initializer_range=0.1) for seed in (0, 1))
    accelerator = Accelerator()
    plugin = accelerator.state.fsdp_plugin
    ids = torch.randint(3, one.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    whole, source = one.new_model(), other.new_model()
    with torch.no_grad():
        before = whole(input_ids=ids).logits
        wanted_model = copy.deepcopy(whole)
        SyncRefModelCallback._sync_target_model(source, wanted_model, 0.25)
        wanted = wanted_model(input_ids=ids).logits
        source = accelerator.prepare_model(source)
        if not wrap_target_alike:
            plugin.auto_wrap_policy = None
        target = accelerator.prepare_model(whole)
        ids = ids.to(accelerator.device)
        target(input_ids=ids)  # gathers the root's parameters, and keeps them
        if cured:
            mix_parameters(target, source, 0.25)
        else:
            SyncRefModelCallback._sync_target_model(accelerator.unwrap_model(source), target, 0.25)
        found = target(input_ids=ids).logits.cpu()
    return {"error": (found - wanted).abs().max().item(), "change": (wanted - before).abs().max().item()}


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        pytest.param({"sharding_strategy": "FULL_SHARD"}, True, id="full_shard"),
        pytest.param({"sharding_strategy": "SHARD_GRAD_OP"}, True, id="shard_grad_op"),
        pytest.param({"sharding_strategy": "FULL_SHARD", "use_orig_params": False}, True, id="flat-parameters"),
        pytest.param({"sharding_strategy": "FULL_SHARD"}, False, id="wrapped-otherwise"),
        pytest.param({"sharding_strategy": "NO_SHARD"}, True, id="no_shard"),
    ],
)
def test_a_mixed_model_computes_with_its_new_weights(launch: Launcher, options: dict[str, Any], alike: bool) -> None:
    options = {**options, "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    for rank in launch(mix, True, alike, strategy="fsdp1", options=options).values:
        assert rank["error"] <= 1e-6 < 0.05 < rank["change"]


def test_without_the_cure_it_does_not(launch: Launcher) -> None:
    """Fails when FSDP1 gathers anew: then the cure has gone stale."""
    options = {"sharding_strategy": "FULL_SHARD", "transformer_cls_to_wrap": "Qwen2DecoderLayer"}
    for rank in launch(mix, False, True, strategy="fsdp1", options=options).values:
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
