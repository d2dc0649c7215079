"""The cure of how TRL hands weights to vLLM, without vLLM: what it hands over, and that the model stays as it is.

With the engine it is tested by ``suites/vllm``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel


def adapted(tiny: TinyModel, **settings: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    chosen = {"target_modules": ["q_proj", "down_proj"], **settings}
    config = LoraConfig(r=2, init_lora_weights=False, **chosen)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.path), config)


def hand_over(tiny: TinyModel, settings: dict[str, Any]) -> dict[str, Any]:
    """A single process: against what PEFT itself merges into the model for good."""
    import torch

    from pytest_trlcompat.trainers.vllm._vllm_weights import parameters_for_engine

    model = adapted(tiny, **settings)
    moved = ("modules_to_save", "trainable_tokens_delta", "lora_magnitude_vector")  # they begin without an effect
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f".{part}." in name for part in moved):
                parameter.add_(1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [(name, value.clone()) for name, value in parameters_for_engine(model, lambda parameters: nullcontext())]
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    truth = dict(model.merge_and_unload().named_parameters())
    return {
        "names": sorted(name for name, _ in found) == sorted(truth),
        "off": max(float((value - truth[name]).abs().max()) for name, value in found),
        "unchanged": unchanged,
        "adapter": max(float((truth[name] - frozen).abs().max()) for name, frozen in _frozen(before)),
    }


def _frozen(state: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name.removeprefix("base_model.model.").replace(".token_adapter.", ".").replace(".base_layer.", "."), tensor)
        for name, tensor in state.items()
        if ".base_layer." in name
    ]


TOKENS: dict[str, Any] = {"trainable_token_indices": [3, 4]}


def takes(tiny: TinyModel, setting: str) -> bool:
    import inspect

    from peft import LoraConfig

    return setting in inspect.signature(LoraConfig).parameters


@pytest.mark.parametrize(
    "settings",
    [{}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}, {"use_dora": True}, TOKENS],
    ids=["lora", "whole", "rslora", "dora", "tokens"],
)
def test_lora_is_merged_into_copies(
    settings: dict[str, Any], tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    if not all(launcher(takes, tiny_qwen2(), name, strategy="single").values[0] for name in settings):
        pytest.skip("this release of PEFT has no such adapter")
    (found,) = launcher(hand_over, tiny_qwen2(), settings, strategy="single").values
    assert found["names"]
    assert found["unchanged"]
    assert found["off"] <= (1e-6 if "use_dora" in settings else 1e-7) < 1e-3 < found["adapter"]


def refuse(tiny: TinyModel) -> dict[str, bool]:
    from pytest_trlcompat.trainers.vllm._vllm_weights import merges

    model = adapted(tiny)
    embeddings = adapted(tiny, target_modules=["q_proj", "embed_tokens"])
    return {"plain": merges(model), "embeddings": merges(embeddings), "none": merges(model.unload())}


def test_what_it_cannot_merge_is_left_to_trl(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> None:
    (found,) = launcher(refuse, tiny_qwen2(), strategy="single").values
    assert found == {"plain": True, "embeddings": False, "none": False}


def part(tiny: TinyModel) -> dict[str, bool]:
    from pytest_trlcompat.trainers.vllm._vllm_weights import is_untied

    settings: dict[str, dict[str, Any]] = {
        "none": {},
        "head": {"modules_to_save": ["lm_head"]},
        "embeddings": {"modules_to_save": ["embed_tokens"]},
        "lora": {"target_modules": ["q_proj", "embed_tokens"]},
        "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "tokens": TOKENS,
    }
    return {
        name: is_untied(adapted(tiny, **given))
        for name, given in settings.items()
        if all(takes(tiny, setting) for setting in given)
    }


@pytest.mark.parametrize("tied", [True, False])
def test_it_sees_where_an_adapter_parts_tied_embeddings(
    tied: bool, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    (found,) = launcher(part, tiny_qwen2(tie_word_embeddings=tied), strategy="single").values
    parted = ("head", "embeddings", "lora")
    assert found == {name: tied and name in parted for name in found}
    assert {"none", *parted} <= set(found)


def hand_over_sharded(tiny: TinyModel, with_adapter: bool) -> dict[str, Any]:
    """Wrapped by FSDP1 as Accelerate does it, each layer and the root: against the same model that is not wrapped."""
    import functools

    from accelerate import PartialState
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    from pytest_trlcompat.trainers.vllm._vllm_weights import parameters_of_fsdp1

    def build() -> Any:
        return adapted(tiny) if with_adapter else AutoModelForCausalLM.from_pretrained(tiny.path)

    whole = build()
    truth = dict((whole.merge_and_unload() if with_adapter else whole).named_parameters())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
    device = PartialState().device  # which begins the process group
    root = FullyShardedDataParallel(build(), auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    found = [(name, value.cpu().clone()) for name, value in parameters_of_fsdp1(root)]
    return {
        "names": sorted(name for name, _ in found) == sorted(truth),
        "off": max(float((value - truth[name]).abs().max()) for name, value in found),
    }


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
def test_under_fsdp1_the_roots_own_are_handed_over_and_lora_is_merged(
    with_adapter: bool, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    found = launcher(hand_over_sharded, tiny_qwen2(), with_adapter, strategy="fsdp1", sharded=False)
    for rank in found.values:
        assert rank["names"]
        assert rank["off"] <= 1e-7


class RecordingClient:
    """Stands for TRL's client of a vLLM server, or for an engine: takes what it is handed, and keeps copies."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.resets = 0

    def update_named_param(self, name: str, weight: Any) -> None:
        assert name not in self.weights, f"{name} twice"
        self.weights[name] = weight.detach().cpu().clone()

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.update_named_param(name, weight)

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def synchronise(tiny: TinyModel, lora: bool) -> dict[str, Any]:
    """TRL's own ``sync_weights`` with the cure, against what PEFT merges into the model for good."""
    import copy

    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from trl.generation.vllm_generation import VLLMGeneration

    from pytest_trlcompat.trainers.vllm.vllm_sync import VLLMSyncMixin

    accelerator = Accelerator()
    model = adapted(tiny) if lora else AutoModelForCausalLM.from_pretrained(tiny.path)
    plain = copy.deepcopy(model).merge_and_unload() if lora else model
    truth = {name: value.detach().clone() for name, value in plain.named_parameters()}
    trainer: Any = object.__new__(VLLMSyncMixin)
    generation: Any = object.__new__(VLLMGeneration)
    trainer.accelerator, trainer.vllm_generation = accelerator, generation
    trainer.model = model
    # FSDP2 is prepared beside an optimizer alone.
    trainer.model_wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    client = RecordingClient()
    generation.__dict__.update(model=model, accelerator=accelerator, mode="server", vllm_client=client)
    try:
        from trl.distributed import DistributedBackend

        generation._dist = DistributedBackend(accelerator)
    except ImportError:
        generation.is_fsdp_enabled = getattr(accelerator.state, "fsdp_plugin", None) is not None
    before = dict(vars(generation))
    trainer._synchronise(generation.sync_weights)
    assert vars(generation) == before
    return {
        "main": accelerator.is_main_process,
        "names": sorted(client.weights) == sorted(truth),
        "resets": client.resets,
        "off": max((float((value - truth[name]).abs().max()) for name, value in client.weights.items()), default=None),
    }


