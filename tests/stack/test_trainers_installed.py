"""The corrected GRPO trainer before the installed TRL: right at any temperature, bitwise TRL's where TRL is right."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.training.aliases import accepted


def two_steps(subject: str, model: tiny.TinyModel, temperature: float, more: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms and, for prompts of several lengths, the deviation from a plain full forward pass."""
    import tempfile

    import torch
    import trl
    from transformers import AutoModelForCausalLM
    from trl.trainer import grpo_trainer

    from pytest_trlcompat.trainers import GRPOTrainer

    settings = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "temperature": temperature,
        "beta": 0.1,
        "bf16": False,
        "gradient_checkpointing": False,
        **more,
    }
    if hasattr(grpo_trainer, "create_model_from_path"):  # or upstream loads its reference model onto another device
        settings["model_init_kwargs"] = {"device_map": None}
    policy = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager")
    trainer = (GRPOTrainer if subject == "corrected" else trl.GRPOTrainer)(
        model=policy,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(**accepted(trl.GRPOConfig, settings)),
        train_dataset=tiny.prompts(8, words=(2, 5)),
        processing_class=model.tokenizer,
    )
    trainer.train()
    name = next(
        name
        for name in ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
        if hasattr(trl.GRPOTrainer, name)
    )
    ids = torch.randint(3, model.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0)).to(policy.device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        found = getattr(trainer, name)(policy, ids, mask, 5)
        found = found[0] if isinstance(found, tuple) else found
        full = policy(input_ids=ids, attention_mask=mask).logits[:, -6:-1] / temperature
        expected = full.log_softmax(-1).gather(-1, ids[:, -5:, None]).squeeze(-1)
    logged = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in logged if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in logged if "grad_norm" in entry],
        "logps": found.tolist(),
        "error": (found - expected).abs().max().item(),
    }


@pytest.mark.parametrize(
    ("temperature", "more"),
    [(1.0, {}), (0.6, {"gradient_accumulation_steps": 2}), (0.6, {"gradient_checkpointing": True})],
)
def test_the_installed_trl_is_right_and_left_alone(
    launch: Launcher, tmp_path: Any, temperature: float, more: dict[str, Any]
) -> None:
    if not stack.satisfied({"trl": ">=0.16", "transformers": ">=4.49"}, stack.installed()):
        pytest.skip("upstream is wrong or wasteful with this stack")
    model = tiny.qwen2(directory=tmp_path, initializer_range=0.2)
    upstream, corrected = (
        launch(two_steps, subject, model, temperature, more, strategy="single").values[0]
        for subject in ("upstream", "corrected")
    )
    assert corrected["error"] <= 1e-5
    assert corrected["grad_norms"][0] > 0
    assert corrected == upstream  # bitwise


def test_the_cure_knows_the_methods_of_the_installed_trl() -> None:
    # Fails when TRL renames the method again: the cure would then take it for 0.14.0, which has none.
    import trl

    assert hasattr(trl.GRPOTrainer, "_get_per_token_logps") == stack.satisfied(
        {"trl": ">=0.15,<0.20"}, stack.installed()
    )
    assert hasattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies") == stack.satisfied(
        {"trl": ">=0.20"}, stack.installed()
    )


def test_the_corrected_trainer_takes_what_trl_takes() -> None:
    import trl

    from pytest_trlcompat.trainers import GRPOTrainer

    assert issubclass(GRPOTrainer, trl.GRPOTrainer)
    assert GRPOTrainer.__name__ == "GRPOTrainer"
    assert inspect.signature(GRPOTrainer) == inspect.signature(trl.GRPOTrainer)
