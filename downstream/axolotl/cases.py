"""Axolotl's trainings that are held against the reference."""

from __future__ import annotations

from ..cases import Case, Differs

__all__ = ["DPO_CASES", "SFT_CASES"]

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_batch_size": 2}
TRAINED = r"(gradients|weights)\[.*\]|logs\[(grad_norm|loss)\]"
BY_MICRO_BATCH = Differs(
    "gradients",
    TRAINED,
    "wrong: losses are means of each micro-batch, not of the tokens of the step, since `model_accepts_loss_kwargs` is "
    "turned off for every model: [reported](https://github.com/axolotl-ai-cloud/axolotl/pull/3982)",
)
LEFT = Differs(
    "gradients",
    TRAINED,
    "wrong: where the tokenizer pads on the left, the first token of a row is predicted from padding, and counts",
)
DROPPED = Differs("rows", r"data\[(size|order)\]", "on purpose: `excess_length_strategy` is `drop` by default")
MEASURED = Differs(
    "what is logged of an evaluation",
    r"evalua.*\[eval_(memory|tokens)/.*\]",
    "on purpose: memory and throughput are measured of training alone",
)
ACCUMULATED = {"gradient_accumulation_steps": 2}
SFT_CASES = (
    Case("plain", {}),
    Case("prompts", {"train_on_inputs": True}),
    Case("prompts_left", {"train_on_inputs": True}, (LEFT,)),
    Case("cut", {"sequence_len": 6, "excess_length_strategy": "truncate"}),
    Case("dropped", {"sequence_len": 6}, (DROPPED,)),
    Case("accumulated", ACCUMULATED, (BY_MICRO_BATCH,)),
    Case("accumulated_by_micro_batch", ACCUMULATED, undecided={"loss_mean": "micro_batches"}),
    Case("evaluated", EVALUATED, (MEASURED,)),
    Case("ranks", {}, strategy="ddp"),
    Case("ranks_accumulated", ACCUMULATED, (BY_MICRO_BATCH,), strategy="ddp"),
)
DPO_CASES = (
    Case("plain", {}),
    Case("beta", {"rl_beta": 0.7}),
    Case("ipo", {"rl": "ipo"}),
    Case("accumulated", ACCUMULATED),
    Case("evaluated", EVALUATED),
    Case("ranks", {}, strategy="ddp"),
    Case("ranks_accumulated", ACCUMULATED, strategy="ddp"),
)
