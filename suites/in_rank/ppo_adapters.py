"""PPO with an adapter, measured inside a rank: its reference, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.ppo import objects as ppo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["REFERENCES", "adapter_trainings"]

REFERENCES = ("copy", "adapter off")
"""A copy of the policy from before it got its adapter, and the policy with its adapter switched off."""


def adapter_trainings(
    subject: str, model: TinyModel, references: Sequence[str], **settings: Any
) -> dict[str, dict[str, Any]]:
    """Train the same adapter once against each reference, in one process, and save it.

    Args:
        references: some of :data:`REFERENCES`. Only one under ZeRO-3, which partitions the models of a second trainer
            while they are loaded.
        settings: of the adapter, see :func:`~pytest_trlcompat.conformance.ppo.objects.lora`.

    Returns:
        By reference ``log``, the numbers of each step; and on rank 0 of what was trained ``trained`` tensors, ``saved``
        ones in the file, and how many are ``equal``, bitwise.
    """
    return {reference: _train(subject, model, reference, settings) for reference in references}


def _train(subject: str, model: TinyModel, reference: str, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    arguments: dict[str, Any] = {"peft_config": ppo.lora(**settings)}
    if reference == "adapter off":
        arguments["ref_model"] = None
    torch.manual_seed(0)  # of the adapter's weights
    trainer = ppo.build_trainer(subject, model, cls=_past_rollout(subject), arguments=arguments)
    trainer.train()
    trained = {name: tensor for name, tensor in ppo.gathered_policy(trainer).items() if ".default." in name}
    trainer.save_model()
    measured: dict[str, Any] = {"log": ppo.logged(trainer)}
    if not trainer.accelerator.is_main_process:
        return measured
    saved = load_file(Path(trainer.args.output_dir) / "adapter_model.safetensors")
    named = {_name_in_file(name): tensor for name, tensor in trained.items()}
    equal = sum(name in saved and torch.equal(saved[name], tensor) for name, tensor in named.items())
    return {**measured, "trained": len(trained), "saved": len(saved), "equal": equal}


def _name_in_file(name: str) -> str:
    """As PEFT saves it: without the adapter's name, and a module that is saved whole as what it stands for."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _past_rollout(subject: str) -> type:
    from pytest_trlcompat.trainers import PPOFSDPMixin

    # TRL's own trainer gets the cure of ppo-fsdp-rollout, another matter, so that what lies behind is measured.
    chosen = ppo.trainer_class(subject)
    return chosen if subject == "corrected" else type("PPOTrainer", (PPOFSDPMixin, chosen), {})
