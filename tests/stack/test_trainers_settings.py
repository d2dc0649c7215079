"""The cures of what precision, offloading and checkpointing meet: without one of them a training ends in an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.training.aliases import accepted

pytest.importorskip("trl")

INSTALLED = stack.installed()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    found = tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)
    assert found.path.is_dir()
    return found


# ---- what runs in the ranks


def train(model: tiny.TinyModel, without: str, adapter: bool, dtype: str, **settings: Any) -> dict[str, Any]:
    """Two steps of GRPO with all cures but one: losses, or what it ended in."""
    import tempfile

    import torch
    import trl
    from transformers import AutoModelForCausalLM

    from pytest_trlcompat.trainers import cured

    values = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.1,
        "bf16": False,
        "gradient_checkpointing": False,
        **settings,
    }
    more: dict[str, Any] = {}
    if adapter:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    policy = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager")
    trainer = cured(trl.GRPOTrainer, without=[without] if without else [])(
        model=policy.to(getattr(torch, dtype)),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(**accepted(trl.GRPOConfig, values)),
        train_dataset=tiny.prompts(16, words=(2, 5)),
        processing_class=model.tokenizer,
        **more,
    )
    active = [cure.name for cure in trainer.cures if cure.active]
    try:
        trainer.train()
    except RuntimeError as error:
        return {"failure": str(error), "active": active}
    return {"failure": "", "active": active, "steps": trainer.state.global_step}


# ---- the tests


@dataclass(frozen=True)
class Case:
    """A cure, its issue, and a training that needs it."""

    mixin: str
    issue: str
    strategy: str
    words: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False
    dtype: str = "float32"


CASES = [
    Case(
        *("DDPAdapterCheckpointingMixin", "lora-ddp-checkpointing", "ddp", "mark a variable ready only once"),
        settings={"gradient_checkpointing": True},
        adapter=True,
    ),
    Case(
        *("FSDPCheckpointedCacheMixin", "fsdp-checkpointed-cache", "fsdp1", "must match the size of tensor b"),
        options={"activation_checkpointing": True},
    ),
    Case(
        *("ZeRO3MixedDtypesMixin", "deepspeed-mixed-dtypes", "zero3", "invalid tensor type"),
        adapter=True,
        dtype="bfloat16",
    ),
    Case(
        *("FSDPOffloadGenerationMixin", "grpo-fsdp2-offload-generation", "fsdp2", "got index is on cpu"),
        options={"offload_params": True},
    ),
    Case(
        *("FSDPGenerationMixin", "lora-fsdp-bf16-generation", "fsdp1", "must have the same dtype|must be 2-D"),
        settings={"bf16": True},
        adapter=True,
    ),
    Case(
        *("ZeRO3FusedHeadMixin", "grpo-zero3-no-gather", "zero3", "must match the size of tensor b"),
        settings={"ds3_gather_for_generation": False},
    ),
]
ALREADY_NEEDED = (Verdict.BROKEN, Verdict.BLOCKED)


@pytest.mark.parametrize("case", CASES, ids=[case.issue for case in CASES])
def test_one_cure_makes_it_train(launch: Launcher, model: tiny.TinyModel, case: Case) -> None:
    issue = known_issues.load()[case.issue]
    (label,) = issue.strategies
    predicted = issue.predict("upstream", label, INSTALLED)
    if predicted is None or predicted.verdict not in ALREADY_NEEDED:
        pytest.skip("these releases need no cure")
    options = {**case.options, **({"transformer_cls_to_wrap": model.decoder_layer} if "fsdp" in case.strategy else {})}
    for without in ("", case.mixin):
        found = launch(
            *(train, model, without, case.adapter, case.dtype),
            **case.settings,
            strategy=case.strategy,
            options=options,
            sharded=False,  # it fails before anything is wrapped
        ).values
        if without:
            assert any(re.search(case.words, rank["failure"]) for rank in found), found
            assert all(rank["failure"] for rank in found)
        else:
            assert [(rank["failure"], rank["steps"]) for rank in found] == [("", 2)] * 2
            assert all(case.mixin in rank["active"] for rank in found)


def naive(logits: Any, index: Any, temperature: float = 1.0, row_mask: Any = None) -> Any:
    """As TRL has it."""
    found = (logits / temperature).log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


def test_log_probabilities_are_those_of_float32_and_only_logits_are_kept_for_them() -> None:
    import torch

    from pytest_trlcompat.trainers.logprobs.float32_logprobs import in_float32

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 512, generator=generator).bfloat16().requires_grad_()
    index, mask = torch.randint(512, (3, 7), generator=generator), torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0] * 7])
    exact = logits.detach().float().requires_grad_()
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = in_float32(naive)(logits, index, temperature=0.7, row_mask=mask)
    wanted = naive(exact, index, 0.7, mask)
    assert found.dtype is torch.float32
    assert torch.equal(found, wanted)
    assert (naive(logits, index, 0.7, mask).float() - wanted).abs().max() > 1e-3  # what is cured
    for each in (found, wanted):
        (each * each).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert (logits.grad.float() - exact.grad).abs().max() <= 2**-8 * exact.grad.abs().max()
    assert sum(kept) <= 1.1 * logits.numel() * logits.element_size()


def test_logits_in_float32_are_given_to_trl_as_they_are() -> None:
    import torch

    from pytest_trlcompat.trainers.logprobs.float32_logprobs import in_float32

    given: list[Any] = []

    def selective_log_softmax(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return "TRL's"

    logits, index = torch.zeros(3, 7, 16), torch.zeros(3, 7, dtype=torch.long)
    assert in_float32(selective_log_softmax)(logits, index, temperature=2.0) == "TRL's"
    ((args, kwargs),) = given
    assert args[0] is logits
    assert args[1] is index
    assert kwargs == {"temperature": 2.0}


def test_a_training_forward_pass_fills_no_cache_and_others_do(model: tiny.TinyModel) -> None:
    import torch

    from pytest_trlcompat.trainers.fsdp.fsdp_checkpointed_cache import _without_cache

    whole = model.new_model()
    whole.register_forward_pre_hook(_without_cache, with_kwargs=True)
    ids = torch.tensor([[3, 4, 5]])
    assert whole(input_ids=ids).past_key_values is None
    assert whole(input_ids=ids, use_cache=True).past_key_values is not None
    with torch.no_grad():
        assert whole(input_ids=ids).past_key_values is not None


def test_inputs_are_moved_while_it_lasts() -> None:
    import torch
    from torch import nn

    from pytest_trlcompat.trainers.fsdp.fsdp_offload_generation import inputs_moved

    class Model(nn.Module):
        def prepare_inputs_for_generation(self) -> None: ...

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, more: dict[str, Any]) -> list[str]:
            return [each.device.type for each in (ids, mask, more["positions"])]

    model, on_host = nn.Sequential(Model()), torch.zeros(1)
    with inputs_moved(model, torch.device("meta")):
        assert model[0](on_host, mask=on_host, more={"positions": on_host}) == ["meta"] * 3
    assert model[0](on_host, mask=on_host, more={"positions": on_host}) == ["cpu"] * 3


# ---- a question that FSDP1's root does not answer


def ask_and_gather(model: tiny.TinyModel) -> dict[str, Any]:
    """Ask a model that takes no keyword for one, and gather its root's parameters, as for a generation."""
    import torch
    from accelerate import Accelerator

    from pytest_trlcompat.trainers.fsdp.fsdp_generation import root_parameters_gathered
    from pytest_trlcompat.trainers.logprobs.logits_to_keep import logits_keyword

    whole = model.new_model()

    class Plain(type(whole)):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    whole.__class__ = Plain
    accelerator = Accelerator()
    wrapped = accelerator.prepare_model(whole)
    keyword = logits_keyword(wrapped, device=accelerator.device)
    with root_parameters_gathered(wrapped), torch.no_grad():
        logits = wrapped.module(torch.tensor([[3, 4, 5]], device=accelerator.device)).logits
    return {"keyword": keyword, "shape": tuple(logits.shape)}


def test_a_question_leaves_fsdp1_as_it_was(launch: Launcher, model: tiny.TinyModel) -> None:
    options = {"transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(ask_and_gather, model, strategy="fsdp1", options=options).values:
        assert rank == {"keyword": None, "shape": (1, 3, model.vocab_size)}


def test_the_cache_of_a_vision_models_language_model_counts() -> None:
    from pytest_trlcompat.trainers.fsdp.fsdp_checkpointed_cache import _has_cache

    language = SimpleNamespace(use_cache=True)
    assert _has_cache(language)
    assert _has_cache(SimpleNamespace(get_text_config=lambda: language))
    assert not _has_cache(SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    assert not _has_cache(None)