@pytest.mark.versions(trl=">=0.28,<1.11")
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2"])
def test_before_trl_1_11_its_own_method_hands_over_the_weights(
    strategy: str, lora: bool, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    for rank in launcher(synchronise, tiny_qwen2(), lora, strategy=strategy).values:
        if rank["main"]:
            assert rank["names"]
            assert rank["off"] <= 1e-7
            assert rank["resets"] == 1
        else:
            assert rank["off"] is None  # the main process alone talks to a server


def trainer_of(accelerator: Any, model: Any, client: RecordingClient, **attributes: Any) -> Any:
    """A corrected GRPO trainer, as far as handing weights over needs one."""
    import trl

    from pytest_trlcompat.trainers.vllm.vllm_sync import VLLMSyncMixin

    trainer: Any = object.__new__(type("Corrected", (VLLMSyncMixin, trl.GRPOTrainer), {}))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace()))
    engine.model_executor.driver_worker.model_runner = SimpleNamespace(model=client)
    trainer.__dict__.update(
        accelerator=accelerator,
        args=SimpleNamespace(use_vllm=True, report_to=[], ds3_gather_for_generation=True),
        is_fsdp_enabled=getattr(accelerator.state, "fsdp_plugin", None) is not None,
        llm=SimpleNamespace(llm_engine=engine, reset_prefix_cache=client.reset_prefix_cache),
        model=model,
        model_wrapped=model,
        vllm_client=client,
        vllm_mode="server",
        **attributes,
    )
    return trainer


