"""A reward model with an adapter, trained, saved, and loaded as a user would. Runs inside the ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.adapter import trainer_class
from pytest_trlcompat.conformance.training import own_fields
from pytest_trlcompat.training.aliases import accepted, renamed

from .sharding import failure

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["adapter_loaded"]

_SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-1,
    "max_length": 32,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
_TEXTS = ["w1 w2 w3", "w4 w5 w6"]
_LOADS = 2


def adapter_loaded(subject: str, model: TinyModel) -> dict[str, Any]:
    """Train LoRA on a sequence classifier that begins as a language model, by a ``peft_config`` without a task.

    Returns:
        ``head_trained``: whether a parameter of the head has a gradient; ``trained``: the rewards of two texts, and
        ``loaded``: those of the saved adapter on the same base, each time that it is loaded; or the ``failure``.
    """
    measured: dict[str, Any] = {}
    with failure() as training:
        measured = _measured(subject, model)
    return {"failure": training.get("text"), **measured}


def _measured(subject: str, model: TinyModel) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, PeftModel
    from trl import RewardConfig, RewardTrainer

    from pytest_trlcompat.tiny import preferences

    base, folder = (Path(tempfile.mkdtemp(prefix="trlcompat-")) for _ in range(2))
    model.new_model().save_pretrained(base)
    model.tokenizer.save_pretrained(base)
    with own_fields(RewardConfig):
        args = RewardConfig(**accepted(RewardConfig, {"output_dir": str(folder), **_SETTINGS}))
    torch.manual_seed(0)
    trainer = trainer_class(subject, "RewardTrainer")(
        model=_classifier(base, model),
        args=args,
        train_dataset=preferences(16),
        **renamed(RewardTrainer, {"processing_class": model.tokenizer}),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model(str(folder))
    rows = model.tokenizer(_TEXTS, return_tensors="pt")

    def rewards(classifier: Any) -> list[float]:
        classifier = classifier.eval()
        with torch.no_grad():
            scores: list[float] = classifier(**rows.to(classifier.device)).logits.flatten().tolist()
        return scores

    return {
        "head_trained": any("score" in name and p.requires_grad for name, p in trainer.model.named_parameters()),
        "trained": rewards(trainer.model),
        "loaded": [rewards(PeftModel.from_pretrained(_classifier(base, model), folder)) for _ in range(_LOADS)],
    }


def _classifier(base: Path, model: TinyModel) -> Any:
    """The language model of a folder as a classifier: its head is drawn at random, each time that it is loaded."""
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    classifier.config.pad_token_id = model.tokenizer.pad_token_id
    return classifier
