"""GRPO with LoRA and gradient checkpointing, measured inside a rank: which parameters learn, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import sequential, weights

from . import grpo, grpo_trainings

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["CHECKPOINTED", "ONE_FORWARD", "STEPS", "VARIANTS", "fill_adapter", "lora_trainings"]

STEPS = 2
"""As many as it takes: ``lora_A`` gets its first gradient when ``lora_B`` has moved away from zero."""

DEFAULT = {"gradient_checkpointing": True}
REENTRANT = {**DEFAULT, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {**DEFAULT, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ONE_FORWARD: Mapping[str, Any] = {"passed": "config", "beta": 0.0, "past_empty_groups": True, "steps": 3}
"""Without a reference model a step has one forward."""
BIASES: Mapping[str, Any] = {"passed": "config", "bias": "lora_only", "optim": "sgd", "learning_rate": 0.5, "steps": 1}
"""Biases of frozen weights learn as well, by SGD, since Adam hides a gradient's scale.

For one step, since then it matters what the reference is: up to trl 0.18 a model of its own under ZeRO-3, and elsewhere
the policy without its adapter, but with the biases that have learned.
"""
WHOLE: Mapping[str, Any] = {
    "passed": "config",
    "head": True,
    "past_empty_groups": True,
    "optim": "sgd",
    "learning_rate": 0.5,
}
"""The output head learns whole, in addition to the adapter."""
# Strategy label -> variants that are judged together, each against the one of its group without checkpointing: of its
# own kind where there is one, else "config". All begin with the same adapter, whoever wraps the model.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "single": {
        "model": {"passed": "model"},
        "model, default": {"passed": "model", **DEFAULT},
        "model, reentrant": {"passed": "model", **REENTRANT},
        "config": {"passed": "config"},
        "config, default": {"passed": "config", **DEFAULT},
        "config, reentrant": {"passed": "config", **REENTRANT},
        "bf16": {"passed": "config", "bf16": True},
        "bf16, default": {"passed": "config", "bf16": True, **DEFAULT},
    },
    "single-not_reentrant": {
        "model, not reentrant": {"passed": "model", **NOT_REENTRANT},
        "config": {"passed": "config"},
        "config, not reentrant": {"passed": "config", **NOT_REENTRANT},
    },
    # Where the head learns as well, adapters that do not learn raise no error.
    "single-head": {
        "config": {"passed": "config", "head": True},
        "config, default": {"passed": "config", "head": True, **DEFAULT},
    },
    "zero2": {"config": {"passed": "config"}, "config, default": {"passed": "config", **DEFAULT}},
    "zero3": {"config": {"passed": "config"}, "config, default": {"passed": "config", **DEFAULT}},
    "single-biases": {"config": BIASES},
    "zero3-biases": {"config": BIASES},
    "single-whole": {"config": WHOLE},
    "zero3-whole": {"config": WHOLE},
    "single-one_forward": {"config": ONE_FORWARD},
    "zero3-one_forward": {"config": ONE_FORWARD},
}
IN_ONE_PROCESS = ("single-one_forward", "single-biases", "single-whole")
"""The labels that are measured only with the corrected trainer, for comparison with others."""
CHECKPOINTED = [label for label, group in VARIANTS.items() if any("," in variant for variant in group)]
"""The labels under which one variant is compared with another."""
# That of the completions that fix_completions puts in place of generated ones.
_LENGTH = grpo_trainings.COMPLETION_LENGTH
_TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora_trainings(subject: str, model: TinyModel, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Train an adapter once for each variant, in one process.

    Args:
        variants: by name; ``passed`` is ``"model"`` for a ready ``PeftModel`` or ``"config"`` for ``peft_config``,
            ``head`` whether the output head learns as well, ``bias`` which biases do (``LoraConfig``), ``steps`` how
            many there are, ``past_empty_groups`` whether TRL's own trainer gets the cure of
            ``deepspeed-empty-param-group``, so that what lies behind can be measured, and the rest are settings of
            ``GRPOConfig``.

    Returns:
        By name what :func:`_train` measured, or ``{"failure": "..."}``. Where ranks fail differently, the rest is
        missing: see :func:`~pytest_trlcompat.conformance.sequential.in_turn`.

    Raises:
        RankDesynchronised: other ranks wait for this one, which failed.
    """
    grpo_trainings.fix_completions(model.vocab_size)

    results: dict[str, Any] = {}
    for name in sequential.in_turn(variants, results):
        results[name] = {}
        with sequential.training() as ended:
            results[name] = _train(subject, model, **variants[name])
        if ended:
            results[name] = {"failure": ended["text"]}
    return results


