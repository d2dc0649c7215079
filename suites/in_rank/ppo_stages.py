"""What the PPO suites measure inside a rank, with the bodies of :mod:`ppo`: plain numbers for a verdict."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import _location
from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.conformance.ppo import objects as ppo

from .sharding import to_bytes

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["accumulated", "deepspeed_by_argument", "reload", "run"]

SAVES = ("constructed", "checkpoint", "final")
WORKAROUNDS = ("workaround_gather", "workaround_swap")
CHECKPOINT_STEP = 1


def run(subject: str, model: TinyModel, folder: Path) -> dict[str, Any]:
    """One trainer from construction to the final save; a stage that fails is recorded, and run goes on.

    Beside every folder that it saves to, rank 0 leaves the gathered policy of that moment, for :func:`reload`.

    Returns:
        ``failures``, stage to exception; ``saved``, stage to folder; ``log``, one entry per step; how many tensors of
        the policy moved.
    """
    stages = _Stages(folder)
    trainer = None
    with stages("construct"):
        trainer = _build(subject, model, folder, stages)
    # Past ppo-accelerate-state, so that what lies behind it can be measured.
    if trainer is None and subject == "upstream":
        with stages("construct_again"):
            trainer = _build(subject, model, folder, stages, before=_forget_accelerator_state)
    if trainer is None:
        return stages.report()
    before = stages.save("constructed", trainer, _save_early)
    with stages("train"):
        trainer.train()
    after = stages.save("final", trainer, lambda trainer, path: trainer.save_model(path))
    if trainer.is_deepspeed_enabled and subject == "upstream":
        stages.save("workaround_gather", trainer, _gather_and_filter)
        stages.save("workaround_swap", trainer, _swap)
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        # At the end, and not under an engine: it resets what Accelerate knows of the strategy.
        with stages("config"):
            ppo.configure_after_grpo(subject)
    return {**stages.report(), "log": ppo.logged(trainer), **_moved(before, after)}


def deepspeed_by_argument(subject: str, model: TinyModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Build a trainer that knows of DeepSpeed by its configuration alone; the engine's ZeRO stage."""
    configuration = ppo.config_class(subject)
    # Past ppo-config-after-grpo, which is another matter.
    past = type(configuration.__name__, (configuration,), {"model_init_kwargs": None})
    trainer = ppo.build_trainer(subject, model, config_cls=past, deepspeed=settings)
    return {"stage": trainer.accelerator.state.deepspeed_plugin.zero_stage, "engine": type(trainer.model).__name__}


def accumulated(subject: str, model: TinyModel, steps: int) -> dict[str, bytes]:
    """One optimizer step of plain SGD over one batch, in ``steps`` micro-batches.

    Returns:
        By how much each tensor of the policy moved, as the bytes of float32 numbers; empty but on rank 0.
    """
    rows = ppo.ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows // steps,
        "gradient_accumulation_steps": steps,
        "total_episodes": ppo.ROWS,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    try:
        trainer = ppo.build_trainer(subject, model, **settings)
    except ValueError:  # ppo-accelerate-state, which is another matter
        if subject == "corrected":
            raise
        trainer = ppo.build_trainer(subject, model, before=_forget_accelerator_state, **settings)
    before = ppo.gathered_policy(trainer)
    trainer.train()
    after = ppo.gathered_policy(trainer)
    if not trainer.accelerator.is_main_process:
        return {}
    return to_bytes({name: tensor.float() - before[name].float() for name, tensor in after.items()})


