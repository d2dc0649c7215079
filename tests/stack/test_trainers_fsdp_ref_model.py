"""How a reference model is sharded under FSDP, by us or by TRL, and which models are spread over devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .fsdp_bodies import FSDP2, FULL_SHARD, INSTALLED, NO_SHARD, describe

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


def shard(model: tiny.TinyModel) -> dict[str, Any]:
    """A reference model in train mode that requires gradients, sharded; and how far its logits are from the whole's."""
    import torch
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp_ref_model import shard_reference_model

    accelerator = Accelerator()
    whole = model.new_model()
    ids = torch.randint(3, model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        sharded = shard_reference_model(model.new_model().train(), accelerator)
        found = sharded(input_ids=ids.to(accelerator.device)).logits
    trainer: Any = SimpleNamespace(ref_model=sharded, accelerator=accelerator)
    return {
        **describe(trainer),
        "counted": len(accelerator._models),
        "error": (found.cpu() - expected).abs().max().item(),
        "scale": expected.abs().max().item(),
    }


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*FULL_SHARD, id="full_shard"),
        pytest.param(*NO_SHARD, id="no_shard"),
        pytest.param(*FSDP2, id="fsdp2"),
    ],
)
def test_a_sharded_reference_model_computes_what_the_whole_one_does(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any]
) -> None:
    if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, INSTALLED):
        pytest.skip("this Accelerate has no FSDP2")
    options = {**options, "transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(shard, model, strategy=strategy, options=options).values:
        assert rank["sharded"]
        assert rank["on_own_device"]
        assert not rank["requires_grad"]
        assert not rank["training"]
        assert rank["counted"] == 0
        assert rank["error"] <= 1e-6 < 0.1 < rank["scale"]


def shard_without_fsdp() -> str:
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp_ref_model import shard_reference_model

    try:
        shard_reference_model(tiny.qwen2().new_model(), Accelerator())
    except ValueError as error:
        return str(error)
    return "no error"


def test_sharding_without_fsdp_is_refused(launch: Launcher) -> None:
    (message,) = launch(shard_without_fsdp, strategy="single").values
    assert "asked to shard a reference model by FSDP, but the accelerator uses" in message
    assert "configure FSDP" in message


@pytest.mark.parametrize(
    ("version", "upstream_knows_fsdp2", "efficient", "chosen"),
    [
        (1, False, False, "upstream"),
        (1, True, True, "upstream"),
        (2, False, False, "ours"),
        (2, True, False, "upstream"),
        (2, True, True, "ours"),
    ],
)
def test_upstream_prepares_the_reference_model_where_it_can(
    monkeypatch: pytest.MonkeyPatch, version: int, upstream_knows_fsdp2: bool, efficient: bool, chosen: str
) -> None:
    from accelerate.utils import DistributedType

    from pytest_trlcompat.trainers import fsdp_ref_model

    def knows_fsdp2(model: Any, accelerator: Any) -> Any:
        fully_shard: Any = lambda model: "upstream"  # noqa: E731 - a name in the code is what counts
        return SimpleNamespace(fully_shard=fully_shard).fully_shard(model)

    def knows_fsdp1(model: Any, accelerator: Any) -> Any:
        return "upstream"

    monkeypatch.setattr(fsdp_ref_model, "shard_reference_model", lambda model, accelerator: "ours")
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=efficient)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
    prepare_fsdp = fsdp_ref_model._prepare_fsdp_of_both_versions(knows_fsdp2 if upstream_knows_fsdp2 else knows_fsdp1)
    assert prepare_fsdp("model", accelerator) == chosen


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
    from pytest_trlcompat.trainers import device_map

    monkeypatch.setattr(device_map, "PartialState", lambda: SimpleNamespace(num_processes=processes))
    load = device_map._without_device_map(policy, lambda path, **kwargs: (path, kwargs))
    assert load("path", **keywords) == ("path", expected)