def _train(
    subject: str,
    model: TinyModel,
    passed: str,
    head: bool = False,
    bias: str = "none",
    steps: int = STEPS,
    past_empty_groups: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=_TARGETS,
        modules_to_save=["lm_head"] if head else None,
        bias=bias,
        task_type="CAUSAL_LM",
    )
    arguments: dict[str, Any] = {"model": grpo.load_policy(model)}
    if passed == "model":
        arguments["model"] = get_peft_model(arguments["model"], config)
    else:
        arguments["peft_config"] = config
    trainer = grpo.build_trainer(
        subject,
        model,
        cls=_with_whole_groups() if past_empty_groups and subject == "upstream" else None,
        arguments=arguments,
        max_steps=steps,
        max_completion_length=_LENGTH,
        **settings,
    )
    named = dict(trainer.model.named_parameters())
    fill_adapter(named)
    learning = [name for name, parameter in named.items() if parameter.requires_grad]
    finite = _watch_gradients({name: named[name] for name in learning})
    before = _whole(named)
    trainer.train()
    after = _whole(named)
    moved = {name for name in named if not torch.equal(before[name], after[name])}
    return {
        "failure": None,
        "trainable": len(learning),
        "without_gradient": sorted(name for name in learning if finite[name] < steps),
        "lora_b": sum("lora_B" in name for name in learning),
        "lora_b_moved": sum("lora_B" in name and name in moved for name in learning),
        "frozen": len(named) - len(learning),
        "frozen_moved": sorted(name for name in moved if name not in learning),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "grad_norm": [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry],
        "checkpointing": _checkpointing(trainer),
        "weights": sum(float(after[name].double().abs().sum()) for name in learning),
    }


def _with_whole_groups() -> type:
    import trl

    from pytest_trlcompat.trainers import EmptyParamGroupsMixin

    return type("GRPOTrainer", (EmptyParamGroupsMixin, trl.GRPOTrainer), {})


def _watch_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, int]:
    """Counts, by name and as training goes on, the gradients that arrive and are finite."""
    counts = dict.fromkeys(parameters, 0)

    def watch(name: str, parameter: torch.nn.Parameter) -> None:
        def count(gradient: torch.Tensor) -> None:
            counts[name] += bool(gradient.isfinite().all())

        parameter.register_hook(count)

    for name, parameter in parameters.items():
        watch(name, parameter)
    return counts


def fill_adapter(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Give every ``lora_A`` weights as PEFT draws them, but the same in every variant."""
    import torch

    adapter = {name: parameter for name, parameter in parameters.items() if "lora_A" in name}
    # By the place in the model, since some releases of TRL copy the adapter for the reference: it gets the same ones.
    places = sorted({name.partition("lora_A")[0] for name in adapter})
    with weights.gathered(adapter.values(), modifier_rank=0), torch.no_grad():
        for name, parameter in adapter.items():
            generator = torch.Generator().manual_seed(places.index(name.partition("lora_A")[0]))
            bound = parameter.shape[1] ** -0.5
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 * bound - bound)


def _whole(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of the parameters on the CPU; collective where ZeRO-3 has partitioned them."""
    with weights.gathered(parameters.values()):
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def _checkpointing(trainer: Any) -> str:
    """Whether layers recompute their activations, and how."""
    for module in trainer.model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            return f"use_reentrant={getattr(function, 'keywords', {}).get('use_reentrant')}"
    return "off"