def reload(saved: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read each folder as a user would, in this fresh process, and compare it with the policy that was saved.

    Args:
        saved: stage to folder.

    Returns:
        For each stage: how many tensors there should be, how many were read bitwise equal, how many of those in the
        file are empty, and the failure of ``from_pretrained`` if it failed.
    """
    return {stage: _reload(Path(path)) for stage, path in saved.items()}


class _Stages:
    """Keeps what happened in each stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: dict[str, dict[str, str]] = {}
        self.saved: dict[str, str] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        import traceback

        try:
            yield
        except Exception as error:
            artefact = artefacts.met(error)
            self.failures[name] = {
                "type": type(error).__name__,
                "text": str(error)[:400],
                "traceback": traceback.format_exc()[-800:],
                "location": _location.of_exception(error),
                **({} if artefact is None else {"artefact": artefact.describe()}),
            }

    def save(self, name: str, trainer: Any, save: Callable[[Any, str], None]) -> dict[str, Any]:
        """Save in one stage; return the policy as it was, on rank 0."""
        policy = self.keep_policy(name, trainer)
        with self(name), _restored(trainer):
            save(trainer, str(self.folder / name))
        return policy

    def keep_policy(self, name: str, trainer: Any) -> dict[str, Any]:
        """Gather the policy and leave it on disk as what a save of this moment must hold."""
        import torch

        policy = ppo.gathered_policy(trainer)
        if trainer.accelerator.is_main_process:
            torch.save(policy, self.folder / f"{name}.pt")
            self.saved[name] = str(self.folder / name)
        return policy

    def report(self) -> dict[str, Any]:
        return {"failures": self.failures, "saved": self.saved}


@contextlib.contextmanager
def _restored(trainer: Any) -> Iterator[None]:
    """Put back what TRL swaps while it saves, and leaves swapped where saving fails."""
    swapped = {name: vars(trainer)[name] for name in ("model", "deepspeed") if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(swapped)


def _build(subject: str, model: TinyModel, folder: Path, stages: _Stages, **more: Any) -> Any:
    class Recording(ppo.trainer_class(subject)):  # type: ignore[misc]
        """Goes on training when its checkpoint fails."""

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step != CHECKPOINT_STEP:
                return
            stages.keep_policy("checkpoint", self)
            with stages("checkpoint"), _restored(self):
                super()._save_checkpoint(*args, **kwargs)
            if self.accelerator.is_main_process:
                stages.saved["checkpoint"] = str(folder / f"checkpoint-{CHECKPOINT_STEP}")

        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            # On rank 0 alone: were it raised, the others would wait for that in the checkpoint.
            with stages("model_card"):
                super().create_model_card(*args, **kwargs)

    return ppo.build_trainer(
        subject,
        model,
        cls=Recording,
        output_dir=str(folder),
        save_strategy="steps",
        save_steps=CHECKPOINT_STEP,
        num_sample_generations=1,
        **more,
    )


def _save_early(trainer: Any, path: str) -> None:
    """Save before training; TRL's own trainer needs what its ``train`` sets first."""
    from pytest_trlcompat import trainers

    if trainer.is_deepspeed_enabled and not isinstance(trainer, trainers.PPOTrainer):
        trainer.deepspeed = trainer.model_wrapped = trainer.model
    trainer.save_model(path)


def _gather_and_filter(trainer: Any, path: str) -> None:
    """The published "scheme one": gather the engine's state, keep the policy's part, save that."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        policy = {name[len("policy.") :]: tensor for name, tensor in state.items() if name.startswith("policy.")}
        trainer.accelerator.unwrap_model(trainer.model).policy.save_pretrained(path, state_dict=policy)


def _swap(trainer: Any, path: str) -> None:
    """The published "scheme two": put the policy in the model's and the engine's place, and save it."""
    if trainer.accelerator.is_main_process:
        trainer.accelerator.unwrap_model(trainer.model).policy.save_pretrained(path)


def _forget_accelerator_state() -> None:
    """The published way past ``ppo-accelerate-state``, so that what lies behind it can be measured."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def _moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    import torch

    moved = sum(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    return {"policy_tensors": len(before), "moved_tensors": moved}


def _reload(path: Path) -> dict[str, Any]:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    # The policy was kept by the name of the stage; Trainer names the folder by its step.
    folder = path if not path.name.startswith("checkpoint-") else path.with_name("checkpoint")
    expected = torch.load(folder.with_suffix(".pt"), weights_only=True)
    report: dict[str, Any] = {"tensors": len(expected), "equal": 0, "empty": 0, "failure": None}
    weights = path / "model.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            # What ZeRO-3 has partitioned and nobody gathered is saved with a size of 0.
            report["empty"] = sum(0 in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").state_dict()
    except Exception as error:
        report["failure"] = artefacts.error_text(error, limit=200)
        return report
    report["equal"] = sum(name in loaded and torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    return report
