"""LlamaFactory's trainings that are held against the reference."""

from __future__ import annotations

from ..cases import Case, Differs

__all__ = ["DPO_CASES", "SFT_CASES"]

CUT = Differs(
    "tokens and labels",
    r"data\[(input_ids|labels)\]",
    "on purpose: prompt and answer are cut in proportion, so that an answer that counts is left",
)
EVALUATED = {"eval_dataset": "rows", "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
SFT_CASES = (
    Case("plain", {}),
    Case("history", {"mask_history": True}),
    Case("prompts", {"train_on_prompt": True}),
    Case("cut", {"cutoff_len": 6}, (CUT,)),
    Case("accumulated", {"gradient_accumulation_steps": 2}),
    Case("evaluated", EVALUATED),
    Case("ranks", {}, strategy="ddp"),
    Case("ranks_accumulated", {"gradient_accumulation_steps": 2}, strategy="ddp"),
)
DPO_CASES = (
    Case("plain", {}),
    Case("ipo", {"pref_loss": "ipo"}),
    Case("hinge", {"pref_loss": "hinge"}),
    Case("likelihood", {"pref_ftx": 0.7}, undecided={"nll_mean": "completions"}),
    Case("smoothed", {"dpo_label_smoothing": 0.2}),
    Case("desensitized", {"ld_alpha": 0.5}),
    Case("accumulated", {"gradient_accumulation_steps": 2}),
    Case("evaluated", EVALUATED),
    Case("ranks", {}, strategy="ddp"),
    Case("ranks_accumulated", {"gradient_accumulation_steps": 2}, strategy="ddp"),
)
