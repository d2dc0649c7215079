"""DPO bodies that the suites launch: they run inside the ranks and return plain numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.adapter import trainer_class
from pytest_trlcompat.conformance.dpo.adapter import ADAPTER
from pytest_trlcompat.training.aliases import accepted, renamed

from .sharding import failure

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["SIDES", "STARTS", "first_losses", "held_parameters", "precomputed", "precomputed_from_files", "save"]

SIDES = ("chosen", "rejected")
FACTORS = (1.0, 0.8)
"""By which the weights of each reference model differ from the policy's."""
SETTING = {"precompute_ref_log_probs": True}
ROWS, PAIRS = "rows", 16
STARTS = (True, "pissa", "olora")
"""Values of ``init_lora_weights``; the first leaves the model as it is, the others change its base weights."""


def save(model: TinyModel, folder: Path) -> list[dict[str, list[float]]]:
    """Save a dataset of pairs, and a reference model for each of :data:`FACTORS` below its number, in one process.

    Returns:
        For each reference model, by ``chosen`` and ``rejected``, the log-probabilities of the pairs' completions.
    """
    import torch

    _rows(model).save_to_disk(str(folder / ROWS))
    expected = []
    for number, factor in enumerate(FACTORS):
        scorer = model.new_model().eval()
        with torch.no_grad():
            for parameter in scorer.parameters():
                parameter.mul_(factor)
        scorer.save_pretrained(folder / str(number))
        expected.append({side: [_score(scorer, model.tokenizer, row, side) for row in _rows(model)] for side in SIDES})
    return expected


def _rows(model: TinyModel) -> Any:
    """Pairs in memory. All prompts have one length, and all completions have one, as some releases lose the end of the
    longest sequence of a batch: ``dpo-lost-token``."""
    from datasets import Dataset

    chosen = random.Random(0)

    def text(words: int) -> str:
        return " ".join(f"w{chosen.randrange(model.words - 8)}" for _ in range(words))

    return Dataset.from_list([{"prompt": text(4), **{side: f" {text(3)}" for side in SIDES}} for _ in range(PAIRS)])


def _score(scorer: Any, words: Any, row: Mapping[str, str], side: str) -> float:
    """The sum of the log-probabilities of a completion's tokens and of its end."""
    import torch

    prompt, completion = (words(row[part], add_special_tokens=False)["input_ids"] for part in ("prompt", side))
    ids = torch.tensor([[*prompt, *completion, words.eos_token_id]])
    with torch.no_grad():
        scores = scorer(input_ids=ids).logits[0, :-1].log_softmax(-1)
    # The prompt's last token predicts the first of the completion.
    return float(scores.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum())


def precomputed(subject: str, model: TinyModel, folder: Path) -> dict[str, Any]:
    """Log-probabilities by the second reference model of a dataset in memory, which are computed before training.

    Returns:
        ``failure``, and in ``found`` by ``chosen`` and ``rejected`` what stands in the trainer's dataset.
    """
    return _of_trainings(subject, model, _rows(model), [folder / "1"])


def precomputed_from_files(subject: str, model: TinyModel, folder: Path) -> dict[str, Any]:
    """Those of a dataset that was loaded from a folder: of a training with one reference model, and of the next one
    with the other."""
    import datasets

    rows = datasets.load_from_disk(str(folder / ROWS))
    return _of_trainings(subject, model, rows, [folder / str(number) for number in range(len(FACTORS))])


def held_parameters(subject: str, model: TinyModel, folder: Path) -> dict[str, Any]:
    """Which parameters a trainer keeps whose reference model is its policy, and was asked before the training.

    Args:
        folder: with the dataset, see :func:`save`.

    Returns:
        ``failure``, and how many numbers are the ``policy``'s, and how many are ``beside`` it.
    """
    import datasets
    from torch import nn

    rows = datasets.load_from_disk(str(folder / ROWS))
    with failure() as building:
        trainer = _built(subject, model, rows, None)
    if building:
        return {"failure": building["text"]}
    # By identity: what the policy and a reference share is one and the same parameter.
    policy_sizes = {id(parameter): parameter.numel() for parameter in trainer.model.parameters()}
    modules = [attribute for attribute in vars(trainer).values() if isinstance(attribute, nn.Module)]
    held = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
    beside = sum(size for name, size in held.items() if name not in policy_sizes)
    return {"failure": None, "policy": sum(policy_sizes.values()), "beside": beside}


def first_losses(subject: str, model: TinyModel) -> dict[str, Any]:
    """Of a training with LoRA and no reference model, the first step for each of :data:`STARTS`.

    Returns:
        ``failure``, and in ``losses`` and ``margins`` the loss and the reward margins that the first step logs.
    """
    result: dict[str, Any] = {"failure": None, "losses": [], "margins": []}
    for start in STARTS:
        with failure() as training:
            entry = _first_step(subject, model, start)
        if training:
            return {**result, "failure": training["text"]}
        result["losses"].append(float(entry["loss"]))
        result["margins"].append(float(entry["rewards/margins"]))
    return result


def _first_step(subject: str, model: TinyModel, start: bool | str) -> dict[str, Any]:
    import tempfile

    import trl
    from peft import LoraConfig

    settings = {
        "output_dir": tempfile.mkdtemp(prefix="trlcompat-"),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "beta": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = trainer_class(subject, "DPOTrainer")(
        model=model.new_model(),
        args=trl.DPOConfig(**accepted(trl.DPOConfig, settings)),
        train_dataset=_rows(model),
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=start),
        **renamed(trl.DPOTrainer, {"processing_class": model.tokenizer}),
    )
    trainer.train()
    entry: dict[str, Any] = trainer.state.log_history[0]
    return entry


def _of_trainings(subject: str, model: TinyModel, rows: Any, references: list[Path]) -> dict[str, Any]:
    result: dict[str, Any] = {"failure": None, "found": []}
    for reference in references:
        with failure() as building:
            trainer = _built(subject, model, rows, reference)
        if building:
            return {**result, "failure": building["text"]}
        result["found"].append(_columns(trainer.train_dataset))
    return result


def _built(subject: str, model: TinyModel, rows: Any, reference: Path | None) -> Any:
    """A trainer that has computed log-probabilities; without a folder its reference model is its policy."""
    import trl
    from transformers import AutoModelForCausalLM

    # Before the models, as users do: ZeRO-3 partitions what is read after it.
    config = ADAPTER.config(trl, SETTING)
    policy = AutoModelForCausalLM.from_pretrained(model.path)
    scorer = {} if reference is None else {"ref_model": AutoModelForCausalLM.from_pretrained(reference)}
    trainer = trainer_class(subject, "DPOTrainer")(
        model=policy,
        **scorer,
        args=config,
        train_dataset=rows,
        **renamed(trl.DPOTrainer, {"processing_class": model.tokenizer}),
    )
    trainer.get_train_dataloader()  # until 0.28 they are computed here
    return trainer


def _columns(rows: Any) -> dict[str, list[float]]:
    columns = {}
    for side in SIDES:
        (name,) = (name for name in (f"ref_{side}_logps", f"reference_{side}_logps") if name in rows.column_names)
        columns[side] = [float(logp) for logp in rows[name]]
    return columns