def hand_over_itself(tiny: TinyModel, lora: bool) -> dict[str, Any]:
    """The method of TRL's trainer with the cure, against what PEFT merges into the model for good."""
    import copy

    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    accelerator, client = Accelerator(), RecordingClient()
    model = adapted(tiny) if lora else AutoModelForCausalLM.from_pretrained(tiny.path)
    plain = copy.deepcopy(model).merge_and_unload() if lora else model
    truth = {name: value.detach().clone() for name, value in plain.named_parameters()}
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    trainer = trainer_of(accelerator, wrapped if accelerator.distributed_type == "FSDP" else model, client)
    frozen = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    before = dict(vars(trainer))
    trainer._synchronise(trainer._move_model_to_vllm)
    assert vars(trainer) == before
    return {
        "main": accelerator.is_main_process,
        "is_walked": trainer._is_walked,
        "names": sorted(client.weights) == sorted(truth),
        "resets": client.resets,
        "off": max((float((value - truth[name]).abs().max()) for name, value in client.weights.items()), default=None),
        "unchanged": all(bool((value == frozen[name]).all()) for name, value in trainer.model.named_parameters()),
    }


@pytest.mark.versions(trl=">=0.15,<0.28")
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "fsdp1", pytest.param("fsdp2", marks=pytest.mark.versions(accelerate=">=1.6"))]
)
def test_before_trl_0_28_the_trainers_own_method_hands_over_the_weights(
    strategy: str, lora: bool, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    for rank in launcher(hand_over_itself, tiny_qwen2(), lora, strategy=strategy).values:
        assert rank["unchanged"]
        assert rank["is_walked"] is (lora or strategy.startswith("fsdp"))
        if rank["main"]:
            assert rank["names"]
            assert rank["off"] <= 1e-7
            assert rank["resets"] == 1
        else:
            assert rank["off"] is None  # the main process alone talks to a server


def refuse_itself(tiny: TinyModel, settings: dict[str, Any]) -> str:
    from accelerate import Accelerator

    from pytest_trlcompat.trainers import CureError

    trainer = trainer_of(Accelerator(), adapted(tiny, **settings), RecordingClient())
    try:
        trainer._check()
    except CureError as error:
        return str(error)
    return ""


@pytest.mark.versions(trl=">=0.15,<0.28")
@pytest.mark.parametrize("strategy", ["single", "fsdp1"])
def test_before_trl_0_28_no_plain_lora_is_refused_under_fsdp_alone(
    strategy: str, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    tiny = tiny_qwen2()
    for said in launcher(
        refuse_itself, tiny, {"target_modules": ["q_proj", "embed_tokens"]}, strategy=strategy, sharded=False
    ).values:
        assert ("looked for LoRA or DoRA of linear layers" in said) is (strategy == "fsdp1")
        assert ("without=['VLLMSyncMixin']" in said) is (strategy == "fsdp1")
    assert set(launcher(refuse_itself, tiny, {}, strategy=strategy, sharded=False).values) == {""}


class HandsOver:
    """A trainer of 0.15: its method does not reset the prefix cache."""

    def _move_model_to_vllm(self) -> None:
        raise AssertionError("not to be called")


@pytest.mark.parametrize("forgets", [True, False])
def test_a_prefix_cache_that_cannot_be_reset_is_refused(forgets: bool) -> None:
    from pytest_trlcompat.trainers import CureError
    from pytest_trlcompat.trainers.vllm.vllm_sync import VLLMSyncMixin

    trainer: Any = object.__new__(type("Corrected", (VLLMSyncMixin, HandsOver), {}))
    trainer.accelerator = SimpleNamespace(distributed_type="NO")
    trainer.model = SimpleNamespace()
    trainer.llm = SimpleNamespace(**({"reset_prefix_cache": print} if forgets else {}))
    if forgets:
        trainer._check()
    else:
        with pytest.raises(CureError, match=r"looked for LLM\.reset_prefix_cache of vLLM"):
            trainer._check()


def test_a_method_of_a_users_is_left_alone() -> None:
    import trl

    from pytest_trlcompat.trainers.vllm.vllm_sync import VLLMSyncMixin, _trainers_point

    mine = type("Mine", (trl.GRPOTrainer,), {"_move_model_to_vllm": lambda self: None})
    plain = type("Plain", (trl.GRPOTrainer,), {})
    for cls, found in ((mine, False), (plain, hasattr(trl.GRPOTrainer, "_move_model_to_vllm"))):
        trainer: Any = object.__new__(type("Corrected", (VLLMSyncMixin, cls), {}))
        trainer.args = SimpleNamespace(use_vllm=True)
        assert (_trainers_point(trainer) is not None) is found
        trainer.args = SimpleNamespace(use_vllm=False)
        assert _trainers_point(trainer) is None
